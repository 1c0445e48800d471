"""One training step of a rank's stages, whatever network they are of: passes, sums, clipping, update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.context.sequence import cut_sequence
from shardwise.engine.data.apply import DataParallel
from shardwise.engine.data.synchronisation import LateSums, OuterSteps
from shardwise.engine.fp8.apply import delay_scaling, weights_in_fp8, widen_gradients
from shardwise.engine.labels import Called, StepPhase, pass_name
from shardwise.engine.mesh import Mesh
from shardwise.engine.offload.activations import offload_activations
from shardwise.engine.offload.store import GRADIENT, MASTER, Store
from shardwise.engine.offload.streamed import needed_first, wait_before
from shardwise.engine.optim.one_pass import REFUSED, GradientNorm, clip_divisor
from shardwise.engine.optim.optimizer import LocalOptimizer
from shardwise.engine.optim.precision import LossScaler, precision_of
from shardwise.engine.parameters import HeldParameter, as_divided, held, local, ranks_with_copy, sum_partial
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.pipeline.runtime import (
    Call,
    Mailbox,
    Message,
    PipelineRunner,
    RoutedMailbox,
    routes_of,
    schedule_of,
)
from shardwise.engine.pipeline.tied import TiedEnds
from shardwise.engine.profiler_ranges import named, sent
from shardwise.engine.refuse import may_offload
from shardwise.engine.tuning import first_lengths, trains_below
from shardwise.layout.groups import rank_at
from shardwise.layout.sharding import updates_on_device
from shardwise.layout.stages import built_layers, placement
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

Given = TypeVar("Given")


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device, equal on every rank; reading them waits for the step.

    If workers do not synchronise in every step, both are those of this worker's part of the batch.
    """

    loss: Tensor  # mean over the labels of the whole batch that count
    gradient_norm: Tensor
    """Not finite if a gradient was not finite on any rank; minus infinity if the loss was above its limit. In both
    cases no weight has changed on any rank."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Tensors on the device, equal on every rank."""

    loss: Tensor  # mean over the labels of the whole batch that count
    labels: Tensor  # how many those are


class Trainer(ABC, Generic[Given]):
    """This rank's stages under data parallelism, with their values; ``call`` runs a stage on a microbatch.

    ``Given`` is what a step takes: this rank's share of a global batch.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        mesh: Mesh,
        stages: dict[int, nn.Module],
        tied: TiedEnds | None,
        data: DataParallel,
        call: Call,
        patterns: Patterns,
    ) -> None:
        self.job, self.device, self.mesh = job, device, mesh
        self.own_job = job.of_stage(mesh.pipeline_rank)
        # Stages may have unlike degrees: this rank takes the sequences of so many ranks of the stage with the most.
        self.replicas = job.strategy.data_parallel // self.own_job.strategy.data_parallel
        self.stages, self.tied, self.data, self.call = stages, tied, data, call
        self.in_fp8 = weights_in_fp8(stages.values())
        precision, optimization = precision_of(job.training), job.training.optimization
        self.delayed = delay_scaling(self.in_fp8, device) if precision.delayed else None
        self.scaler = LossScaler(optimization.loss_scaling, device) if precision.scaled else None
        data.start()
        widen_gradients(self.in_fp8)
        self.parameters = held(stages.values())
        self.base: str | None = None  # fingerprint of the frozen weights, of which checkpoints hold none
        self.trained = [held for held in self.parameters if held.parameter.requires_grad]
        offload = job.strategy.offload
        self.store = (
            Store(offload, device, updates_on_device=updates_on_device(job, offload)) if may_offload(job) else None
        )
        self.optimizer = LocalOptimizer(
            [(held.name, held.parameter) for held in self.parameters], job.training, masters=data.masters,
            store=self.store, offload=offload, whole_masters=job.whole_masters,
            on_split=lambda parameter: data.forget_masters([parameter]),
        )  # fmt: skip
        data.forget_masters(self.optimizer.cut)
        self._stream_states(patterns)
        data.offload(self.optimizer.stored, {held.parameter for held in self.parameters if self._stays(held)})
        self.outer, self.late = self._synchronisation()
        # Workers that do not synchronise in every step are separate worlds.
        self.workers = 1 if job.strategy.synchronise.every_step else mesh.size("dp")
        together = None if self.workers == 1 else mesh.group("worker")
        copies = [ranks_with_copy(held.part, mesh) / self.workers for held in self.trained]
        self.gradient_norm = GradientNorm(copies, device, together)
        self.pipeline = self._pipeline(precision.compute) if job.strategy.pp > 1 else None
        if job.strategy.compression.compresses_momentum:
            data.follow_momenta(lambda parameter: self.optimizer.state[parameter]["exp_avg"], optimization.beta1)
        self.reset_compression()
        if self.store is not None and offload.activations:
            offload_activations(
                list(stages.values()), patterns, self.store, offload.activations, at_once=job.strategy.pp == 1
            )

    def step(self, batch: Given, *, loss_limit: Tensor | float | None = None) -> StepResult:
        """Forward, backward and update on this rank's share of the global batch; the loss is that of all of it.

        A step whose loss is above ``loss_limit`` is skipped.
        """
        loss = self.forward_backward(batch)
        return StepResult(loss, self.update(None if loss_limit is None else loss > loss_limit))

    def forward_backward(self, batch: Given) -> Tensor:
        """The loss of the global batch; gradients are complete on every rank (times the scale of the loss in fp16)."""
        if not self.compresses:
            self.compress(self.optimizer.steps_taken() >= self.job.strategy.compression.exact_steps)
        self._forget_casts()
        microbatches, counted = self.microbatches(batch)
        total = (self.over_data(counted) if self.workers == 1 else counted).clamp(min=1)  # no label: no gradient
        divisor = total if self.scaler is None else total / self.scaler.scale
        if self.late is not None:  # so that the sum over workers is the mean of their means
            divisor = divisor * self.workers
        self.before_passes(microbatches)
        loss = self._passes(microbatches, divisor)
        with named(StepPhase.LAST_SUMS):
            sum_partial(self.trained, self.mesh)
            if self.tied:
                self.tied.add_gradients()
        if self.scaler is not None:
            loss = loss / self.scaler.scale
        if self.workers > 1:
            return loss if self.late is None else loss * self.workers
        return self._of_all(loss)

    def update(self, refused: Tensor | None = None) -> Tensor:
        """Clips the gradients and updates the weights; returns the gradients' norm before clipping.

        The norm covers the gradients of all ranks, so that all skip a step if it is not finite or if any rank has
        ``refused`` the step.
        """
        if self.late is not None and not self.late.exchange():
            self._end_step()
            return torch.zeros((), device=self.device)
        if self.late is not None and self.tied and self.tied.weight.grad is not None:
            self.tied.copy_of(self.tied.weight.grad)
        gradients, largest = [held.gradient for held in self.trained], self.job.training.optimization.clip_norm
        if self.optimizer.learnt_steps is not None:
            largest = None  # the momentum was exchanged before the whole gradient was known
        elsewhere = self.data.settle_gradients(held.parameter for held in self.trained)
        norm, scale = self.gradient_norm(gradients, refused, elsewhere), None
        bad = (~torch.isfinite(norm)).float()
        if self.scaler is not None:
            scale = self.scaler.scale.clone()
            self.scaler.update(bad if refused is None else bad * (norm != REFUSED))
            norm = norm / scale
        divisor = None if largest is None else clip_divisor(norm, largest)
        if scale is not None:
            divisor = scale if divisor is None else scale * divisor
        self.optimizer.step(bad=bad, divisor=divisor)
        if self.outer is not None and self.optimizer.stored.streamed is not None:
            self.optimizer.stored.streamed.all_weights()
        if self.outer is not None and self.outer.after_step():
            if self.tied:
                self.tied.copy_of(self.optimizer.values(self.tied.weight))
            self.data.publish()
        self.after_update()
        if self.delayed is not None:
            names = ("tp", "cp", *(() if self.workers > 1 else ("dp",)))
            self.delayed.end_step([self.mesh.group(name) for name in names if self.mesh.size(name) > 1])
        self._end_step()
        return norm

    def _forget_casts(self) -> None:
        """Trained weights may have changed since they were cast; the first microbatch casts them again."""
        for cast in self.in_fp8:
            if cast.is_trained:
                cast.forms = None
        if self.delayed is not None:
            self.delayed.begin_step()
        self.data.before_step()

    def _end_step(self) -> None:
        self.data.after_step()
        self.optimizer.zero_grad()

    def reset_compression(self) -> None:
        """Call after the step count was set: steps are exact until the count says otherwise."""
        self.compress(not self.job.strategy.compression.exact_steps)

    def compress(self, now: bool) -> None:
        """Whether the next steps compress what they send, where the strategy does: after its exact steps."""
        compression = self.job.strategy.compression
        self.compresses = now
        self.data.compress(now)
        self.optimizer.learnt_steps = compression.exact_steps if now and compression.compresses_momentum else None

    def _synchronisation(self) -> tuple[OuterSteps | None, LateSums | None]:
        """How this worker synchronises with the others, if not in every step."""
        synchronise = self.job.strategy.synchronise
        if synchronise.every_step or self.mesh.size("dp") == 1:
            return None, None
        trained = [held.parameter for held in self.trained]
        if synchronise.is_async:
            return None, LateSums(trained, self.mesh.group("dp"), synchronise.staleness)
        values = [self.optimizer.values(parameter) for parameter in trained]
        return OuterSteps(values, self.mesh.group("dp"), synchronise), None

    def begin_adapters(self) -> None:
        """Call when the frozen weights have their values, and before those of trained adapters are loaded."""
        for parameter, lengths in first_lengths(self.stages.values()):
            self.optimizer.write(parameter, MASTER, lengths)
        self.data.publish()

    def on_weights_loaded(self) -> None:
        """Call after weights were set from outside, equally on all data-parallel ranks."""
        self.data.publish()
        self.reset_compression()
        if self.outer is not None:
            self.outer.begin()

    def weight(self, held: HeldParameter) -> Tensor:
        """The fp32 values that are trained, wherever they are stored, divided like the parameter."""
        return as_divided(self.optimizer.read(held.parameter, MASTER).to(self.device), held.parameter)

    def gradient(self, held: HeldParameter) -> Tensor | None:
        """The gradient after `forward_backward`, wherever it is stored, divided like the parameter; or None."""
        self.data.settle_gradients(())
        stored = self.optimizer.stored
        if held.parameter not in stored.summed:
            return held.parameter.grad
        values = stored.read(held.parameter, GRADIENT).view(local(held.parameter).shape)
        return as_divided(values.to(self.device), held.parameter)

    def _stays(self, held: HeldParameter) -> bool:
        """Whether something is added to the gradient after data parallelism has reduced it."""
        ends = () if self.tied is None else self.tied.modules
        return bool(held.part.partial) or any(held.parameter is tied for end in ends for tied in end.parameters())

    def _stream_states(self, patterns: Patterns) -> None:
        """Tells updates that run on the device when the passes need their weights."""
        streamed = self.optimizer.stored.streamed
        if streamed is None:
            return
        layers = {stage: [layer for _, layer in matching(stage, patterns.layers)] for stage in self.stages.values()}
        stage, inside = next(iter(layers.items()))
        streamed.expect(needed_first(inside, stage))
        for stage, inside in layers.items():
            if not self.data.is_sharded(stage):  # sharded weights wait when they are gathered
                wait_before(inside, stage, streamed)

    def offload_optimizer(self, share: float) -> None:
        """Between two steps: changes the share of the optimizer's states kept outside of the device's memory.

        Does nothing for a job that offloads nothing.
        """
        if self.store is not None:
            self.optimizer.offload(share)
            self.data.forget_masters(self.optimizer.cut)

    def evaluate(self, batch: Given) -> Tensor:
        """The loss of a global batch, of which ``batch`` is this rank's share; without training."""
        return self.held_out_loss(batch).loss

    @torch.no_grad()
    def held_out_loss(self, batch: Given) -> HeldOutLoss:
        """The same, and how many labels it is a mean of."""
        self._forget_casts()
        microbatches, counted = self.microbatches(batch)
        total = self.over_data(counted)
        divisor = total.clamp(min=1)
        self.before_passes(microbatches)
        if self.pipeline:
            loss = self.pipeline.evaluate(microbatches, divisor)
        else:
            loss = torch.stack([self._loss(microbatch) / divisor for microbatch in microbatches]).sum()
        return HeldOutLoss(self._of_all(loss), total)

    def _of_all(self, loss: Tensor) -> Tensor:
        """The loss summed over the tokens of all ranks."""
        loss = self.over_data(loss)
        if self.job.strategy.has_unlike_stages:  # some ranks have no peer in the last stage to receive the loss from
            source = rank_at(self.job.strategy, {"pp": placement(self.job)[-1]})
            with sent("pp", Called.LOSS, loss):
                dist.broadcast(loss, source)
        return loss

    @property
    def rows(self) -> range:
        """The sequences of a global batch that this rank takes."""
        return self.own_job.rows_of(self.mesh.rank("dp"))

    @abstractmethod
    def microbatches(self, batch: Given) -> tuple[Sequence[Any], Tensor]:
        """This rank's microbatches of a step, and how many of their labels count (a fresh fp32 scalar)."""

    def before_passes(self, microbatches: Sequence[Any]) -> None:
        """Hook for what the passes of these microbatches need."""

    def after_update(self) -> None:
        """Hook for updates of anything but the weights."""

    def own_tokens(self, batch: Batch) -> Batch:
        """The part of every sequence that context parallelism gives to this rank."""
        rank, size, method = self.mesh.rank("cp"), self.mesh.size("cp"), self.job.strategy.context_method
        return batch.changed(lambda tensor: cut_sequence(tensor, rank, size, method))

    def over_data(self, number: Tensor) -> Tensor:
        """The sum over all ranks that hold different tokens of the step."""
        for name in ("cp", "dp"):
            if self.mesh.size(name) > 1:
                with sent(name, Called.OVER_THE_BATCH, number):
                    all_reduce_sum(number, self.mesh.group(name))
        return number

    def require_rows(self, rows: int, exactly: bool) -> None:
        """Refuses a share of a batch that is not whole microbatches, or, if ``exactly``, not as many as the job has."""
        each, wanted = self.own_job.strategy.microbatch, len(self.rows)
        if rows % each or (exactly and rows != wanted):
            problem = f"has {rows} rows on this rank, which are not {wanted if exactly else f'a multiple of {each}'}"
            raise SpecError("batch", problem, "give every rank its share of training.global_batch")

    def _passes(self, microbatches: Sequence[Any], divisor: Tensor) -> Tensor:
        if self.pipeline:
            return self.pipeline.step(microbatches, divisor)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(microbatches):
            self.data.before_microbatch(last=number == len(microbatches) - 1)
            with named(pass_name("forward", number)):
                lost = self._loss(batch)
            with named(pass_name("backward", number)):
                loss = lost / divisor
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _loss(self, microbatch: Any) -> Tensor:
        """The loss of a network that is not cut into stages, summed over what counts."""
        (stage,) = self.stages.values()
        inputs: Any = getattr(microbatch, "tokens", None)
        return self.call(stage, inputs, microbatch, True).float()

    def _trains_below(self, stage: int) -> bool:
        return trains_below(self.job, (layer for layers in built_layers(self.job)[:stage] for layer in layers))

    def _pipeline(self, dtype: torch.dtype) -> PipelineRunner:
        job, strategy, mesh = self.own_job, self.own_job.strategy, self.mesh
        parts = strategy.cp * (strategy.tp if strategy.sequence_parallel else 1)
        shape = (strategy.microbatch, job.training.seq // parts, job.model.hidden)
        message = Message(shape, dtype, self.device)
        if self.job.strategy.has_unlike_stages:
            world, here = dist.group.WORLD, dist.get_rank()
            assert world is not None
            mailbox: Mailbox = RoutedMailbox(world, mesh.group("pp"), message, routes_of(self.job, here))
        else:
            mailbox = Mailbox(mesh.group("pp"), message)
        return PipelineRunner(
            schedule_of(job, mesh.rank("dp")), self.stages, mesh.pipeline_rank, mailbox,
            reductions=self.data.parts, tied=self.tied, call=self.call, trains_below=self._trains_below,
        )  # fmt: skip
