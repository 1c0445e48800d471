"""The interface of an object store, and the stores that this process has registered for a scheme.

An object appears whole or not at all and is never renamed. Every failure is an `OSError` with a one-line text.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from shardwise.spec.errors import SpecError
from shardwise.spec.run import Timeouts
from shardwise.spec.units import readable_duration

# -- time limits for calls that may never return: they run in a thread, abandoned at the limit -------

LIMIT_SECONDS = Timeouts().checkpoint  # of every wait on a store, where no run says otherwise
CLEANUP_SECONDS = 20.0  # to report a failed save and to clean up after it: neither may hold up training
SILENT_SECONDS = 20.0  # without an answer until it is logged

_logger = logging.getLogger("shardwise.training")
_Answer = TypeVar("_Answer")


class NoAnswer(TimeoutError):
    """A call did not return in time."""


@dataclass(frozen=True)
class Limit:
    seconds: float = LIMIT_SECONDS  # without progress; only uploads report any
    deadline: float = math.inf  # by the monotonic clock, whatever the progress

    def for_all(self) -> Limit:
        """The same limit as a deadline that all retries share, ``seconds`` from now."""
        return Limit(self.seconds, min(self.deadline, time.monotonic() + self.seconds))

    def left(self, since: float) -> float:
        """Seconds until a call whose last progress was at ``since`` is given up."""
        return min(since + self.seconds, self.deadline) - time.monotonic()


USUAL = Limit()
CLEANUP = Limit(CLEANUP_SECONDS)


class PendingAnswer(Future[_Answer]):
    """The result of a call that somebody waits for, with the time of its last progress."""

    def __init__(self) -> None:
        super().__init__()
        self.since = time.monotonic()

    def uploaded(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """Passes on an upload's blocks as long as somebody waits for it: afterwards their memory is reused."""
        for block in blocks:
            if self.cancelled():
                raise ConnectionAbortedError("was given up")
            yield block
            self.since = time.monotonic()

    def settle(self, call: Callable[[Self], _Answer]) -> None:
        try:
            result = call(self)
        except BaseException as error:
            with suppress(InvalidStateError):  # nobody waits any more
                self.set_exception(error)
        else:
            with suppress(InvalidStateError):
                self.set_result(result)


def in_time(uri: str, limit: Limit, call: Callable[[PendingAnswer[_Answer]], _Answer]) -> _Answer:
    """What ``call`` returns or raises within the limit; raises NoAnswer after it.

    The stores' own libraries only limit the silence between two bytes.
    """
    answer: PendingAnswer[_Answer] = PendingAnswer()
    began = answer.since
    threading.Thread(target=answer.settle, args=(call,), name=f"store {uri}", daemon=True).start()
    while not answer.done():
        since = answer.since
        left = limit.left(since)
        if left <= 0:
            if not answer.cancel():
                break
            raise NoAnswer(f"no answer within {readable_duration(time.monotonic() - began)}")
        wait_for([answer], min(SILENT_SECONDS, left))
        if not answer.done() and answer.since == since:
            _logger.warning("%s: no answer for %.0f s", uri, time.monotonic() - since)
    return answer.result()


# -- stores ------------------------------------------------------------------------------------------

Blocks = Callable[[], Iterator[memoryview]]  # each call yields the whole content of an object again
Content = bytes | memoryview


def fresh_bytes(size: int) -> memoryview:
    """Uninitialised memory. numpy asks for huge pages: touching them first costs a third of what small pages do."""
    import numpy as np

    return np.empty(size, np.uint8).data


@dataclass(frozen=True)
class ObjectFacts:
    """Size and time of an object; the fields are named as in `os.stat_result`."""

    st_size: int
    st_mtime_ns: int = 0


class StoreError(OSError):
    """A store failed to do what was asked, after all retries."""

    def __init__(self, uri: str, problem: str) -> None:
        super().__init__(errno.EIO, " ".join(problem.split()), uri)


def refused(field: str, name: str, what: str, error: OSError) -> SpecError:
    """A store's error as an error of the user's ``field``, with what to check."""
    problem = f"{name} {what} ({error.strerror or error})"
    if isinstance(error, PermissionError):
        return SpecError(field, problem, "check the credentials, and what they allow")
    if isinstance(error, FileNotFoundError):
        return SpecError(field, problem, "create the bucket, or check its name")
    return SpecError(field, problem, "check the endpoint and the network")


class ObjectStore(Protocol):
    """Objects by URI. A missing object raises FileNotFoundError, a call that takes too long StoreError."""

    def within(self, limit: Limit) -> Self:
        """The same store with a limit on every call, retries included."""

    def put(self, uri: str, content: bytes) -> None: ...

    def upload(self, uri: str, content: Blocks) -> None:
        """Stores a large object; ``content`` is called again for every retry."""

    def read(self, uri: str, first: int = 0, last: int | None = None) -> Content:
        """The bytes from ``first`` up to ``last``, all of them."""

    def facts(self, uri: str) -> ObjectFacts: ...

    def listed(self, uri: str) -> dict[str, ObjectFacts]:
        """All objects below a prefix, by their names relative to it."""

    def delete(self, uris: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored."""


_REGISTERED: dict[str, ObjectStore] = {}


def register_store(scheme: str, store: ObjectStore) -> None:
    """From now on every URI of ``scheme`` means ``store`` in this process."""
    _REGISTERED[scheme] = store


def registered_store(scheme: str) -> ObjectStore | None:
    return _REGISTERED.get(scheme)
