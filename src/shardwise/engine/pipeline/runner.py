"""A step of a pipeline: our list of actions in the terms of PyTorch's runtime, run on this rank's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.pipeline.stage import Call, Mailbox, NoReduction, PipelineStage, Reduction
from shardwise.engine.pipeline.tied import TiedEnds
from shardwise.engine.torch_private import ComputationType, PipelineScheduleRuntime, RuntimeAction, with_messages
from shardwise.engine.weight_gradients import Deferrable
from shardwise.pipeline import ActionKind, PipelineSchedule, build
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import schedule_record

RuntimeActions = dict[int, list[RuntimeAction]]

_KINDS = {
    ActionKind.F: ComputationType.FORWARD,
    ActionKind.B: ComputationType.FULL_BACKWARD,
    ActionKind.I: ComputationType.BACKWARD_INPUT,
    ActionKind.W: ComputationType.BACKWARD_WEIGHT,
}


def schedule_of(job: Job, replica: int = 0) -> PipelineSchedule:
    """The schedule that is simulated for a job is also the one that runs, in each data-parallel replica."""
    strategy = job.strategy
    require_runnable(strategy.schedule)
    microbatches = len(job.rows_of(replica)) // strategy.microbatch
    return build(strategy.schedule, strategy.pp, microbatches, strategy.chunks_per_rank)


def require_runnable(schedule: str) -> None:
    record = schedule_record(schedule)
    if record.two_copies:
        problem = f"{schedule} keeps two copies of every stage, which this engine does not keep in sync"
        raise SpecError("strategy.schedule", problem, f"use {record.instead}, about the same bubble with one copy")
    if not record.runs:
        raise SpecError("strategy.schedule", f"this engine does not run {schedule}", f"use {record.instead}")


def runtime_actions(schedule: PipelineSchedule, *, backward: bool = True) -> RuntimeActions:
    """Every rank's passes (to evaluate, only the forward ones), with sends and receives between them.

    Receives are placed by one order of all sends that is common to all ranks, so both ends of every pair see the same
    order of messages, which gloo and NCCL both need.
    """
    require_runnable(schedule.name)
    passes = {
        rank: [
            RuntimeAction(action.stage, _KINDS[action.kind], action.microbatch)
            for action in actions
            if backward or action.kind is ActionKind.F
        ]
        for rank, actions in enumerate(schedule.actions)
    }
    return with_messages(passes, lambda stage: schedule.placement[stage], schedule.stages)


def splits_backward(schedule: PipelineSchedule) -> bool:
    return any(action.kind is ActionKind.W for actions in schedule.actions for action in actions)


def call_decoder(module: nn.Module, inputs: Tensor, batch: Batch, last: bool) -> Tensor:
    """A stage of a `Decoder`: hidden states, or the sum of the loss over the labels that count."""
    labels = batch.labels if last else None
    known: dict[str, Any] = {"positions": batch.positions, "documents": batch.documents}
    known["most_documents"] = batch.most_documents
    if last and batch.ahead is not None:
        known["ahead"] = batch.ahead
    output: Tensor = module(inputs, labels, **known)
    return output


class PipelineRunner:
    """Runs steps of ``schedule`` on this rank's ``modules`` (by the number of their stage).

    ``rank`` is this rank's number in the schedule, ``mailbox`` sends and receives hidden states, ``call`` runs a stage.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        modules: Mapping[int, nn.Module],
        rank: int,
        mailbox: Mailbox,
        *,
        reductions: Mapping[nn.Module, Reduction] | None = None,
        tied: TiedEnds | None = None,
        call: Call = call_decoder,
    ) -> None:
        if tuple(sorted(modules)) != schedule.stages_of(rank):
            raise ValueError(f"rank {rank} holds stages {schedule.stages_of(rank)}, not {tuple(sorted(modules))}")
        self.schedule, self.mailbox, self.tied = schedule, mailbox, tied
        deferrable = Deferrable(tied.borrowers if tied else ()) if splits_backward(schedule) else None
        self.stages = []
        for index, module in sorted(modules.items()):
            reduction = reductions[module] if reductions else NoReduction()
            stage = PipelineStage(module, index, schedule.stages, rank, mailbox, reduction, call, deferrable)
            self.stages.append(stage)
        self._training = _Runtime(self.stages, schedule, runtime_actions(schedule))
        self._evaluation = _Runtime(self.stages, schedule, runtime_actions(schedule, backward=False))

    def step(self, microbatches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Forward and backward of all microbatches; returns the sum of their losses divided by ``tokens``.

        ``tokens`` is the number of labels that count in the whole batch of the step, whichever ranks hold them. All
        ranks that `Mailbox.tell` reaches get the same loss.
        """
        return self._run(self._training, microbatches, tokens, backward=True)

    def evaluate(self, microbatches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """The same loss, without gradients."""
        with torch.no_grad():
            return self._run(self._evaluation, microbatches, tokens, backward=False)

    def _run(self, runtime: _Runtime, microbatches: Sequence[Batch], tokens: Tensor, backward: bool) -> Tensor:
        for stage in self.stages:
            stage.has_backward = backward
        losses = runtime.run(microbatches, tokens)
        self.mailbox.finish()
        if self.tied:
            self.tied.follow()
        return self._on_every_rank(losses)

    def _on_every_rank(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=self.mailbox.message.device)
        for loss in losses:
            total += loss.detach()
        self.mailbox.tell(total, self.schedule.placement[-1])
        return total


class _Runtime(PipelineScheduleRuntime):
    """PyTorch's runtime with complete lists of actions: it adds nothing to gather, reduce or scale."""

    def __init__(self, stages: list[PipelineStage], schedule: PipelineSchedule, actions: RuntimeActions) -> None:
        super().__init__(stages, schedule.microbatches, loss_fn=torch.div, scale_grads=False)  # type: ignore[no-untyped-call]
        self.stage_index_to_group_rank = dict(enumerate(schedule.placement))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = actions

    def run(self, microbatches: Sequence[Batch], tokens: Tensor) -> list[Tensor]:
        """The losses, where the last stage is."""
        losses: list[Tensor] = []
        arguments = [(batch,) for batch in microbatches]
        self._step_microbatches(arguments, None, [tokens] * len(arguments), losses, return_outputs=False)
        return losses

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do before the first step."""

    def _assert_unsharded(self, stage: Any) -> None:
        """FSDP's own hooks take care of it."""
