"""A pipeline on one rank: its stages, their messages and passes, and a step of them as PyTorch's runtime drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.engine.autograd import Deferrable, Waiting, compute, deferring
from shardwise.engine.batch import Batch
from shardwise.engine.labels import Called, message_sent, pass_name, stage_input_gradient, stage_output
from shardwise.engine.pipeline.tied import TiedEnds
from shardwise.engine.profiler_ranges import named, sent, wait_for, waited
from shardwise.engine.torch_private import (
    ComputationType,
    PipelineScheduleRuntime,
    PipelineStageBase,
    RuntimeAction,
    with_messages,
)
from shardwise.layout.views import SharedPiece, pieces_received, pieces_sent
from shardwise.models import Decoder
from shardwise.pipeline import ActionKind, PipelineSchedule, build
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import schedule_record


def keep_stage(decoder: Decoder, layers: Sequence[int], *, first: bool, last: bool) -> Decoder:
    """Removes what belongs to other stages; works on the meta device too.

    A stage with prediction modules keeps the token embedding, which they read.
    """
    for index in list(decoder.layers):
        if int(index) not in layers:
            del decoder.layers[index]
    if not first:
        decoder.position_embedding = None
    if not first and max(layers, default=-1) < decoder.model.layers:
        decoder.embedding = None
    if not last:
        decoder.norm = decoder.head = None
    return decoder


@dataclass(frozen=True)
class Message:
    """The shape of every message: a microbatch's hidden states as one rank holds them, or their gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def check(self, tensor: Tensor, what: str) -> None:
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            actual, promised = (tuple(tensor.shape), tensor.dtype), (self.shape, self.dtype)
            raise RuntimeError(f"{what} {actual} where the next stage expects {promised}")


class Mailbox:
    """Sends and receives of one rank; a tensor is freed once it has been sent.

    The runtime would keep every sent tensor until the step ends: two per microbatch and stage.
    """

    def __init__(self, group: dist.ProcessGroup, message: Message) -> None:
        self.group = self.own_group = group
        self.message = message
        self.leaving: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, rank: int, what: str) -> None:
        self.message.check(tensor, what)
        tensor = tensor.detach().contiguous()
        self.leaving = [(work, kept) for work, kept in self.leaving if not work.is_completed()]
        with sent("pp", message_sent(what), tensor):
            work = dist.isend(tensor, group=self.group, group_dst=rank)
        assert work is not None
        self.leaving.append((work, tensor))

    def receive(self, rank: int, what: str) -> IncomingMessage:
        buffer = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.message.device)
        work = dist.irecv(buffer, group=self.group, group_src=rank)
        return IncomingMessage(buffer, work, what)

    def tell(self, loss: Tensor, rank: int) -> None:
        """Broadcasts the loss from one ``rank`` to the whole pipeline."""
        with sent("pp", Called.LOSS, loss):
            dist.broadcast(loss, group=self.group, group_src=rank)

    def finish(self) -> None:
        """Waits until everything is sent: on a GPU the stream waits, not the host."""
        with waited("pp", Called.ALL_SENDS):
            for work, _ in self.leaving:
                work.wait()
        self.leaving.clear()


@dataclass(frozen=True)
class IncomingMessage:
    """A tensor that has arrived, or is on its way."""

    tensor: Tensor
    work: dist.Work | None = None
    what: str = ""

    def wait(self) -> Tensor:
        wait_for(self.work, "pp", self.what)
        return self.tensor


class Reduction(Protocol):
    """Data parallelism around the passes of one stage; ``last``: no other gradients of this step follow.

    PyTorch's runtime only knows how to reduce a stage's gradients after its last microbatch, in a pass of their own;
    and FSDP's hooks would not wait for weight gradients that are computed separately (pytorch#144530).
    """

    def before_microbatch(self, last: bool) -> None:
        """A whole backward pass follows."""

    def before_input_gradients(self) -> None:
        """A backward pass without weight gradients follows."""

    def after_weight_gradients(self, last: bool) -> None:
        """The weight gradients of a microbatch are in ``.grad``, added outside of a backward pass."""


class NoReduction:
    """One rank holds the stage alone."""

    def before_microbatch(self, last: bool) -> None: ...

    def before_input_gradients(self) -> None: ...

    def after_weight_gradients(self, last: bool) -> None: ...


Call = Callable[[nn.Module, Tensor, Batch, bool], Tensor]


class PipelineStage(PipelineStageBase):
    """One stage on its rank; of a microbatch it keeps only what the backward pass needs.

    PyTorch's `PipelineStage` permanently keeps a buffer for every message of a step, holds each output until its
    backward pass, and negotiates shapes before the first step. Here a message has memory only while it is needed, an
    output is freed once it has been sent, and the shapes are known.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        rank: int,
        mailbox: Mailbox,
        reduction: Reduction,
        call: Call,
        deferrable: Deferrable | None,
        trains_below: bool = True,
    ) -> None:
        # The base class only asks this group for the rank's number, which may differ in the group of the messages.
        super().__init__(module, index, stages, mailbox.message.device, mailbox.own_group)
        self.group_rank = rank
        self.mailbox, self.reduction, self.call, self.trains_below = mailbox, reduction, call, trains_below
        self.mode: AbstractContextManager[object] = nullcontext() if deferrable is None else deferrable
        self.inputs: dict[int, IncomingMessage] = {}
        self.output_gradients: dict[int, IncomingMessage] = {}
        self.outputs: dict[int, Tensor] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.kept: dict[int, tuple[Tensor, GradientEdge | None]] = {}
        self.weights_to_do: dict[int, Waiting] = {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: Any = None
    ) -> Tensor:
        (batch,) = args
        inputs = batch.tokens if self.is_first else self.inputs.pop(fwd_chunk_id).wait()
        if not self.is_first and self.has_backward and self.trains_below:
            inputs.requires_grad_()
        with named(pass_name("forward", fwd_chunk_id, self.stage_index)), self.mode:
            output = self.call(self.submod, inputs, batch, self.is_last)
        if self._crosses(self.stage_index + 1):
            self.outputs[fwd_chunk_id] = output
        if self.has_backward:
            # Backward needs only the output's node in the graph; the last stage's backward starts at the loss.
            ends = self.is_last or not output.requires_grad  # nothing of this stage and below it may be trained
            self.kept[fwd_chunk_id] = inputs, None if ends else get_gradient_edge(output)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        inputs, root = self.kept.pop(bwd_chunk_id)
        if self.is_last:
            assert loss is not None
            root, gradient = get_gradient_edge(loss), torch.ones_like(loss)
        else:
            gradient = self.output_gradients.pop(bwd_chunk_id).wait()
        with named(pass_name("backward", bwd_chunk_id, self.stage_index)):
            if full_backward:
                self.reduction.before_microbatch(last_backward)
                self._backward(root, gradient)
            else:
                self.reduction.before_input_gradients()
                with deferring() as waiting:
                    self._backward(root, gradient)
                self.weights_to_do[bwd_chunk_id] = waiting
        if not self.is_first and not inputs.requires_grad:
            self.input_gradients[bwd_chunk_id] = torch.zeros_like(inputs)  # the schedule has a message, nobody reads it
        elif not self.is_first:
            assert inputs.grad is not None
            self.input_gradients[bwd_chunk_id] = inputs.grad
            inputs.grad = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with named(pass_name("weight gradients", bwd_chunk_id, self.stage_index)):
            compute(self.weights_to_do.pop(bwd_chunk_id))
            self.reduction.after_weight_gradients(last_backward)

    def _backward(self, root: GradientEdge | None, gradient: Tensor) -> None:
        if root is None:
            return
        # Starts at an edge: started at a tensor, PyTorch 2.13 passes the call to the mode, which is off inside it.
        with self.mode:
            torch.autograd.backward((root,), (gradient,))

    def _crosses(self, neighbour: int) -> bool:
        """Whether a neighbouring stage exists and lives on another rank."""
        rank = self.stage_index_to_group_rank.get(neighbour)
        return rank is not None and rank != self.group_rank

    # Messages. The runtime starts the operations that these return; ours have started already, so they return none.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        source = self.stage_index_to_group_rank[self.stage_index - 1]
        self.inputs[fwd_chunk_id] = self.mailbox.receive(source, stage_output(self.stage_index - 1))
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        source = self.stage_index_to_group_rank[self.stage_index + 1]
        what = stage_input_gradient(self.stage_index + 1)
        self.output_gradients[bwd_chunk_id] = self.mailbox.receive(source, what)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        target = self.stage_index_to_group_rank[self.stage_index + 1]
        self.mailbox.send(self.outputs.pop(fwd_chunk_id), target, stage_output(self.stage_index))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        target = self.stage_index_to_group_rank[self.stage_index - 1]
        self.mailbox.send(self.input_gradients.pop(bwd_chunk_id), target, stage_input_gradient(self.stage_index))
        return []

    # The same between two stages of one rank.

    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        self.inputs[mb_index] = IncomingMessage(prev_stage_outputs.detach())

    def get_local_bwd_output(self, mb_index: int) -> Tensor:
        return self.input_gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.output_gradients[mb_index] = IncomingMessage(next_stage_bwd_outputs)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Required by the base class, as the next two, and never called: the shapes are known."""
        raise NotImplementedError

    _prepare_backward_infra = _create_grad_recv_info = _prepare_forward_infra


# -- Messages between stages of unlike degrees: each in the pieces that both ends share (`layout.boundaries`) ----------


@dataclass(frozen=True)
class Routes:
    """Which pieces of a message this rank exchanges with each pipeline rank."""

    sent: Mapping[int, tuple[SharedPiece, ...]]
    received: Mapping[int, tuple[SharedPiece, ...]]


def routes_of(job: Job, rank: int) -> Routes:
    """The routes of one rank to all pipeline ranks: in folded and interleaved schedules not only the next is one."""
    stages = range(job.strategy.pp)
    return Routes(
        {stage: pieces_sent(job, rank, stage) for stage in stages},
        {stage: pieces_received(job, rank, stage) for stage in stages},
    )


class RoutedMailbox(Mailbox):
    """Sends pieces to any rank of the world: ``group`` is the world, ``own_group`` this rank's pipeline group."""

    def __init__(
        self, group: dist.ProcessGroup, own_group: dist.ProcessGroup, message: Message, routes: Routes
    ) -> None:
        super().__init__(group, message)
        self.own_group, self.routes = own_group, routes

    def send(self, tensor: Tensor, rank: int, what: str) -> None:
        self.message.check(tensor, what)
        self.leaving = [(work, kept) for work, kept in self.leaving if not work.is_completed()]
        for piece in self.routes.sent[rank]:
            part = _part(tensor.detach(), piece).contiguous()
            with sent("pp", message_sent(what), part):
                work = dist.isend(part, piece.rank, group=self.group)
            assert work is not None
            self.leaving.append((work, part))

    def receive(self, rank: int, what: str) -> IncomingMessage:
        whole = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.message.device)
        pieces = self.routes.received[rank]
        parts = [torch.empty_like(_part(whole, piece), memory_format=torch.contiguous_format) for piece in pieces]
        works = [dist.irecv(part, piece.rank, group=self.group) for part, piece in zip(parts, pieces)]
        return IncomingPieces(whole, None, what, pieces, parts, works)

    def tell(self, loss: Tensor, rank: int) -> None:
        """Sends nothing: the last stage first adds up the losses of its ranks."""


@dataclass(frozen=True)
class IncomingPieces(IncomingMessage):
    """A tensor whose pieces are on their way."""

    pieces: Sequence[SharedPiece] = ()
    parts: Sequence[Tensor] = ()
    works: Sequence[dist.Work | None] = ()

    def wait(self) -> Tensor:
        for piece, part, work in zip(self.pieces, self.parts, self.works):
            wait_for(work, "pp", self.what)
            _part(self.tensor, piece).copy_(part)
        return self.tensor


def _part(tensor: Tensor, piece: SharedPiece) -> Tensor:
    return tensor[slice(*piece.rows), slice(*piece.tokens)]


# -- A step: our list of actions in the terms of PyTorch's runtime, run on this rank's stages ------


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
    if batch.token_keys is not None:
        known["token_keys"] = batch.token_keys
    if last and batch.ahead is not None:
        known["ahead"] = batch.ahead
    output: Tensor = module(inputs, labels, **known)
    return output


class PipelineRunner:
    """Runs steps of ``schedule`` on this rank's ``modules`` (by the number of their stage).

    ``rank`` is this rank's number in the schedule, ``mailbox`` sends and receives hidden states, ``call`` runs a stage.
    ``trains_below`` tells of a stage whether anything in the stages before it is trained.
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
        trains_below: Callable[[int], bool] = lambda stage: True,
    ) -> None:
        if tuple(sorted(modules)) != schedule.stages_of(rank):
            raise ValueError(f"rank {rank} holds stages {schedule.stages_of(rank)}, not {tuple(sorted(modules))}")
        self.schedule, self.mailbox, self.tied = schedule, mailbox, tied
        deferrable = Deferrable(tied.borrowers if tied else ()) if splits_backward(schedule) else None
        self.stages = []
        for index, module in sorted(modules.items()):
            reduction = reductions[module] if reductions else NoReduction()
            stage = PipelineStage(
                module, index, schedule.stages, rank, mailbox, reduction, call, deferrable, trains_below(index)
            )
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
