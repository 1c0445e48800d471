"""What every rank holds for the backward pass, over time and at its peak.

The activation of a microbatch on a stage is held from the start of its forward to the end of its backward, or
of its weight gradient when the backward is split; the input gradient may release a share of it before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.pipeline.schedule import Action, ActionKind, PipelineSchedule
from shardwise.pipeline.timeline import Timeline
from shardwise.spec.errors import SpecError, shown


def peak_activations(
    schedule: PipelineSchedule, stage_sizes: Sequence[float] | None = None, released_by_input_grad: float = 0.0
) -> tuple[float, ...]:
    """The most that each rank holds at any time, in the unit of ``stage_sizes`` (default: stages count 1).

    A rank does one action at a time, so its order alone decides; no times are needed.
    """
    sizes = _checked(schedule, stage_sizes, released_by_input_grad)
    return tuple(
        max((held for _, held in _levels(actions, sizes, released_by_input_grad)), default=0.0)
        for actions in schedule.actions
    )


def live_activations(
    timeline: Timeline, stage_sizes: Sequence[float] | None = None, released_by_input_grad: float = 0.0
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Per rank the steps (seconds, held from then on)."""
    schedule = timeline.schedule
    sizes = _checked(schedule, stage_sizes, released_by_input_grad)
    steps = []
    for actions, starts, ends in zip(schedule.actions, timeline.starts, timeline.ends):
        levels = _levels(actions, sizes, released_by_input_grad)
        steps.append(
            tuple(
                (start if action.kind is ActionKind.F else end, held)
                for (action, held), start, end in zip(levels, starts, ends)
            )
        )
    return tuple(steps)


def _levels(actions: Sequence[Action], sizes: Sequence[float], released: float) -> Iterator[tuple[Action, float]]:
    """Every action with what is held once it has started (a forward) or ended (any other)."""
    change = {ActionKind.F: 1.0, ActionKind.B: -1.0, ActionKind.I: -released, ActionKind.W: released - 1.0}
    held = 0.0
    for action in actions:
        held += change[action.kind] * sizes[action.stage]
        yield action, held


def _checked(schedule: PipelineSchedule, sizes: Sequence[float] | None, released: float) -> Sequence[float]:
    if not 0 <= released <= 1:
        raise SpecError(
            "released_by_input_grad", f"{shown(released)} is not between 0 and 1", "give a number between 0 and 1"
        )
    if sizes is None:
        return [1.0] * schedule.stages
    if len(sizes) != schedule.stages or any(not size >= 0 for size in sizes):
        problem = f"{len(sizes)} sizes for {schedule.stages} stages, or a negative one"
        raise SpecError("stage_sizes", problem, "give one size of 0 or more per stage")
    return sizes
