"""What a schedule may know of itself without being built: its closed forms, which stand beside its builder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.collectives.arrays import maximum
from shardwise.spec.schedules import ScheduleRecord, schedule_record


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


# -- Steps whose pace messages set, not passes: by formula, for equal stages -------------------------
# A link leads from one rank to another and carries one message after the other. Once the first microbatch has made its
# round trip, every other one adds at least what the busiest link takes for it; or, where only so many may be in
# flight, its share of a round trip. All arguments but names may be numpy arrays.


def messages_per_link(name: str, ranks: Any, chunks: Any) -> Any:
    """Messages of one microbatch over the busiest link, in one direction.

    Of two ranks that interleave, each sends the other activations and gradients, as neighbours in a V do.
    """
    if schedule_record(name).ends_meet:
        return chunks
    return chunks + (chunks - 1) * (ranks == 2)


def paced_by_messages(case: EqualStages, record: ScheduleRecord, by_round_trips: Any = 0.0) -> Any:
    """Seconds of the longest rank where messages are so long that every wait for passes is over before theirs.

    ``by_round_trips`` is what those microbatches add that enter only when another is back (`in_round_trips`). No other
    schedule is held up by that more than by its links, or by its passes.
    """
    p, m, v, c = case.p, case.m, case.v, case.c
    first_round_trip = p * v * (case.F + case.I) + case.W + 2 * (p - 1) * v * c
    entering = 2 if record.two_copies else 1  # at its two ends, one each
    by_links = maximum(0, m - entering) * messages_per_link(record.name, p, v) * c
    return first_round_trip + maximum(by_links, by_round_trips)


def in_round_trips(case: EqualStages, in_flight: Any, held: Any) -> Any:
    """What a limit of ``in_flight`` chunks adds, which share the time ``held`` of the chunks of one microbatch."""
    return maximum(0.0, case.m - in_flight / case.v) * held / in_flight


def one_f_one_b_wait(p: Any, m: Any, there_and_back: Any, c: Any) -> Any:
    """Seconds that 1F1B waits for messages: the first round trip, then (p-1)/p of one for every further microbatch.

    Exact for any m (the form 2(p-1)m/p + 2(p-2) is so only when p divides m). Of the microbatches that enter together
    the second is the first to meet a message on its link, if a stage does not take longer ``there_and_back``.
    """
    messages = 2 * (p - 1) + 2 * ((m - 1) * (p - 1) // p)
    return messages * c + ((m - 1) % p == 1) * maximum(0.0, c - there_and_back)
