"""A file that grows, copied to standard output as it does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.3


class Tail:
    """`new` returns the text appended since the last call; "" if there is no file yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                appended = file.read()
        except OSError:
            return ""
        self._at += len(appended)
        return appended.decode("utf-8", "replace")


@contextmanager
def printed_as_it_grows(path: Path) -> Iterator[None]:
    tail, done = Tail(path), threading.Event()

    def follow() -> None:
        while not done.wait(POLL_SECONDS):
            _print(tail.new())

    thread = threading.Thread(target=follow, name="tail", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _print(tail.new())


def _print(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
