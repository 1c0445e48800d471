"""A floor under the step time: the predicted step with its matmuls at the device's peak, and nothing else computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cost.compute.flops import head_forward_flops, layer_forward_flops, prediction_forward_flops
from shardwise.cost.compute.operators import Operator, fully_recomputed_share, layer_operators, share_run_again
from shardwise.cost.compute.roofline import Seconds
from shardwise.cost.step.prediction import Prediction, RankPrediction
from shardwise.cost.step.stage_time import StageSeconds, layer_shape
from shardwise.cost.traffic.execution import step_traffic
from shardwise.cost.traffic.overlap import ComputeWindows
from shardwise.cost.traffic.traffic import Traffic, with_exposed_seconds
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


@dataclass(frozen=True)
class StageCompute:
    """Seconds of computation of one microbatch on one device of a pipeline rank, at peak."""

    matrices_forward: float
    attention_forward: float
    matrices_recomputed: float
    attention_recomputed: float
    weights_at_once: float
    """Weight gradients that are computed with the input gradients."""

    @property
    def forward(self) -> float:
        return self.matrices_forward + self.attention_forward

    @property
    def backward(self) -> float:
        return 2 * self.forward + self.matrices_recomputed + self.attention_recomputed

    @property
    def passes(self) -> StageSeconds:
        weights = self.matrices_forward - self.weights_at_once
        attention = Seconds(self.attention_forward, 2 * self.attention_forward)
        again = self.matrices_recomputed + self.attention_recomputed
        return StageSeconds(self.forward, self.backward - weights, weights, attention, again)

    def windows(self, microbatches: int) -> ComputeWindows:
        attention = (self.attention_forward, 2 * self.attention_forward + self.attention_recomputed)
        return ComputeWindows(*(microbatches * seconds for seconds in (self.forward, self.backward, *attention)))


def stage_compute(job: Job, contents: RankContents) -> StageCompute:
    """Ideal seconds per microbatch; low-precision recipes speed up layer matmuls only, not attention or head."""
    device, recipe = job.cluster.device, job.training.recipe
    narrow_peak, wide_peak = device.peak_flops(recipe.compute), device.peak_flops(recipe.wide)
    tokens = job.microbatch_tokens / job.strategy.tp
    shape, share = layer_shape(job), fully_recomputed_share(job, contents)
    matrices = attention = again_matrices = again_attention = 0.0
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        flops = layer_forward_flops(job.model, job.training.seq, moe=moe)
        operators = layer_operators(job.model, shape, moe=moe)
        products = count * flops.matrices * tokens / narrow_peak
        scores = count * flops.attention * tokens / wide_peak
        matrices, attention = matrices + products, attention + scores
        again_matrices += products * _run_again(job, operators, "product", share)
        again_attention += scores * _run_again(job, operators, "attention", share)
    after_layers = head_forward_flops(job.model) + prediction_forward_flops(job.model)
    head = after_layers * tokens / wide_peak if contents.has_head else 0.0
    return StageCompute(matrices + head, attention, again_matrices, again_attention, share * matrices)


def _run_again(job: Job, operators: tuple[Operator, ...], kind: str, full_share: float) -> float:
    """Share of a layer's matmuls, or of its attention, that recompute runs again."""
    own = [operator for operator in operators if operator.kind == kind]
    again = sum(operator.flops * share_run_again(job, operator, full_share) for operator in own)
    return again / sum(operator.flops for operator in own)


@dataclass(frozen=True)
class RankFloor:
    """A pipeline rank that computes at peak."""

    job: Job
    """As that rank sees it."""
    contents: RankContents
    compute: StageCompute
    traffics: tuple[Traffic, ...]

    def step_seconds(self, pipeline_seconds: float) -> float:
        """The larger of two bounds: the pipeline with what nothing can hide, and this rank's work with all that it
        waits for. Not their sum, since a rank may wait during the pipeline's idle time.
        """
        timed = [traffic for traffic in self.traffics if traffic.fixed_exposed_seconds is None]
        alone = sum(traffic.seconds for traffic in timed if traffic.window == "none" and not traffic.in_layer)
        work = self.job.microbatches * (self.compute.forward + self.compute.backward)
        return max(pipeline_seconds + alone, work + sum(traffic.exposed_seconds for traffic in timed))

    @property
    def in_pipeline(self) -> RankPrediction:
        """The rank with passes none of which is longer than the predicted one.

        Communication that could hide in the backward pass is left out: beside faster weight gradients less of it would
        hide, which would lengthen the input gradients that other ranks wait for.
        """
        kept = (traffic for traffic in self.traffics if traffic.window == "none" or traffic.in_pass == "forward")
        return RankPrediction(self.job, self.contents, self.compute.passes, tuple(map(_in_its_pass, kept)))


def _in_its_pass(traffic: Traffic) -> Traffic:
    """The traffic without what recompute repeats in the backward pass, if that can hide there."""
    if traffic.window == "none":
        return traffic
    once = 1 - traffic.repeated
    hidden = once * traffic.under_compute_seconds
    return replace(traffic, count=once * traffic.count, repeated=0.0, under_compute_seconds=hidden)


def rank_floor(job: Job, contents: RankContents) -> RankFloor:
    """The floor of a rank; its traffic may hide under the whole pass, whichever matmul a stack runs it beside."""
    compute = stage_compute(job, contents)
    traffics = [
        replace(traffic, unhideable=0.0) if traffic.in_layer else traffic for traffic in step_traffic(job, contents)
    ]
    exposed = with_exposed_seconds(traffics, compute.windows(job.microbatches))
    return RankFloor(job, contents, compute, tuple(exposed))


def rank_floors(prediction: Prediction) -> list[RankFloor]:
    """The floor of every kind of rank in a prediction."""
    return [rank_floor(rank.job, rank.contents) for rank in prediction.ranks]
