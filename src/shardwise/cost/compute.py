"""Arithmetic of one step at the device's peak: the floor under every step time."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.flops import head_forward_flops, layer_forward_flops, prediction_forward_flops
from shardwise.cost.stages import RankContents, fully_recomputed_share
from shardwise.cost.traffic import ComputeWindows
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.spec.job import Job


@dataclass(frozen=True)
class StageCompute:
    """Seconds of arithmetic of one microbatch on one device of a pipeline rank, at peak."""

    matrices_forward: float
    attention_forward: float
    matrices_recomputed: float
    attention_recomputed: float

    @property
    def forward(self) -> float:
        return self.matrices_forward + self.attention_forward

    @property
    def backward(self) -> float:
        return 2 * self.forward + self.matrices_recomputed + self.attention_recomputed

    def windows(self, microbatches: int) -> ComputeWindows:
        attention_backward = 2 * self.attention_forward + self.attention_recomputed
        return ComputeWindows(
            microbatches * self.forward,
            microbatches * self.backward,
            microbatches * self.attention_forward,
            microbatches * attention_backward,
        )


def stage_compute(job: Job, contents: RankContents) -> StageCompute:
    """Ideal seconds per microbatch; low-precision recipes speed up layer products only, not attention or head."""
    device, recipe = job.cluster.device, job.training.recipe
    wide = "fp32" if recipe.compute == "fp32" else "fp16" if recipe.compute == "fp16" else "bf16"
    narrow_peak, wide_peak = device.peak_flops(recipe.compute), device.peak_flops(wide)
    tokens = job.microbatch_tokens / job.strategy.tp
    matrices = attention = 0.0
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        flops = layer_forward_flops(job.model, job.training.seq, moe=moe)
        matrices += count * flops.matrices * tokens / narrow_peak
        attention += count * flops.attention * tokens / wide_peak
    after_layers = head_forward_flops(job.model) + prediction_forward_flops(job.model)
    head = after_layers * tokens / wide_peak if contents.has_head else 0.0
    again_matrices, again_attention = _recomputed_shares(job, contents)
    return StageCompute(matrices + head, attention, matrices * again_matrices, attention * again_attention)


def _recomputed_shares(job: Job, contents: RankContents) -> tuple[float, float]:
    """Shares of the layers' forward products and attention that run again in the backward pass."""
    strategy, share = job.strategy, fully_recomputed_share(job, contents)
    if strategy.recompute == "selective":
        return _up_projection_share(job), 1.0 if "attention" in job.recomputed_operators else 0.0
    return share, share


def _up_projection_share(job: Job) -> float:
    """Share of a layer's products that the up-projections of latent attention are."""
    if "up-projection" not in job.recomputed_operators or job.model.mla is None:
        return 0.0
    up = sum(2 * m.inputs * m.outputs for m in job.model.attention_matrices if m.name.endswith("up"))
    return up / layer_forward_flops(job.model, job.training.seq, moe=job.model.moe is not None).matrices


def bubble_seconds(job: Job, stage: StageCompute) -> float:
    """Idle seconds of the pipeline in one step, from the schedule's closed form, messages not counted."""
    strategy = job.strategy
    if strategy.pp == 1:
        return 0.0
    chunks = strategy.chunks_per_rank
    forward, weight_gradient = stage.forward / chunks, stage.forward / chunks
    input_gradient = stage.backward / chunks - weight_gradient
    return float(
        idle_seconds(strategy.schedule, strategy.pp, job.microbatches, chunks, forward, input_gradient, weight_gradient)
    )
