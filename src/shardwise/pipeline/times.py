"""How long the passes of a stage take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.spec.errors import SpecError, shown


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on every stage: forward, input gradient, weight gradient.

    A full backward takes ``backward`` where given (one fused kernel may be faster), else their sum.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def stages(self) -> int:
        return len(self.forward)


def equal_stages(
    stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0, backward: float | None = None
) -> StageTimes:
    full = input_grad + weight_grad if backward is None else backward
    return stage_times([forward] * stages, [input_grad] * stages, [weight_grad] * stages, [full] * stages)


def stage_times(
    forward: Sequence[float],
    input_grad: Sequence[float],
    weight_grad: Sequence[float],
    backward: Sequence[float] | None = None,
) -> StageTimes:
    """Checked times of stages that differ."""
    if backward is None:
        backward = [i + w for i, w in zip(input_grad, weight_grad)]
    columns = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "backward": backward}
    for name, column in columns.items():
        if len(column) != len(forward):
            raise SpecError(f"times.{name}", f"{len(column)} stages, but forward has {len(forward)}", "give one each")
        checked_seconds(f"times.{name}", column)
    return StageTimes(*(tuple(map(float, column)) for column in columns.values()))


def checked_seconds(field: str, values: Sequence[float]) -> tuple[float, ...]:
    """``values`` as floats, or a SpecError unless all are finite and 0 or more."""
    for value in values:
        if not 0 <= value < float("inf"):
            raise SpecError(field, f"{shown(value)} is not a duration", "give seconds of 0 or more")
    return tuple(map(float, values))
