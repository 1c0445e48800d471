"""The training thread, cut into segments: a moment belongs to the innermost enclosing range that names a part."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.engine.labels import WHOLE_PHASES, Label, label_of
from shardwise.training.profile.record import HOST, NamedRange, RankRecord


@dataclass(frozen=True)
class Segment:
    """``layer``: the forward pass of a layer that it is a part of, if any."""

    start: float
    end: float
    part: str
    layer: NamedRange | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Step:
    """One step on one rank: its ranges on the thread that trains, and the same time in segments without gaps.

    Evaluation is no part of it.
    """

    number: int
    start: float
    end: float
    ranges: tuple[NamedRange, ...]
    beside: tuple[NamedRange, ...]  # what the backend does on threads of its own
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.segments)

    def segments_in(self, within: NamedRange) -> Sequence[Segment]:
        """Those that overlap a range."""
        first = bisect_right(self._ends, within.start)
        return self.segments[first : bisect_left(self._starts, within.end)]

    @cached_property
    def _starts(self) -> list[float]:
        return [one.start for one in self.segments]

    @cached_property
    def _ends(self) -> list[float]:
        return [one.end for one in self.segments]


def steps_of(record: RankRecord) -> tuple[Step, ...]:
    """The steps of a rank's record, in order; a step that was run again after a roll-back counts once."""
    host = [one for one in record.ranges if one.lane == HOST]
    steps = {label_of(one.name).number: one for one in host if label_of(one.name).kind == "step"}
    found = []
    for number, step in sorted(steps.items()):
        inside = _without_inner([one for one in host if step.start <= one.start and one.end <= step.end])
        beside = [
            one for one in record.ranges if label_of(one.name).kind == "backend" and step.start <= one.start <= step.end
        ]
        segments = tuple(one for one in _segments(inside) if one.part != "evaluation")
        found.append(Step(number, step.start, step.end, tuple(inside), tuple(beside), segments))
    return tuple(found)


def _without_inner(ranges: Sequence[NamedRange]) -> list[NamedRange]:
    """Without what lies inside an evaluation or a checkpoint."""
    kept: list[NamedRange] = []
    closed = float("-inf")
    for one in ranges:
        if one.start >= closed:
            kept.append(one)
            closed = one.end if label_of(one.name).part in WHOLE_PHASES else closed
    return kept


def _segments(ranges: Sequence[NamedRange]) -> Iterator[Segment]:
    """``ranges`` come by their starts, an outer one before what it holds."""
    open_ranges: list[tuple[NamedRange, str, NamedRange | None]] = []
    now = ranges[0].start

    def until(moment: float) -> Iterator[Segment]:
        nonlocal now
        while open_ranges and open_ranges[-1][0].end <= moment:
            done, part, layer = open_ranges.pop()
            if done.end > now:
                yield Segment(now, done.end, part, layer)
                now = done.end
        if open_ranges and moment > now:
            _, part, layer = open_ranges[-1]
            yield Segment(now, moment, part, layer)
            now = moment

    for one in ranges:
        yield from until(one.start)
        label = label_of(one.name)
        _, around, layer = open_ranges[-1] if open_ranges else (one, "host", None)
        open_ranges.append((one, label.part or around, _layer(label, one, layer, open_ranges)))
    yield from until(float("inf"))


def _layer(
    label: Label,
    one: NamedRange,
    around: NamedRange | None,
    open_ranges: Sequence[tuple[NamedRange, str, NamedRange | None]],
) -> NamedRange | None:
    """A layer that runs again in a backward pass is no forward pass."""
    if label.kind != "layer":
        return around
    again = any(label_of(outer.name).pass_kind == "backward" for outer, _, _ in open_ranges)
    return None if again else one
