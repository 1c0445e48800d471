"""Which elements of a full tensor a rank holds: boxes of it, and their offsets in the local tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A block of a full tensor: its first element in every dimension, and its size."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """The intersection."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape)]
        shape = tuple(last - first for first, last in zip(start, stop))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

    def inside(self, outer: Box) -> Index:
        """The slices of this box in a tensor that holds just ``outer``."""
        return tuple(slice(a - b, a - b + size) for a, b, size in zip(self.start, outer.start, self.shape))


@dataclass(frozen=True)
class ContiguousRun:
    """Consecutive elements along one dimension."""

    start: int | None
    """Place of the first in the full tensor; None for padding."""
    size: int


@dataclass(frozen=True)
class PlacedBox:
    """A box of the full tensor, and where it lies in the local one."""

    box: Box
    local: Index


def taken(runs: Sequence[ContiguousRun], first: int, last: int) -> list[ContiguousRun]:
    """Elements ``first`` up to ``last`` of runs laid end to end; what lies beyond their end is padding."""
    part, at = [], 0
    for run in runs:
        low, high = max(first, at), min(last, at + run.size)
        if low < high:
            part.append(ContiguousRun(None if run.start is None else run.start + low - at, high - low))
        at += run.size
    if last > at:
        part.append(ContiguousRun(None, last - max(first, at)))
    return part


def placed(dimensions: Sequence[Sequence[ContiguousRun]]) -> list[PlacedBox]:
    """The boxes that the runs along all dimensions form, without padding."""
    return [
        PlacedBox(
            Box(tuple(run.start or 0 for run, _ in chosen), tuple(run.size for run, _ in chosen)),
            tuple(slice(at, at + run.size) for run, at in chosen),
        )
        for chosen in product(*(zip(runs, accumulate((run.size for run in runs), initial=0)) for runs in dimensions))
        if all(run.start is not None for run, _ in chosen)
    ]


def fill(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes cover a tensor of that shape exactly: inside it, without overlaps or gaps."""
    if any(not len(box.start) == len(box.shape) == len(shape) for box in boxes):
        return False
    within = all(a + n <= size for box in boxes for a, n, size in zip(box.start, box.shape, shape))
    return within and sum(box.elements for box in boxes) == math.prod(shape) and not _overlap(boxes)


def _overlap(boxes: Sequence[Box]) -> bool:
    ordered = sorted(boxes, key=lambda box: box.start)
    for number, earlier in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.start[:1] >= tuple(first + size for first, size in zip(earlier.start[:1], earlier.shape[:1])):
                break  # nor does any later one overlap
            if earlier.common(other) is not None:
                return True
    return False
