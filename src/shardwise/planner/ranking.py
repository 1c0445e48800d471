"""Which strategy comes first: of those that noise does not tell apart the simplest, then the others by time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwise.cost.memory.room import fit_of
from shardwise.cost.validation.residuals import Noise, error_bar, noise_of
from shardwise.planner.candidate import Candidate, Degrees, complexity

Group = Literal["within noise", "slower"]
GROUPS: tuple[Group, ...] = ("within noise", "slower")


@dataclass(frozen=True)
class Row:
    """The first strategy of a layout; ``like`` are those of layouts that only add dimensions to the same idea."""

    group: Group
    best: Candidate
    like: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Simulated strategies of one job, best first: those within ``noise`` of the fastest, then the others."""

    candidates: tuple[Candidate, ...]
    noise: Noise

    @cached_property
    def fastest(self) -> Candidate:
        return min(self.candidates, key=lambda one: one.seconds_per_token)

    def group_of(self, one: Candidate) -> Group:
        near = one.seconds_per_token <= self.fastest.seconds_per_token * (1 + self.noise.share)
        return "within noise" if near else "slower"

    @cached_property
    def layouts(self) -> tuple[Candidate, ...]:
        """The first strategy of every layout (tp, cp, pp, dp, ep)."""
        first: dict[Degrees, Candidate] = {}
        for one in self.candidates:
            first.setdefault(one.degrees, one)
        return tuple(first.values())

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The layouts, near-duplicates under the one that they repeat; the fastest always has a row of its own."""
        rows: list[Row] = []
        for one in self.layouts:
            group = self.group_of(one)
            for number, row in enumerate(rows):
                if one.degrees != self.fastest.degrees and row.group == group and self._repeats(row.best, one):
                    rows[number] = Row(group, row.best, (*row.like, one))
                    break
            else:
                rows.append(Row(group, one))
        return tuple(rows)

    def _repeats(self, first: Candidate, other: Candidate) -> bool:
        """Whether the other has all dimensions of the first, takes as long within noise and clearly saves no memory."""
        as_long = other.seconds_per_token <= first.seconds_per_token * (1 + self.noise.share)
        most_bytes = other.memory.total * (1 + error_bar(other.job).memory_high)
        return set(first.dimensions) <= set(other.dimensions) and as_long and most_bytes >= first.memory.total


def ranked(candidates: Iterable[Candidate]) -> Ranking:
    """The strategies in the order in which to try them."""
    by_time = sorted(candidates, key=lambda one: one.seconds_per_token)
    noise = noise_of(by_time[0].job)
    limit = by_time[0].seconds_per_token * (1 + noise.share)
    near = [one for one in by_time if one.seconds_per_token <= limit]
    first = sorted(_simplest_of_layouts(near), key=_difficulty)
    taken = {id(one) for one in first}
    return Ranking((*first, *(one for one in by_time if id(one) not in taken)), noise)


def _simplest_of_layouts(by_time: Sequence[Candidate]) -> Iterator[Candidate]:
    """Of each layout the simplest strategy; of several as simple the fastest."""
    simplest: dict[Degrees, Candidate] = {}
    for one in by_time:
        known = simplest.get(one.degrees)
        if known is None or complexity(one.job.strategy) < complexity(known.job.strategy):
            simplest[one.degrees] = one
    yield from simplest.values()


def _difficulty(one: Candidate) -> tuple[float, ...]:
    """Fewest dimensions first, then what a framework can express, then plain choices, then what fits if memory is more.

    What is left then goes by time, and where that ties (as it is printed) by the memory left.
    """
    lacks_room = fit_of(one.job) != "fits"
    printed_seconds = float(f"{one.seconds_per_token:.3g}")
    choices = complexity(one.job.strategy)
    return len(one.dimensions), not said_by_a_framework(one), choices, lacks_room, printed_seconds, -one.margin_bytes


def why_behind(first: Candidate, other: Candidate) -> str:
    """What puts the other behind the first, of two that noise does not tell apart."""
    reasons = (
        "has more dimensions",
        "no framework's configuration can express it",
        "is less plain",
        "may not fit if its memory is more than predicted",
        "is no simpler",
        "leaves less memory",
    )
    return next((why for why, a, b in zip(reasons, _difficulty(first), _difficulty(other)) if a < b), reasons[-2])


def said_by_a_framework(one: Candidate) -> bool:
    """Whether some framework's configuration can express the strategy; formats and the like are its own affair."""
    from shardwise.interop.frameworks import TARGETS, lacking  # tables that only a plan needs

    return any(all(not lost.of_strategy for lost in lacking(one.job, name)) for name in TARGETS)
