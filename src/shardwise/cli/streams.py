"""Standard output and error as pipes whose reader may leave before the command has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, TypeVar, cast

T = TypeVar("T")


class ReaderGone(Exception):
    """Nobody reads standard output any more (head, less): no failure of what was printed.

    It is no OSError: a broken pipe anywhere else is a failure, and must not be taken for this.
    """


class _PipedStream:
    """A stream that drops what nobody reads; ``tells``: with the first of it, it raises ReaderGone."""

    def __init__(self, stream: TextIO, *, tells: bool) -> None:
        self._stream, self._tells = stream, tells

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._tried(self._stream.flush, None)

    def _tried(self, call: Callable[[], T], dropped: T) -> T:
        try:
            return call()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for what the interpreter flushes when it ends
            os.close(nowhere)
            if self._tells:
                raise ReaderGone from None
            return dropped


@contextmanager
def piped_streams(out: TextIO, error: TextIO) -> Iterator[None]:
    """Within it a reader of standard output that leaves is ReaderGone; one of standard error is not missed."""
    outward, beside = _PipedStream(out, tells=True), _PipedStream(error, tells=False)
    with redirect_stdout(cast(TextIO, outward)), redirect_stderr(cast(TextIO, beside)):
        try:
            yield
        finally:
            with suppress(ReaderGone):
                outward.flush()
