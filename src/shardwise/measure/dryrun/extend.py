"""From a few traced layers and microbatches to all of them: counts grow by the same amount with each.

Memory is extended place by place, as each place has its own peak: layers near the front of a stage are matched with
those near the front, those near the back with those near the back, and so are the first and the last microbatches.
Between them memory changes linearly from layer to layer and not at all from microbatch to microbatch, so that the peak
of a pass is never in the middle.
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
    """How much is traced: layers of every kind in every stage of the rank, and microbatches."""

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
    """``small`` is traced in place of ``whole``, and besides with one more layer of each of ``groups`` (kinds that
    have equally many layers), both with two numbers of microbatches."""

    whole: TracedShape
    small: TracedShape
    more_microbatches: int
    groups: tuple[frozenset[Kind], ...]

    @property
    def shapes(self) -> list[TracedShape]:
        """All that have to be traced."""
        with_layers = [self.small, *(self.small.with_one_more(group) for group in self.groups)]
        if self.small.microbatches == self.whole.microbatches:
            return with_layers
        return [*with_layers, *(shape.with_microbatches(self.more_microbatches) for shape in with_layers)]

    def extended(self, numbers_of: Callable[[TracedShape], Mapping[Key, float]]) -> dict[Key, float]:
        """The numbers of ``whole``, linear in every kind of layer and in the microbatches."""
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
    """Traces at most ``layers`` of every kind, and the two given numbers of microbatches where there are more."""
    small = TracedShape(tuple((kind, min(number, layers)) for kind, number in whole.layers), whole.microbatches)
    numbers = sorted({number for _, number in whole.layers if number > layers})
    groups = tuple(frozenset(kind for kind, number in whole.layers if number == count) for count in numbers)
    few, more = microbatches
    if whole.microbatches > more:
        small = small.with_microbatches(few)
    return Extension(whole, small, more, groups)


def alike(place: StepPlace, shape: TracedShape, microbatches: int) -> StepPlace | None:
    """The name of a place in a trace of any size; None for what is in the middle.

    ``shape`` is the smallest that is traced, ``microbatches`` are those of the trace that the place is from.
    """
    if not place.part:
        return place
    visit = _from_nearer_end(place.visit, microbatches, shape.microbatches)
    if visit is None or place.kind is None:  # no layer
        return None if visit is None else replace(place, visit=visit)
    number = _from_nearer_end(place.number, place.of, shape.of((place.stage, place.kind)))
    return None if number is None else replace(place, number=number, of=0, visit=visit)


def _from_nearer_end(number: int, of: int, least: int) -> int | None:
    """From the front or, below zero, from the back, as far as there is a front and a back half of ``least``."""
    least = min(least, of)
    if number < (least + 1) // 2:
        return number
    return number - of if of - number <= least // 2 else None


def _sum(first: Mapping[Key, float], other: Mapping[Key, float], times: float) -> dict[Key, float]:
    return {key: first.get(key, 0.0) + times * other.get(key, 0.0) for key in {**first, **other}}


def at_one_moment(traces: Sequence[Moments]) -> list[dict[StepPlace, Bytes]]:
    """The peak memory of each place, at the same moment in all traces that have equally many moments of the place.

    Places by the names that they have in all traces, the largest trace last. Of two moments with nearly equal memory
    different traces could otherwise choose different ones, whose parts differ.
    """
    longest = {place: len(moments) for place, moments in traces[-1].items()}
    chosen = {place: _most_at(moments) for place, moments in traces[-1].items()}

    def of(place: StepPlace, moments: Sequence[Bytes]) -> Bytes:
        return moments[chosen[place] if longest.get(place) == len(moments) else _most_at(moments)]

    return [{place: of(place, moments) for place, moments in trace.items()} for trace in traces]


def _most_at(moments: Sequence[Bytes]) -> int:
    return max(range(len(moments)), key=lambda number: sum(moments[number].values()))
