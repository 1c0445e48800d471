"""A pipeline schedule as plain data: the actions of each rank in order, and the seconds of each stage's passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from shardwise.spec.errors import SpecError, shown


class ActionKind(StrEnum):
    """What a rank does with one microbatch on one stage; a backward pass is either B, or I and later W."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients together
    I = "I"  # input gradient: the previous stage waits for it  # noqa: E741
    W = "W"  # weight gradient: only the optimizer waits for it

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = dict(zip(ActionKind, ("forward", "backward", "input gradient", "weight gradient")))


class Action(NamedTuple):
    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """What each rank does, in which order.

    Nearly every schedule has one copy of the parameters. DualPipe has two, run from both ends: the first half of its
    microbatches uses copy 0, the other half copy 1.
    """

    name: str
    stages: int
    microbatches: int
    placements: tuple[tuple[int, ...], ...]
    """Of every copy of the parameters: the rank of each stage."""
    actions: tuple[tuple[Action, ...], ...]
    """Of every rank, in order."""

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage, for the first copy of the parameters."""
        return self.placements[0]

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.placements[microbatch * len(self.placements) // self.microbatches][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters ``rank`` holds."""
        return tuple(s for s in range(self.stages) if any(copy[s] == rank for copy in self.placements))

    def __str__(self) -> str:
        head = f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return "\n".join([head, *(f"{r}: {' '.join(map(str, actions))}" for r, actions in enumerate(self.actions))])


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
    """The schedule with only the microbatches ``kept``, renumbered, in the same order."""
    number = {old: new for new, old in enumerate(kept)}
    actions = tuple(
        tuple(Action(a.kind, a.stage, number[a.microbatch]) for a in actions if a.microbatch in number)
        for actions in schedule.actions
    )
    return replace(schedule, microbatches=len(kept), actions=actions)


# -- Durations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on every stage; a full ``backward`` may be faster than its two gradients apart."""

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
    """Checked times of stages that differ; by default a full backward takes as long as both of its gradients."""
    if backward is None:
        backward = [i + w for i, w in zip(input_grad, weight_grad)]
    columns = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad, "backward": backward}
    return StageTimes(
        *(durations(f"times.{name}", seconds, len(forward), "stage") for name, seconds in columns.items())
    )


def durations(field: str, given: float | Sequence[float], count: int, item: str) -> tuple[float, ...]:
    """Seconds of each of ``count`` items, from one number for all or one each; SpecError unless finite and >= 0."""
    values = [given] * count if isinstance(given, (int, float)) else list(given)
    if len(values) != count:
        raise SpecError(field, f"{len(values)} values, but {count} are needed", f"give one per {item}")
    for value in values:
        if not 0 <= value < float("inf"):
            raise SpecError(field, f"{shown(value)} is not a duration", "give seconds of 0 or more")
    return tuple(map(float, values))


def check_released(share: float) -> None:
    if not 0 <= share <= 1:
        problem = f"{shown(share)} is not between 0 and 1"
        raise SpecError("released_by_input_grad", problem, "give a number between 0 and 1")
