"""Divides layers into contiguous stages such that the slowest stage is as fast as possible and every stage fits.

Exact, by dynamic programming over (stage, layers placed). Of several optima it takes the one whose fullest stage needs
the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.spec.errors import SpecError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[Any]

_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class Layers:
    """The layers to be placed, in model order: one entry per layer.

    The extras are for the embedding on the first stage and the loss on the last.
    """

    seconds: tuple[float, ...]
    bytes: tuple[float, ...]  # held during the whole step: weights, gradients, optimizer states
    activation_bytes: tuple[float, ...]  # per microbatch in flight
    first_extra_seconds: float = 0.0
    last_extra_seconds: float = 0.0
    first_extra_bytes: float = 0.0
    last_extra_bytes: float = 0.0


@dataclass(frozen=True)
class Place:
    """The device of a stage."""

    speed: float = 1.0  # relative to the device on which the layers take their ``seconds``
    memory_bytes: float = float("inf")
    in_flight: float = 1.0  # microbatches in flight


@dataclass(frozen=True)
class Partition:
    """The stages: stage s holds the next ``layer_counts[s]`` layers after those of the stages before it."""

    layer_counts: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    stage_bytes: tuple[float, ...]


def layers_of(
    seconds: Sequence[float],
    bytes_: Sequence[float] | None = None,
    activation_bytes: Sequence[float] | None = None,
    **extras: float,
) -> Layers:
    """Checked ``Layers``; bytes that are not given are 0."""
    count = len(seconds)
    return Layers(
        _column("layer_seconds", seconds, count),
        _column("layer_bytes", bytes_, count),
        _column("layer_activation_bytes", activation_bytes, count),
        **extras,
    )


def _column(field: str, values: Sequence[float] | None, count: int) -> tuple[float, ...]:
    column = tuple(map(float, [0.0] * count if values is None else values))
    if len(column) != count:
        raise SpecError(field, f"{len(column)} entries for {count} layers", "give one per layer")
    if any(not 0 <= value < float("inf") for value in column):
        raise SpecError(field, "some entry is negative or not finite", "give numbers of 0 or more")
    return column


def partition_over(layers: Layers, places: Sequence[Place]) -> Partition:
    """Layers over devices of different speed and memory, in the order of ``places``."""
    import numpy as np

    count, stages = len(layers.seconds), len(places)
    if not 1 <= stages <= count:
        raise SpecError("stages", f"{stages} stages for {count} layers", f"use 1 to {count} stages")
    if any(not place.speed > 0 for place in places):
        raise SpecError("speed", "a device has no speed", "give numbers above 0")
    costs = _Costs(layers, places)

    def seconds_that_fit(stage: int) -> Matrix:
        return np.where(costs.memory_share(stage) <= 1, costs.seconds(stage), np.inf)

    slowest, _ = _smallest_maximum(stages, seconds_that_fit)
    if slowest == np.inf:
        needed, _ = _smallest_maximum(stages, costs.memory_share)
        remedy = f"the best one needs {needed:.3g} times the memory: use more stages, or fewer bytes per layer"
        raise SpecError("memory_limit_bytes", f"no split over {stages} stages fits", remedy)

    def bytes_if_fast(stage: int) -> Matrix:
        return np.where(seconds_that_fit(stage) <= slowest * _ROUNDING, costs.bytes(stage), np.inf)

    _, ends = _smallest_maximum(stages, bytes_if_fast)
    starts = [0, *ends[:-1]]
    pieces = list(enumerate(zip(starts, ends)))
    return Partition(
        tuple(end - start for start, end in zip(starts, ends)),
        tuple(float(costs.seconds(stage)[piece]) for stage, piece in pieces),
        tuple(float(costs.bytes(stage)[piece]) for stage, piece in pieces),
    )


class _Costs:
    """The cost of a stage with layers start..end-1, as matrices [start, end]; infinite where it would be empty."""

    def __init__(self, layers: Layers, places: Sequence[Place]) -> None:
        self.layers, self.places = layers, places
        self.seconds_between = _between(layers.seconds)
        self.bytes_between = _between(layers.bytes)
        self.activations_between = _between(layers.activation_bytes, empty=0.0)

    def seconds(self, stage: int) -> Matrix:
        extra = self._extra(stage, self.layers.first_extra_seconds, self.layers.last_extra_seconds)
        return (self.seconds_between + extra) / self.places[stage].speed

    def bytes(self, stage: int) -> Matrix:
        extra = self._extra(stage, self.layers.first_extra_bytes, self.layers.last_extra_bytes)
        return self.bytes_between + (self.places[stage].in_flight * self.activations_between + extra)

    def memory_share(self, stage: int) -> Matrix:
        limit = self.places[stage].memory_bytes
        return self.bytes(stage) / max(limit, 1.0) if limit < float("inf") else self.activations_between * 0.0

    def _extra(self, stage: int, first: float, last: float) -> float:
        return (first if stage == 0 else 0.0) + (last if stage == len(self.places) - 1 else 0.0)


def _between(values: Sequence[float], empty: float = float("inf")) -> Matrix:
    """[start, end]: the sum of values start..end-1; ``empty`` unless start < end."""
    import numpy as np

    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(sums))
    difference: Matrix = np.where(index[:, None] < index[None, :], sums[None, :] - sums[:, None], empty)
    return difference


def _smallest_maximum(stages: int, cost: Callable[[int], Matrix]) -> tuple[float, list[int]]:
    """The smallest possible maximum of ``cost(stage)[start, end]`` over the stages, and the end of every stage."""
    import numpy as np

    best = cost(0)[0]
    choices = []
    for stage in range(1, stages):
        through = np.maximum(best[:, None], cost(stage))  # [layers before this stage, layers up to its end]
        choices.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    ends = [len(best) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(best[-1]), ends[::-1]
