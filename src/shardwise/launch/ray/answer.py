"""Questions to a Ray cluster, for a limited time: for a lost one Ray would wait in a call that nothing ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from shardwise.spec.errors import SpecError

T = TypeVar("T")
END_SECONDS = 5.0  # to leave a cluster
ANSWER_SECONDS = 20.0  # as for a host over ssh
_LOOK_SECONDS = 0.1


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Calls it for so long at most, whatever becomes of it: a cluster that is lost needs no farewell."""
    with suppress(Exception):
        answer(call, seconds)
        return True
    return False


def answer(call: Callable[[], T], seconds: float = ANSWER_SECONDS, stopped: Callable[[], bool] = lambda: False) -> T:
    """What Ray answers; raises SpecError if it does not in time, or ``stopped`` before."""
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
            raise SpecError("--on ray", problem, "`ray status --address ...` must work here")
        thread.join(_LOOK_SECONDS)
    if raised:
        raise raised[0]
    return answers[0]
