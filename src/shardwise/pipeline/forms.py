"""What a schedule may know of itself without being built: its closed forms, which stand beside its builder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class EqualStages(NamedTuple):
    """A pipeline of equal stages: p ranks, m microbatches, v chunks per rank, and the seconds of one stage.

    F, I and W are its forward pass and its input and weight gradients, c a message between two stages. ``released`` is
    the share of an activation that the input gradient frees. All but the last may be numpy arrays.
    """

    p: Any
    m: Any
    v: Any
    F: Any
    I: Any  # noqa: E741
    W: Any
    c: Any
    released: float = 0.0

    @property
    def work(self) -> Any:
        """Seconds that a rank works in a step."""
        return self.m * self.v * (self.F + self.I + self.W)

    @property
    def is_even(self) -> bool:
        """Whether all passes take as long, and messages no time."""
        return bool(self.F == self.I == self.W and self.c == 0)


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """``bubble`` is the idle time of the longest rank where messages delay what waits for them and no link is short of
    time; ``in_flight`` takes p, m, v and the rank.

    "Exact" means equal to the simulator. Where it is not, the longer of two estimates counts: passes set the pace
    (``bubble``), or messages do (``pace``; `message_pace` unless a schedule has its own).
    """

    bubble: Callable[[EqualStages], Any]
    in_flight: Callable[[int, int, int, int], int]
    is_exact: Callable[[EqualStages], bool] = lambda case: False
    any_messages: bool = False  # ``bubble`` is right for short messages and for long ones
    pace: Callable[[EqualStages], Any] | None = None  # seconds of a step that messages set the pace of
