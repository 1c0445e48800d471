"""An agent at the other end of Ray: an actor starts it in its bundle, and carries its lines as ssh does for hosts.

The agent ends its ranks when its input ends, so no rank outlives the actor, its node or the launcher. Calls to Ray are
limited in time here: for a lost cluster Ray itself would wait forever.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from shardwise.spec.errors import SpecError

T = TypeVar("T")
END_SECONDS = 5.0  # to leave a cluster
ANSWER_SECONDS = 20.0  # as for a host over ssh
_LOOK_SECONDS = 0.1


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether ``call`` returned within ``seconds``; errors are ignored: a cluster that is lost needs no farewell."""
    with suppress(Exception):
        answer(call, seconds)
        return True
    return False


def answer(call: Callable[[], T], seconds: float = ANSWER_SECONDS, stopped: Callable[[], bool] = lambda: False) -> T:
    """What ``call`` returns; raises SpecError if Ray does not answer in time, or if ``stopped`` before."""
    answers: list[T] = []
    raised: list[Exception] = []

    def called() -> None:
        try:
            answers.append(call())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=called, name="asks Ray", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        if time.monotonic() >= deadline or stopped():
            problem = f"the cluster has not answered for {seconds:g} s: its head may be lost"
            raise SpecError("⟨on=ray⟩", problem, "`ray status --address ...` must work here")
        thread.join(_LOOK_SECONDS)
    if raised:
        raise raised[0]
    return answers[0]


_READ_SECONDS = 0.5  # that a call waits for a line
LOST = -1  # the status of an agent whose actor is gone
# The actor reads while it writes; each in the order of the calls.
READING, WRITING = "reading", "writing"
GROUPS = {READING: 1, WRITING: 1}


class AgentActor:
    """Runs on the node, under the cluster's own Python."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # set by Ray
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._agent = subprocess.Popen(
            [sys.executable, "-m", module], env={**own, **environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def write(self, line: bytes) -> None:
        """Passes a line to the agent; an empty one ends its input."""
        assert self._agent.stdin is not None
        if not line:
            self._agent.stdin.close()
            return
        self._agent.stdin.write(line)
        self._agent.stdin.flush()

    def read(self) -> tuple[list[bytes], int | None, str]:
        """New lines; after the last of them the agent's exit status and what it printed to standard error."""
        lines: list[bytes] = []
        try:
            line = self._lines.get(timeout=_READ_SECONDS)
            while line is not None:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return lines, None, ""
        status = self._agent.wait()
        self._errors.seek(0)
        return lines, status, self._errors.read().decode("utf-8", "replace")

    def _listen(self) -> None:
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            self._lines.put(line)
        self._lines.put(None)


class RayPipe:
    """Makes the actor look like a local process: the agent reads ``stdin``, and its lines come out of ``stdout``."""

    pid = 0

    def __init__(self, actor: Any, log: Path) -> None:
        self._actor, self._log = actor, log
        self.returncode: int | None = None
        self._ended = threading.Event()
        self.stdin: IO[bytes] | None
        self.stdout: IO[bytes] | None
        from_here, self.stdin = _pipe()
        self.stdout, to_here = _pipe()
        threading.Thread(target=self._send, args=(from_here,), name="to Ray", daemon=True).start()
        threading.Thread(target=self._receive, args=(to_here,), name="from Ray", daemon=True).start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the agent", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        import ray

        within(END_SECONDS, lambda: ray.kill(self._actor))  # it may be gone, or the cluster
        self._end(LOST, "ended by the launcher")

    def _send(self, lines: IO[bytes]) -> None:
        write = self._actor.write.options(concurrency_group=WRITING)
        with lines, suppress(Exception):  # `_receive` notices that the actor is lost
            for line in lines:
                write.remote(line)
            write.remote(b"")

    def _receive(self, to_here: IO[bytes]) -> None:
        import ray

        read = self._actor.read.options(concurrency_group=READING)
        with to_here:
            while not self._ended.is_set():
                try:
                    lines, status, errors = ray.get(read.remote())
                except Exception as error:  # Ray's many kinds of lost actors, nodes and connections
                    lines_of = (line.strip() for line in str(error).splitlines())  # a table of ids is below the first
                    self._end(LOST, next(filter(None, lines_of), type(error).__name__))
                    return
                to_here.write(b"".join(lines))
                to_here.flush()
                if status is not None:
                    self._end(status, errors)

    def _end(self, status: int, words: str) -> None:
        if self.returncode is None:
            self._log.write_text(words, encoding="utf-8")
            self.returncode = status
        self._ended.set()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
