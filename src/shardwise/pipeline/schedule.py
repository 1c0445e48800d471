"""A pipeline schedule as plain data: what each rank does, in order, and how long the passes of a stage take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from shardwise.spec.errors import SpecError, shown


class ActionKind(StrEnum):
    """What a rank does with one microbatch on one stage; a backward is B, or I and later W."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients together
    I = "I"  # input gradient: what the stage before waits for  # noqa: E741
    W = "W"  # weight gradient: only the optimizer waits for it


class Action(NamedTuple):
    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


RankActions = tuple[Action, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """``actions[rank]`` in order; stage s of the model lives on rank ``placements[copy][s]``.

    Nearly every schedule has one copy of the parameters. DualPipe has two, run from both ends: its first
    m/2 microbatches use copy 0, the others copy 1 (``copy_of``).
    """

    name: str
    stages: int
    microbatches: int
    placements: tuple[tuple[int, ...], ...]
    actions: tuple[RankActions, ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage, for the first copy of the parameters."""
        return self.placements[0]

    def copy_of(self, microbatch: int) -> int:
        return microbatch * len(self.placements) // self.microbatches

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.placements[self.copy_of(microbatch)][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters ``rank`` holds."""
        return tuple(s for s in range(self.stages) if any(copy[s] == rank for copy in self.placements))

    def __str__(self) -> str:
        head = f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return "\n".join([head, *(f"{r}: {' '.join(map(str, one))}" for r, one in enumerate(self.actions))])


def loop_placement(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Rank r holds stages r, r+p, r+2p, ... (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """Rank r holds stages r and 2p-1-r (Qi et al. 2024, arXiv 2405.15362)."""
    return (*range(ranks), *reversed(range(ranks)))


def one_copy(
    name: str, microbatches: int, placement: tuple[int, ...], actions: Iterable[Iterable[Action]]
) -> PipelineSchedule:
    """A schedule with a single copy of the parameters."""
    return PipelineSchedule(name, len(placement), microbatches, (placement,), tuple(map(tuple, actions)))


def keep_microbatches(schedule: PipelineSchedule, kept: Sequence[int]) -> PipelineSchedule:
    """The same order for fewer microbatches, renumbered; no order between those that stay is changed."""
    number = {old: new for new, old in enumerate(kept)}
    actions = tuple(
        tuple(Action(a.kind, a.stage, number[a.microbatch]) for a in one if a.microbatch in number)
        for one in schedule.actions
    )
    return replace(schedule, microbatches=len(kept), actions=actions)


# -- How long the passes of a stage take -------------------------------------------------------------


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
