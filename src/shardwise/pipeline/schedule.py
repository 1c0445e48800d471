"""A pipeline schedule as plain data: for every rank the list of what it does, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


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
