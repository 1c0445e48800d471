"""Time limits for calls to a store that may never return: they run in a thread, which is abandoned at the limit."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, TypeVar

from shardwise.spec.run import Timeouts
from shardwise.spec.units import readable_duration

LIMIT_SECONDS = Timeouts().checkpoint  # of every wait on a store, where no run says otherwise
CLEANUP_SECONDS = 20.0  # to report a failed save and to clean up after it: neither may hold up training
SILENT_SECONDS = 20.0  # without an answer until it is logged

_logger = logging.getLogger("shardwise.training")
_Answer = TypeVar("_Answer")


class NoAnswer(TimeoutError):
    """A call did not return in time."""


@dataclass(frozen=True)
class Limit:
    """How long a call may take."""

    seconds: float = LIMIT_SECONDS
    """Without progress; only uploads report any."""
    deadline: float = math.inf
    """By the monotonic clock, whatever the progress."""

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
