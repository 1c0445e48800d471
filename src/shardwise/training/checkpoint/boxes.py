"""Which elements of a whole tensor a rank holds: boxes of it, and their offsets in the local tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A block of a whole tensor: its first element in every dimension, and its size."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        number = 1
        for size in self.shape:
            number *= size
        return number

    def common(self, other: Box) -> Box | None:
        """What both hold."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape)]
        shape = tuple(last - first for first, last in zip(start, stop))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

    def inside(self, outer: Box) -> Index:
        """Where this lies in a tensor that holds just ``outer``."""
        return tuple(slice(a - b, a - b + size) for a, b, size in zip(self.start, outer.start, self.shape))


@dataclass(frozen=True)
class ContiguousRun:
    """``size`` consecutive elements along one dimension, from ``start`` in the whole tensor; None: padding."""

    start: int | None
    size: int


@dataclass(frozen=True)
class PlacedBox:
    """A box of the whole tensor, and where it lies in the local one."""

    box: Box
    local: Index


def taken(runs: Sequence[ContiguousRun], first: int, last: int) -> list[ContiguousRun]:
    """Elements ``first`` to ``last`` of what the runs hold; padding where they end before."""
    found, at = [], 0
    for run in runs:
        low, high = max(first, at), min(last, at + run.size)
        if low < high:
            found.append(ContiguousRun(None if run.start is None else run.start + low - at, high - low))
        at += run.size
    if last > at:
        found.append(ContiguousRun(None, last - max(first, at)))
    return found


def placed(dimensions: Sequence[Sequence[ContiguousRun]]) -> list[PlacedBox]:
    """The boxes that runs along every dimension make, without padding."""
    return [
        PlacedBox(
            Box(tuple(run.start or 0 for run, _ in chosen), tuple(run.size for run, _ in chosen)),
            tuple(slice(at, at + run.size) for run, at in chosen),
        )
        for chosen in product(*(list(_with_places(runs)) for runs in dimensions))
        if all(run.start is not None for run, _ in chosen)
    ]


def _with_places(runs: Iterable[ContiguousRun]) -> Iterable[tuple[ContiguousRun, int]]:
    at = 0
    for run in runs:
        yield run, at
        at += run.size
