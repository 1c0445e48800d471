"""The engine: a job's model, cut as its strategy says, and one training step of it.

Techniques are applied from outside, always in this order: stages, tuning, tensor, context, experts, FP8, recompute,
compile, data. Each is one file or folder that knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.context.apply import apply_attention, apply_context
from shardwise.engine.data.apply import apply_data
from shardwise.engine.experts.apply import apply_experts, update_balance
from shardwise.engine.fp8.apply import apply_fp8
from shardwise.engine.graphs import StepGraphs
from shardwise.engine.mesh import Mesh, build_mesh
from shardwise.engine.optim.precision import precision_of
from shardwise.engine.parameters import initialise_parts, materialise
from shardwise.engine.patterns import DECODER, Patterns, decoder_patterns, matching
from shardwise.engine.pipeline.runtime import call_decoder, keep_stage
from shardwise.engine.pipeline.tied import TiedEnds, tie_ends
from shardwise.engine.preference import PreferenceLoss, answers_loss, in_pairs, pairs_of
from shardwise.engine.recompute import apply_recompute
from shardwise.engine.refuse import require_runs
from shardwise.engine.tensor.apply import apply_tensor
from shardwise.engine.torch_private import has_forward_pre_hooks
from shardwise.engine.trainer import HeldOutLoss, StepResult, Trainer
from shardwise.engine.tuning import apply_tuning, store_frozen
from shardwise.layout.groups import node_of
from shardwise.layout.stages import built_layers, embedding_on_both_ends, placement, stages_of_rank
from shardwise.models.decoder import Decoder
from shardwise.models.moe import MoELayer
from shardwise.spec.fine_tuning import Preference
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy


class Engine(Trainer[Batch]):
    """This rank's part of a job: `step` trains, on the sequences of this data-parallel rank.

    Every rank of the world makes one, in the default process group.
    """

    def __init__(self, job: Job, *, device: str = "cpu", seed: int = 0) -> None:
        require_runs(job)
        place = torch.device(device)
        precision = precision_of(job.training)
        mesh = build_mesh(job.strategy, place.type, job.model.key_value_heads)
        own = job.of_stage(mesh.pipeline_rank)
        stages = cut_stages(own, mesh)
        tied = _tied_ends(job, mesh, stages)
        data = apply_data(list(stages.values()), mesh, precision, patterns=DECODER, job=own)
        for stage in stages.values():
            materialise(stage, place)
        if tied:
            tied.follow()
        initialise_parts(stages.values(), job.model, seed)
        settings = job.training.preference or Preference()
        self.seed = seed
        self.preference = PreferenceLoss(settings, mesh) if job.training.task == "dpo" else None
        super().__init__(job, place, mesh, stages, tied, data, self.preference or call_decoder, DECODER)
        self.mixtures = [
            module for stage in stages.values() for module in stage.modules() if isinstance(module, MoELayer)
        ]
        self.begin_adapters()
        self.graphs = StepGraphs(job, self.optimizer.param_groups)

    def step(self, batch: Batch, *, loss_limit: Tensor | float | None = None) -> StepResult:
        return self.graphs(super().step, self._end_step, batch, loss_limit)

    def microbatches(self, batch: Batch) -> tuple[list[Batch], Tensor]:
        self.require_rows(batch.tokens.shape[0], exactly=True)
        balance = self.job.model.numerics.balance_loss / self.job.sequences
        for mixture in self.mixtures:  # the balance loss is not divided by the number of labels
            mixture.balance_scale = balance if self.scaler is None else balance * self.scaler.scale
        if self.preference is not None:
            batch = in_pairs(batch)
        adapters = self.job.training.adapters
        if adapters is not None and adapters.dropout and torch.is_grad_enabled():  # evaluation drops nothing
            step = self.optimizer.param_groups[0]["step"].long()
            batch = batch.with_keys(self.seed, step, self.rows, self.job.sequences)
        mine = self.own_tokens(batch.with_ahead(self.job.model.mtp_layers))
        parts = mine.microbatches(mine.tokens.shape[0] // self.own_job.strategy.microbatch, self.replicas)
        return parts, mine.counted.float() if self.preference is None else pairs_of(batch) / self.mesh.size("cp")

    @torch.no_grad()
    def before_passes(self, microbatches: Sequence[Batch]) -> None:
        """With preferences the reference judges the answers first: the same weights, without adapters."""
        if self.preference is None:
            return
        loads = [mixture.load.clone() for mixture in self.mixtures]  # only training balances experts
        with self.preference.reference(self.stages.values()):
            if self.pipeline:
                self.pipeline.evaluate(microbatches, torch.ones((), device=self.device))
            else:
                for microbatch in microbatches:
                    self._loss(microbatch)
        self.data.after_evaluation()
        for mixture, load in zip(self.mixtures, loads):
            mixture.load.copy_(load)

    def held_out_loss(self, batch: Batch) -> HeldOutLoss:
        loss = super().held_out_loss(batch)
        for mixture in self.mixtures:  # only training balances experts
            mixture.load.zero_()
        return loss

    def after_update(self) -> None:
        for stage in self.stages.values():
            update_balance(stage, self.mesh, self.job.model.numerics.bias_rate)


def cut_stages(job: Job, mesh: Mesh) -> dict[int, nn.Module]:
    """The stages of this rank, without values, cut by everything but data parallelism."""
    layers = built_layers(job)
    last = len(layers) - 1
    stages: dict[int, nn.Module] = {}
    for stage in stages_of_rank(job, mesh.pipeline_rank):
        with torch.device("meta"):
            decoder = keep_stage(Decoder(job.model), layers[stage], first=stage == 0, last=stage == last)
        apply_tuning(decoder, job, precision_of(job.training).compute)
        apply_tensor(decoder, mesh, decoder_patterns(job.model), job.model)
        if job.training.task == "dpo":
            decoder.loss_function = answers_loss(mesh, job.model)
        apply_attention(decoder, job.training)
        apply_context(decoder, mesh, job.strategy)
        if job.model.moe:
            apply_experts(decoder, mesh, job.strategy, lambda rank: node_of(rank, job.cluster.node_devices))
        store_frozen(decoder, job, precision_of(job.training).compute)
        apply_fp8(decoder, mesh, DECODER, precision_of(job.training).scaling)
        stages[stage] = decoder
    apply_recompute(list(stages.values()), job, DECODER, random=False)
    if job.training.compile:
        apply_compile(list(stages.values()), job.strategy, DECODER)
    return stages


def _tied_ends(job: Job, mesh: Mesh, stages: dict[int, nn.Module]) -> TiedEnds | None:
    """Ties the ends of a pipeline whose last stage reads the first one's embedding: as its head, or in prediction."""
    if job.strategy.pp == 1 or not embedding_on_both_ends(job):
        return None
    reading = {"embedding": job.model.mtp_layers > 0, "head": job.model.tied_embeddings}
    readers = [name for name, reads in reading.items() if reads]
    return tie_ends(stages, placement(job), mesh.pipeline, readers=readers)


__all__ = ["Engine", "StepResult"]


# Functions of the models' modules that compute between their matmuls.
_BETWEEN_MATMULS = ("activation", "positioned", "expand")


def apply_compile(
    stages: nn.Module | Sequence[nn.Module], strategy: Strategy, patterns: Patterns, backend: str = "inductor"
) -> None:
    """Compiles each layer of a rank in place, at its first call. Recompute is applied before, data parallelism after.

    Equal layers share one graph. A layer that does not communicate is compiled whole; if selective recompute names any
    of its cheap functions, all of them are recomputed. In a layer that communicates, each part between collectives is
    compiled separately: a graph break at a collective would allow neither recompute nor overlap.
    """
    if torch.cuda.is_available():
        # Otherwise the compiler initialises CUDA in the middle of a pass, which checkpointing refuses.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    settings: dict[str, Any] = {"backend": backend, "fullgraph": True}
    for part in [stages] if isinstance(stages, nn.Module) else stages:
        for _, layer in matching(part, patterns.layers):
            if any(_communicates(module, strategy) for module in layer.modules()):
                _compile_parts(layer, partial(torch.compile, **settings), strategy)
            else:
                layer.compile(**settings)


def _communicates(module: nn.Module, strategy: Strategy) -> bool:
    """Whether the module's own forward pass talks to other ranks. (Attention over ranks is an operator of its own.)"""
    over_tensor = strategy.tp > 1 and (
        hasattr(module, "project") or hasattr(module, "join") or has_forward_pre_hooks(module)
    )
    over_experts = hasattr(module, "exchange") and max(strategy.tp, strategy.cp, strategy.ep) > 1
    return over_tensor or over_experts


def _compile_parts(module: nn.Module, compiled: Any, strategy: Strategy) -> None:
    """Compiles the largest parts of the module that neither communicate nor are called by recompute."""
    if not any(_communicates(part, strategy) or _recomputed(part) for part in module.modules()):
        module.forward = compiled(module.forward)
        return
    for name in _BETWEEN_MATMULS:
        function: Any = getattr(module, name, None)
        if hasattr(function, "again"):
            function.again = compiled(function.again)
        elif callable(function):
            setattr(module, name, compiled(function))
    for child in module.children():
        if not type(child).__module__.startswith("torch.nn") and "norm" not in type(child).__name__.lower():
            _compile_parts(child, compiled, strategy)


def _recomputed(module: nn.Module) -> bool:
    return any(hasattr(getattr(module, name, None), "again") for name in _BETWEEN_MATMULS)
