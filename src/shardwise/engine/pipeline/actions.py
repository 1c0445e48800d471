"""Our schedules in the words of PyTorch's pipelining runtime: the same passes in the same order, and the messages."""

from __future__ import annotations

from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from shardwise.pipeline import Action, ActionKind, PipelineSchedule, build
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import schedule_record

RuntimeActions = dict[int, list[_Action]]

_KINDS = {
    ActionKind.F: _ComputationType.FORWARD,
    ActionKind.B: _ComputationType.FULL_BACKWARD,
    ActionKind.I: _ComputationType.BACKWARD_INPUT,
    ActionKind.W: _ComputationType.BACKWARD_WEIGHT,
}


def schedule_of(job: Job) -> PipelineSchedule:
    """The schedule that is simulated for a job, which is the one that runs: built without times."""
    strategy = job.strategy
    require_runnable(strategy.schedule)
    return build(strategy.schedule, strategy.pp, job.microbatches, strategy.chunks_per_rank)


def require_runnable(schedule: str) -> None:
    record = schedule_record(schedule)
    if record.two_copies:
        raise SpecError(
            "strategy.schedule",
            f"{schedule} keeps two copies of every stage, which this engine does not keep in sync",
            f"use {record.instead}, about the same bubble with one copy",
        )
    if not record.runs:
        raise SpecError("strategy.schedule", f"this engine does not run {schedule}", f"use {record.instead}")


def runtime_actions(schedule: PipelineSchedule) -> RuntimeActions:
    """Every rank's passes, with sends and receives put between them.

    A receive stands in its rank's list where the send stands in one common order of all ranks: both ends of every
    pair see the same order of messages, which neither gloo nor NCCL can do without.
    """
    require_runnable(schedule.name)
    passes = {rank: [_translated(action) for action in actions] for rank, actions in enumerate(schedule.actions)}
    lists: RuntimeActions = _add_send_recv(passes, lambda stage: schedule.placement[stage], schedule.stages)
    return lists


def forward_actions(schedule: PipelineSchedule) -> RuntimeActions:
    """The forward passes of a schedule alone, to evaluate."""
    require_runnable(schedule.name)
    passes = {
        rank: [_translated(action) for action in actions if action.kind is ActionKind.F]
        for rank, actions in enumerate(schedule.actions)
    }
    lists: RuntimeActions = _add_send_recv(passes, lambda stage: schedule.placement[stage], schedule.stages)
    return lists


def splits_backward(schedule: PipelineSchedule) -> bool:
    return any(action.kind is ActionKind.W for actions in schedule.actions for action in actions)


def _translated(action: Action) -> _Action:
    return _Action(action.stage, _KINDS[action.kind], action.microbatch)
