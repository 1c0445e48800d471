"""The engine: a job's model, cut as its strategy says, and one training step of it.

Techniques are applied from outside, always in this order: stages, tensor, context, experts, recompute, data. Each is
one file or folder that knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.context import apply_context, cut_sequence
from shardwise.engine.data import apply_data
from shardwise.engine.experts import apply_experts, update_balance
from shardwise.engine.gradient_norm import GradientNorm, clip_factor, scale_gradients
from shardwise.engine.gradients import held, ranks_with_copy, sum_partial
from shardwise.engine.mesh import Mesh, build_mesh
from shardwise.engine.names import named
from shardwise.engine.optimizer import Settings, build_optimizer
from shardwise.engine.patterns import DECODER
from shardwise.engine.pipeline import (
    Message,
    PipelineRunner,
    TiedEnds,
    keep_stage,
    schedule_of,
    stage_layers,
    stages_of_rank,
    tie_ends,
)
from shardwise.engine.precision import Precision, precision_of
from shardwise.engine.recompute import apply_recompute
from shardwise.engine.reductions import all_reduce_sum
from shardwise.engine.refuse import require_runs
from shardwise.engine.tensor import apply_tensor
from shardwise.engine.values import initialise_parts, materialise
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MixtureOfExperts
from shardwise.spec.job import Job
from shardwise.spec.optimization import Optimization


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device, equal on every rank: reading them waits for the step, so do it seldom."""

    loss: Tensor  # mean over the labels that count, of the whole batch
    gradient_norm: Tensor


class Engine:
    """This rank's part of a job: `step` trains, on this rank's share of a global batch.

    Every rank of the world makes one, in the default process group.
    """

    def __init__(self, job: Job, *, device: str = "cpu", seed: int = 0) -> None:
        require_runs(job)
        self.job, self.device = job, torch.device(device)
        self.mesh = build_mesh(job.strategy, self.device.type, job.model.key_value_heads)
        precision = precision_of(job.training, self.device)
        self.stages = _cut_stages(job, self.mesh)
        self.tied = _tied(job, self.mesh, self.stages)
        self.data = apply_data(list(self.stages.values()), self.mesh, precision, patterns=DECODER)
        for stage in self.stages.values():
            materialise(stage, self.device)
        if self.tied:
            self.tied.follow()
        initialise_parts(self.stages.values(), job.model, seed)
        self.data.start()
        self.parameters = held(self.stages.values())
        self.optimizer = build_optimizer(
            [(one.name, one.parameter) for one in self.parameters],
            job.training,
            settings_of(job.training.optimization),
            masters=self.data.masters,
        )
        self.gradient_norm = GradientNorm([ranks_with_copy(one.part, self.mesh) for one in self.parameters], device)
        self.pipeline = _pipeline(self, precision) if job.strategy.pp > 1 else None
        self.mixtures = [
            one for stage in self.stages.values() for one in stage.modules() if isinstance(one, MixtureOfExperts)
        ]

    def step(self, batch: Batch) -> StepResult:
        """Forward, backward and update; ``batch`` holds the sequences of this data-parallel rank."""
        loss = self.forward_backward(batch)
        return StepResult(loss, self.update())

    def forward_backward(self, batch: Batch) -> Tensor:
        """The loss of the global batch; gradients are complete on every rank."""
        batch = self._own_tokens(batch)
        tokens = self._over_data(batch.counted.float())
        for mixture in self.mixtures:
            mixture.balance_scale = self.job.model.numerics.balance_loss / self.job.sequences
        loss = self._passes(batch.microbatches(self.job.microbatches), tokens)
        with named("gradients: last sums"):
            sum_partial(self.parameters, self.mesh)
            if self.tied:
                self.tied.add_gradients()
        return self._over_data(loss)

    def update(self) -> Tensor:
        """Clips the gradients and moves the weights; the gradients' norm before that."""
        gradients, largest = [one.gradient for one in self.parameters], self.job.training.optimization.clip_norm
        norm = self.gradient_norm(gradients)
        if largest is not None:
            scale_gradients(gradients, clip_factor(norm, largest))
        self.optimizer.step()
        for stage in self.stages.values():
            update_balance(stage, self.mesh, self.job.model.numerics.bias_rate)
        self.data.after_step()
        self.optimizer.zero_grad()
        return norm

    def _passes(self, microbatches: Sequence[Batch], tokens: Tensor) -> Tensor:
        if self.pipeline:
            return self.pipeline.step(microbatches, tokens)
        (model,) = self.stages.values()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(microbatches):
            self.data.before_microbatch(last=number == len(microbatches) - 1)
            with named(f"forward {number}"):
                lost = model(batch.tokens, batch.labels, positions=batch.positions, documents=batch.documents)
            with named(f"backward {number}"):
                loss = lost / tokens
                loss.backward()
            total += loss.detach()
        return total

    def _own_tokens(self, batch: Batch) -> Batch:
        """What context parallelism leaves of every sequence on this rank."""
        rank, size, method = self.mesh.rank("cp"), self.mesh.size("cp"), self.job.strategy.context_method
        return batch.changed(lambda tensor: cut_sequence(tensor, rank, size, method))

    def _over_data(self, number: Tensor) -> Tensor:
        """The sum over all ranks that hold other tokens of the step."""
        for name in ("cp", "dp"):
            if self.mesh.size(name) > 1:
                all_reduce_sum(number, self.mesh.group(name))
        return number


def settings_of(described: Optimization) -> Settings:
    return Settings(
        learning_rate=described.learning_rate,
        betas=(described.beta1, described.beta2),
        epsilon=described.epsilon,
        weight_decay=described.decay,
        momentum=described.momentum,
    )


def _cut_stages(job: Job, mesh: Mesh) -> dict[int, nn.Module]:
    """The stages of this rank, without values, cut by everything but data parallelism."""
    layers, last = stage_layers(job), len(stage_layers(job)) - 1
    stages: dict[int, nn.Module] = {}
    for stage in stages_of_rank(job, mesh.rank("pp")):
        with torch.device("meta"):
            decoder = keep_stage(Decoder(job.model), layers[stage], first=stage == 0, last=stage == last)
        apply_tensor(decoder, mesh, DECODER, job.model)
        apply_context(decoder, mesh, job.strategy)
        if job.model.moe:
            apply_experts(decoder, mesh, job.strategy, lambda rank: rank // job.cluster.node_devices)
        stages[stage] = decoder
    apply_recompute(list(stages.values()), job, DECODER)
    return stages


def _tied(job: Job, mesh: Mesh, stages: dict[int, nn.Module]) -> TiedEnds | None:
    if not job.model.tied_embeddings or job.strategy.pp == 1:
        return None
    return tie_ends(stages, schedule_of(job).placement, mesh.group("pp"))


def _pipeline(engine: Engine, precision: Precision) -> PipelineRunner:
    job, strategy = engine.job, engine.job.strategy
    parts = strategy.cp * (strategy.tp if strategy.sequence_parallel else 1)
    shape = (strategy.microbatch, job.training.seq // parts, job.model.hidden)
    message = Message(shape, precision.compute, engine.device)
    return PipelineRunner(
        schedule_of(job), engine.stages, engine.mesh.group("pp"), message, reduction=engine.data, tied=engine.tied
    )
