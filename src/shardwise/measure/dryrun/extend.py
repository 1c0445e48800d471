"""Extrapolates from a few traced layers and microbatches to all of them: each adds the same amount to every count.

Memory is extrapolated place by place, since each place has its own peak. Layers near the front of a stage are matched
with layers near the front of the larger one, layers near the back with those near the back, and likewise the first and
the last microbatches. Between them memory changes linearly from layer to layer, and not at all from microbatch to
microbatch: so the peak of a pass is never in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwise.measure.dryrun.memory import LayerKind, StepPlace
from shardwise.measure.dryrun.result import Bytes

Kind = tuple[int, LayerKind]  # stage, kind of layer
Key = TypeVar("Key")
Moments = Mapping[StepPlace, Sequence[Bytes]]


@dataclass(frozen=True)
class TracedShape:
    """How much is traced: the number of layers of every kind in every stage of the rank, and of microbatches."""

    layers: tuple[tuple[Kind, int], ...]
    microbatches: int

    def of(self, kind: Kind) -> int:
        return dict(self.layers)[kind]

    def with_one_more(self, kinds: frozenset[Kind]) -> TracedShape:
        return replace(self, layers=tuple((kind, number + (kind in kinds)) for kind, number in self.layers))

    def with_microbatches(self, number: int) -> TracedShape:
        return replace(self, microbatches=number)


@dataclass(frozen=True)
class Extension:
    """Which shapes are traced, to extrapolate to ``whole`` from their differences."""

    whole: TracedShape
    small: TracedShape
    more_microbatches: int  # every shape is also traced with this many microbatches
    groups: tuple[frozenset[Kind], ...]  # kinds of equally many layers: one more of each is traced together

    @property
    def shapes(self) -> list[TracedShape]:
        """All shapes that have to be traced."""
        with_layers = [self.small, *(self.small.with_one_more(group) for group in self.groups)]
        if self.small.microbatches == self.whole.microbatches:
            return with_layers
        return [*with_layers, *(shape.with_microbatches(self.more_microbatches) for shape in with_layers)]

    def extended(self, numbers_of: Callable[[TracedShape], Mapping[Key, float]]) -> dict[Key, float]:
        """The numbers of ``whole``, extrapolated linearly in every kind of layer and in the microbatches."""
        result = self._over_layers(numbers_of, self.small.microbatches)
        if self.small.microbatches == self.whole.microbatches:
            return result
        more = self._over_layers(numbers_of, self.more_microbatches)
        steps = (self.whole.microbatches - self.small.microbatches) / (self.more_microbatches - self.small.microbatches)
        return _sum(result, _sum(more, result, -1), steps)

    def _over_layers(
        self, numbers_of: Callable[[TracedShape], Mapping[Key, float]], microbatches: int
    ) -> dict[Key, float]:
        small = self.small.with_microbatches(microbatches)
        base = numbers_of(small)
        result = dict(base)
        for group in self.groups:
            one_more = _sum(numbers_of(small.with_one_more(group)), base, -1)
            kind = next(iter(group))
            result = _sum(result, one_more, self.whole.of(kind) - small.of(kind))
        return result


def extension(whole: TracedShape, layers: int, microbatches: Sequence[int]) -> Extension:
    """Traces at most ``layers`` of every kind, and two numbers of ``microbatches`` if the whole has more than those."""
    small = TracedShape(tuple((kind, min(number, layers)) for kind, number in whole.layers), whole.microbatches)
    numbers = sorted({number for _, number in whole.layers if number > layers})
    groups = tuple(frozenset(kind for kind, number in whole.layers if number == count) for count in numbers)
    few, more = microbatches
    if whole.microbatches > more:
        small = small.with_microbatches(few)
    return Extension(whole, small, more, groups)


def alike(place: StepPlace, shape: TracedShape, microbatches: int) -> StepPlace | None:
    """A name for a place that is the same in traces of all sizes; None for places in the middle.

    ``shape`` is the smallest that is traced, ``microbatches`` the number in the trace that the place comes from.
    """
    if not place.part:
        return place
    visit = _from_nearer_end(place.visit, microbatches, shape.microbatches)
    if visit is None or place.kind is None:  # no layer
        return None if visit is None else replace(place, visit=visit)
    number = _from_nearer_end(place.number, place.of, shape.of((place.stage, place.kind)))
    return None if number is None else replace(place, number=number, of=0, visit=visit)


def _from_nearer_end(number: int, of: int, least: int) -> int | None:
    """The number from the front or (negative) from the back, if within half of ``least``; None in the middle."""
    least = min(least, of)
    if number < (least + 1) // 2:
        return number
    return number - of if of - number <= least // 2 else None


def _sum(first: Mapping[Key, float], other: Mapping[Key, float], times: float) -> dict[Key, float]:
    return {key: first.get(key, 0.0) + times * other.get(key, 0.0) for key in {**first, **other}}


def at_one_moment(traces: Sequence[Moments]) -> list[dict[StepPlace, Bytes]]:
    """The peak memory of each place, at the same moment in all traces with equally many moments at that place.

    Places are named as by `alike`; the largest trace comes last, and its peak decides. Otherwise traces could choose
    different moments of nearly equal memory, whose parts differ.
    """
    longest = {place: len(moments) for place, moments in traces[-1].items()}
    chosen = {place: _most_at(moments) for place, moments in traces[-1].items()}

    def of(place: StepPlace, moments: Sequence[Bytes]) -> Bytes:
        return moments[chosen[place] if longest.get(place) == len(moments) else _most_at(moments)]

    return [{place: of(place, moments) for place, moments in trace.items()} for trace in traces]


def _most_at(moments: Sequence[Bytes]) -> int:
    return max(range(len(moments)), key=lambda number: sum(moments[number].values()))
