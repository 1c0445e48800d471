"""Checks that a schedule runs every microbatch on every stage exactly once, in an order that cannot deadlock."""

from __future__ import annotations

from itertools import chain, product

from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule

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
