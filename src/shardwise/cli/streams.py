"""Standard output and error that may fail: pipes whose reader leaves early, files on a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, TypeVar, cast

from shardwise.spec.errors import SpecError

T = TypeVar("T")


class ReaderGone(Exception):
    """Nobody reads standard output any more (head, less), which is not a failure of the command.

    It is not an OSError, so that a broken pipe anywhere else, which is a failure, is not mistaken for it.
    """


class _PipedStream:
    """A stream that drops what cannot be written; if it ``tells``, the first failure raises ReaderGone or SpecError."""

    def __init__(self, stream: TextIO, *, tells: bool) -> None:
        self._stream, self._tells = stream, tells

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text), len(text))

    def flush(self) -> None:
        self._tried(self._stream.flush, None)

    def end(self) -> None:
        """Flushes; discards the rest if that fails, since the interpreter's own flush would change the exit status."""
        try:
            self._stream.flush()
        except OSError:
            self._lead_nowhere()

    def _tried(self, call: Callable[[], T], dropped: T) -> T:
        try:
            return call()
        except OSError as error:
            if not self._tells:
                return dropped
            self._lead_nowhere()
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from None
            reason = f"cannot be written ({error.strerror})"
            raise SpecError("standard output", reason, "make room, or name another file") from None

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def piped_streams(out: TextIO, error: TextIO) -> Iterator[None]:
    """While open, a lost reader of standard output raises ReaderGone; text lost on standard error is ignored."""
    outward, beside = _PipedStream(out, tells=True), _PipedStream(error, tells=False)
    with redirect_stdout(cast(TextIO, outward)), redirect_stderr(cast(TextIO, beside)):
        try:
            yield
        finally:
            outward.end()
            beside.end()
