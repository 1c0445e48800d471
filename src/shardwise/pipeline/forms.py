"""Closed forms of a schedule: its bubble and its activations in flight as formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.collectives.arrays import maximum
from shardwise.spec.schedules import ScheduleRecord, schedule_record


class EqualStages(NamedTuple):
    """A pipeline of equal stages: p ranks, m microbatches, v chunks per rank, and the seconds of one stage.

    F, I and W are its forward pass and its input and weight gradients, c a message between two stages. ``released`` is
    the share of an activation that the input gradient frees. All but ``released`` may be numpy arrays.
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
        """Seconds that a rank computes in a step."""
        return self.m * self.v * (self.F + self.I + self.W)

    @property
    def is_even(self) -> bool:
        """Whether all passes take equally long, and messages no time."""
        return bool(self.F == self.I == self.W and self.c == 0)


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """The formulas of one schedule. "Exact" means equal to the simulator.

    ``bubble`` is the idle time of the longest rank if passes set the pace, ``pace`` its time if messages do (by default
    `paced_by_messages`). Unless the bubble is right for messages of any length, the longer of the two counts.
    """

    bubble: Callable[[EqualStages], Any]
    in_flight: Callable[[int, int, int, int], int]  # of p, m, v and the rank
    is_exact: Callable[[EqualStages], bool] = lambda case: False
    any_messages: bool = False  # ``bubble`` is right for short messages and for long ones
    pace: Callable[[EqualStages], Any] | None = None


# -- Steps paced by messages, for equal stages -------------------------------------------------------
# A link leads from one rank to another and carries one message at a time. Once the first microbatch has made its round
# trip, every other one adds at least its time on the busiest link; or, where the number in flight is limited, its share
# of a round trip. All arguments but names may be numpy arrays.


def messages_per_link(name: str, ranks: Any, chunks: Any) -> Any:
    """Messages of one microbatch over the busiest link, in one direction.

    Two interleaving ranks send each other both activations and gradients, as neighbours in a V do.
    """
    if schedule_record(name).ends_meet:
        return chunks
    return chunks + (chunks - 1) * (ranks == 2)


def paced_by_messages(case: EqualStages, record: ScheduleRecord, by_round_trips: Any = 0.0) -> Any:
    """Seconds of the longest rank if it always waits for messages and never for passes.

    ``by_round_trips`` (`in_round_trips`) is the time added by microbatches that enter only when another has returned;
    needed only where that limits a schedule more than its links and passes do.
    """
    p, m, v, c = case.p, case.m, case.v, case.c
    first_round_trip = p * v * (case.F + case.I) + case.W + 2 * (p - 1) * v * c
    entering = 2 if record.two_copies else 1  # one at each end
    by_links = maximum(0, m - entering) * messages_per_link(record.name, p, v) * c
    return first_round_trip + maximum(by_links, by_round_trips)


def in_round_trips(case: EqualStages, in_flight: Any, held: Any) -> Any:
    """Seconds added by a limit of ``in_flight`` chunks; ``held`` is how long the chunks of a microbatch are held."""
    return maximum(0.0, case.m - in_flight / case.v) * held / in_flight


def one_f_one_b_wait(p: Any, m: Any, there_and_back: Any, c: Any) -> Any:
    """Seconds that 1F1B waits for messages: the first round trip, then (p-1)/p of one for every further microbatch.

    Exact for any m (the form 2(p-1)m/p + 2(p-2) only if p divides m). Of the microbatches that enter together, the
    second is the first to queue behind a message, unless a stage takes longer ``there_and_back``.
    """
    messages = 2 * (p - 1) + 2 * ((m - 1) * (p - 1) // p)
    return messages * c + ((m - 1) % p == 1) * maximum(0.0, c - there_and_back)
