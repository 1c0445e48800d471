"""A pipeline schedule as plain data: its actions and their seconds; how it is checked, and built by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.schedules import ScheduleRecord, chosen_chunks_schedules, imported, schedule_record


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
    placements: tuple[tuple[int, ...], ...]  # of every copy of the parameters: the rank of each stage
    actions: tuple[tuple[Action, ...], ...]  # of every rank, in order

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


# -- Checks that a schedule runs every microbatch on every stage exactly once, in an order that cannot deadlock

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


class InvalidPipelineSchedule(ValueError):
    """Raised with the first error found in a schedule."""


def verify(schedule: PipelineSchedule) -> None:
    """Raise InvalidPipelineSchedule unless the schedule is complete, well placed, ordered and free of deadlock."""
    _check_shape(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_rank(schedule, rank, actions)
    _check_complete(schedule)
    _check_runs(schedule)


def needs(schedule: PipelineSchedule, action: Action) -> tuple[Action, ...]:
    """The actions that must have ended before ``action`` starts; a backward pass is always called I here, even B."""
    kind, stage, microbatch = action
    if kind is W:
        return (Action(I, stage, microbatch),)
    if kind is F:
        return (Action(F, stage - 1, microbatch),) if stage else ()
    own = Action(F, stage, microbatch)
    return (own,) if stage == schedule.stages - 1 else (own, Action(I, stage + 1, microbatch))


def _check_shape(schedule: PipelineSchedule) -> None:
    if min(schedule.stages, schedule.microbatches, schedule.ranks) < 1:
        raise InvalidPipelineSchedule("a schedule needs at least one rank, one stage and one microbatch")
    for copy in schedule.placements:
        if len(copy) != schedule.stages or any(not 0 <= rank < schedule.ranks for rank in copy):
            raise InvalidPipelineSchedule(f"placement {copy} does not put each of {schedule.stages} stages on a rank")


def _check_rank(schedule: PipelineSchedule, rank: int, actions: tuple[Action, ...]) -> None:
    """Checks that every action exists, is on its own rank, comes once, and comes after those it needs there."""
    done: set[Action] = set()
    for position, action in enumerate(actions):
        where = f"rank {rank}, action {position} ({action})"
        kind, stage, microbatch = action
        if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches):
            raise InvalidPipelineSchedule(f"{where}: no such stage or microbatch")
        home = schedule.rank_of(stage, microbatch)
        if home != rank:
            raise InvalidPipelineSchedule(f"{where}: stage {stage} of microbatch {microbatch} is on rank {home}")
        known_as = Action(I, stage, microbatch) if kind is B else action
        if known_as in done:
            raise InvalidPipelineSchedule(f"{where}: done before")
        for needed in needs(schedule, action):
            if schedule.rank_of(needed.stage, microbatch) == rank and needed not in done:
                raise InvalidPipelineSchedule(f"{where}: comes before {_name(needed)}, which it needs")
        done.add(known_as)
        if kind is B:
            done.add(Action(W, stage, microbatch))


def _check_complete(schedule: PipelineSchedule) -> None:
    actions = set(chain.from_iterable(schedule.actions))
    for stage, kind, j in product(range(schedule.stages), (F, I, W), range(schedule.microbatches)):
        if (kind, stage, j) not in actions and (kind is F or (B, stage, j) not in actions):
            raise InvalidPipelineSchedule(f"stage {stage} never runs {_name(Action(kind, stage, j))}")


def _check_runs(schedule: PipelineSchedule) -> None:
    """Lets every rank run as far as it can, repeatedly; a rank that never ends is deadlocked."""
    done: set[Action] = set()
    position = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = {}
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        actions = schedule.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((needed for needed in needs(schedule, action) if needed not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            known_as = action if action.kind is not B else Action(I, action.stage, action.microbatch)
            done.add(known_as)
            runnable += waiting.pop(known_as, ())
            position[rank] += 1
    for missing, ranks in waiting.items():
        stuck = ranks[0]
        raise InvalidPipelineSchedule(
            f"deadlock: rank {stuck} waits before {schedule.actions[stuck][position[stuck]]} for {_name(missing)} of "
            f"rank {schedule.rank_of(missing.stage, missing.microbatch)}, which is never reached"
        )


def _name(action: Action) -> str:
    kind = B if action.kind is I else action.kind
    return f"the {kind.words} of microbatch {action.microbatch} on stage {action.stage}"


# -- Builds a pipeline schedule by name, from its record in `spec.schedules`

DEFAULT_CHUNKS = 2  # of a schedule that leaves the choice to the user


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
    ahead: int = 0,
) -> PipelineSchedule:
    """The schedule ``name`` over ``ranks`` pipeline ranks.

    - ``chunks``, stages per rank, is a choice for interleaved only.
    - ``times`` and ``comm_seconds`` decide where zbv, zb-1p, zb-2p and zb-auto run weight gradients (default: all
      passes equal).
    - ``memory_limit``, in microbatch activations, is for zb-auto.
    - ``released_by_input_grad`` is the share of an activation that zb-1p, zb-2p and zb-auto count as free after its
      input gradient.
    - ``ahead`` is the number of additional forward passes before the first backward pass, for schedules that
      have them (`ScheduleRecord.ahead_of_exchange`).
    """
    _check_count("ranks", ranks)
    _check_count("microbatches", microbatches)
    v = chunks_per_rank(name, chunks)
    if times is not None and times.stages != ranks * v:
        problem = f"{times.stages} stages, but {name} on {ranks} ranks has {ranks * v}"
        raise SpecError("times", problem, "give one time per stage")
    if not 0 <= released_by_input_grad <= 1:
        problem = f"{shown(released_by_input_grad)} is not between 0 and 1"
        raise SpecError("released_by_input_grad", problem, "give a number between 0 and 1")
    record = schedule_record(name)
    parameters = _parameters(record)
    if memory_limit is not None and "memory_limit" not in parameters:
        raise SpecError("memory_limit", f"{name} has a fixed memory need", "use zb-auto to set a limit")
    given: dict[str, Any] = {
        "chunks": v,
        "ahead": ahead,
        "times": times,
        "memory_limit": memory_limit,
        "comm_seconds": comm_seconds,
        "released_by_input_grad": released_by_input_grad,
    }
    builder = imported(record.builder)
    built: PipelineSchedule = builder(ranks, microbatches, **{key: given[key] for key in parameters if key in given})
    return built


@lru_cache(maxsize=256)
def _parameters(record: ScheduleRecord) -> frozenset[str]:
    return frozenset(inspect.signature(imported(record.builder)).parameters)


def chunks_per_rank(name: str, chunks: int | None = None) -> int:
    """Stages per rank of schedule ``name``; ``chunks`` is the user's choice, if any."""
    own = schedule_record(name).chunks
    if chunks is not None:
        _check_count("chunks", chunks)
    if own is None:
        return DEFAULT_CHUNKS if chunks is None else chunks
    if chunks not in (None, own):
        remedy = f"leave chunks out, or use {' or '.join(chosen_chunks_schedules())}"
        raise SpecError("chunks", f"{name} has {own} per rank, not {chunks}", remedy)
    return own


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(field, f"{shown(value)} is not a count", "give a whole number of 1 or more")
