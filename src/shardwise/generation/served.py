"""A model on several ranks of a node that load it once and generate batch after batch.

The ranks are child processes of this one, which gives every batch to all of them. They end when it does, at the latest
after their current batch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from shardwise.generation.request import Generated, GenerationRequest, GenerationTimes
from shardwise.launch.owned import OwnedFolder
from shardwise.spec.errors import SpecError

_LOOK_SECONDS = 3600.0
_VICTIM_SECONDS = 2.0


class RankGone(Exception):
    """A rank has ended, and the others wait for it in vain."""


class ServedModel:
    """``request.tp`` ranks with a part of the model each; ``load_seconds`` is how long the slowest took to load."""

    def __init__(self, request: GenerationRequest) -> None:
        self._folder = OwnedFolder("served")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            for rank in range(request.tp):
                self._start(rank)
                self._connections[rank].send((rank, request, str(self._folder.path / "meeting")))
            self.load_seconds = max(self._answers())
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> None:
        """Starts a rank with a socket that no other inherits, so that all notice when this process ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            python_path = os.pathsep.join(filter(None, sys.path))  # where Ray's processes find our code
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": python_path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def run_batch(self, prompts: Sequence[Sequence[int]], first: int) -> tuple[list[Generated], GenerationTimes]:
        """What is generated after the prompts; raises RankGone if a rank was lost, which makes the others useless."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # `_answers` finds out
                connection.send((prompts, first))
        answer: tuple[list[Generated], GenerationTimes] = self._answers()[0]
        return answer

    def _answers(self) -> list[Any]:
        """The answer of every rank; raises what one has raised."""
        answers: dict[int, Any] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            for connection in wait(list(waiting), _LOOK_SECONDS):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    answers[rank] = self._connections[rank].recv()
                except (EOFError, OSError):
                    raise RankGone(f"rank {rank} of {len(self._processes)} has ended") from None
                if isinstance(answers[rank], Exception):
                    self._raise(answers[rank])
        return [answers[rank] for rank in range(len(self._processes))]

    def _raise(self, error: Exception) -> NoReturn:
        """Raises a rank's error, or RankGone if it is due to a rank that has ended, which may show a moment later."""
        deadline = time.monotonic() + _VICTIM_SECONDS
        while not isinstance(error, SpecError) and time.monotonic() < deadline:
            if any(process.poll() is not None for process in self._processes):
                raise RankGone(str(error))
            time.sleep(0.05)
        raise error

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.close()


def _serve(connection: Connection) -> None:
    """The life of a rank, until the other end closes."""
    import torch

    from shardwise.engine.mesh import process_group
    from shardwise.generation.ranks import EXCHANGE_SECONDS, Clock, loaded, opened_weights, run_batch

    rank, request, meeting = connection.recv()
    if request.device == "cpu":
        torch.set_num_threads(1)  # a core for every rank
    with process_group(rank, request.tp, meeting, device=request.device, seconds=EXCHANGE_SECONDS):
        began = time.perf_counter()
        model = loaded(opened_weights(request), request.tp, request.device)
        load_seconds = time.perf_counter() - began
        connection.send(load_seconds)
        while True:
            prompts, first = connection.recv()
            clock = Clock(load_seconds)
            generated = run_batch(model, prompts, request, first, clock, lambda step: None)
            connection.send((generated, clock.times()) if rank == 0 else None)


def main(handle: int) -> NoReturn:
    connection = Connection(handle)
    with contextlib.suppress(EOFError, OSError):  # the other end is gone
        try:
            _serve(connection)
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send(error if isinstance(error, SpecError) else RuntimeError(f"{type(error).__name__}: {error}"))
            connection.recv()  # until the other end has received it
    os._exit(0)  # without a barrier: the others do the same


if __name__ == "__main__":
    main(int(sys.argv[1]))
