"""Runs the driver of Ray in a process of its own.

Ray writes errors to standard error even if nothing is wrong, and exits with status 1, at any line, when it loses its
cluster. Here both happen in a child process, whose last words become one line of ours.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

from shardwise.run.attempt import die_with
from shardwise.spec.errors import SpecError, shown

_END_SECONDS = 10.0  # to leave the cluster
_EMITTED, _RETURNED = "emitted", "returned"
REMEDY = "run the same command again: it goes on from there"


class StageFailed(SpecError):
    status = 1


def run_driver(work: Callable[[Callable[[int], None]], Any], emit: Callable[[int], None]) -> Any:
    """What ``work`` returns; ``emit`` gets what it emits. Raises its SpecError, or StageFailed if Ray ends it."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as words, Connection(ours.detach()) as connection:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=words, stderr=words,
                start_new_session=True,  # Ctrl-C is for this process
            )  # fmt: skip
        try:
            with suppress(ConnectionError):  # the child has ended, as the first message shows
                connection.send(work)
            while (message := _received(connection)) is not None and message[0] == _EMITTED:
                emit(message[1])
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
        finally:
            status = _left(process)
        if message is None:
            raise _ended(status, words)
        if isinstance(message[1], SpecError):
            raise message[1]
        return message[1]


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return None


def _left(process: subprocess.Popen[bytes]) -> int:
    """The exit status of the child, which is given some time to end."""
    try:
        return process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _ended(status: int, words: IO[bytes]) -> StageFailed:
    words.seek(0)
    lines = words.read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    why = re.sub(r"^\[[^]]*\] \S+: ", "", last).partition(". ")[0]  # [time, level, thread] file:line: its words. More.
    return StageFailed("⟨on=ray⟩", f"Ray's driver ended with status {status} ({shown(why, 200)})", REMEDY)


def _main(handle: int, parent: int) -> None:
    die_with(parent)
    connection = Connection(handle)
    work = connection.recv()
    try:
        result = work(lambda done: connection.send((_EMITTED, done)))
    except SpecError as error:
        result = error
    connection.send((_RETURNED, result))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
