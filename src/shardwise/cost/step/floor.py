"""A floor under the step time: matmuls at the device's peak, communication as priced, the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cost.compute.flops import head_forward_flops, layer_forward_flops, prediction_forward_flops
from shardwise.cost.compute.operators import Operator, fully_recomputed_share, layer_operators, share_run_again
from shardwise.cost.step.stage_time import layer_shape
from shardwise.cost.traffic.execution import step_traffic
from shardwise.cost.traffic.overlap import ComputeWindows
from shardwise.cost.traffic.pipeline import waiting_for_links
from shardwise.cost.traffic.traffic import Traffic, with_exposed_seconds
from shardwise.layout.stages import RankContents, pipeline_ranks_to_price, rank_contents, rank_kinds
from shardwise.layout.views import is_unlike, replicas_by_kind, timed_on
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import GENERIC_GEMM
from shardwise.spec.job import Job


@dataclass(frozen=True)
class StageCompute:
    """Seconds of computation of one microbatch on one device of a pipeline rank, at peak."""

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
        attention = (self.attention_forward, 2 * self.attention_forward + self.attention_recomputed)
        return ComputeWindows(*(microbatches * seconds for seconds in (self.forward, self.backward, *attention)))


def at_peak(job: Job) -> Job:
    """The same job on a device whose matmuls run at its peak; the floor overlaps communication with these."""
    device = job.cluster.device
    perfect = replace(
        device.efficiency,
        gemm=FrozenMapping(dict.fromkeys((*device.peak, *GENERIC_GEMM), 1.0)),
        gemm_rolloff=0.0,
        operand_traffic=0.0,
        operator_seconds=0.0,
    )
    return job.unchecked(cluster=replace(job.cluster, device=replace(device, efficiency=perfect)))


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
    return StageCompute(matrices + head, attention, again_matrices, again_attention)


def _run_again(job: Job, operators: tuple[Operator, ...], kind: str, full_share: float) -> float:
    """Share of a layer's matmuls, or of its attention, that recompute runs again."""
    own = [operator for operator in operators if operator.kind == kind]
    again = sum(operator.flops * share_run_again(job, operator, full_share) for operator in own)
    return again / sum(operator.flops for operator in own)


def bubble_seconds(job: Job, stage: StageCompute) -> float:
    """Idle seconds of the pipeline in one step, by the schedule's closed form, without messages."""
    strategy = job.strategy
    if strategy.pp == 1:
        return 0.0
    chunks = strategy.chunks_per_rank
    forward, weight_gradient = stage.forward / chunks, stage.forward / chunks
    input_gradient = stage.backward / chunks - weight_gradient
    return float(
        idle_seconds(strategy.schedule, strategy.pp, job.microbatches, chunks, forward, input_gradient, weight_gradient)
    )


@dataclass(frozen=True)
class Floor:
    """The step of the slowest pipeline rank, which no software can beat with this layout on this network."""

    job: Job
    contents: RankContents
    compute: StageCompute
    traffics: tuple[Traffic, ...]
    bubble_seconds: float

    @property
    def compute_seconds(self) -> float:
        return self.job.microbatches * (self.compute.forward + self.compute.backward)

    @property
    def exposed_seconds(self) -> float:
        return sum(traffic.exposed_seconds for traffic in self.traffics)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.bubble_seconds + self.exposed_seconds


def step_floor(job: Job) -> Floor:
    """The floor under the step of ``job``; of unlike stages, without the time in which they wait for each other."""
    replicas = replicas_by_kind(job)
    if replicas:
        return max(map(step_floor, replicas), key=lambda floor: floor.seconds)
    if is_unlike(job):
        ranks = range(job.strategy.pp)
        floors = [_floor(timed_on(job, rank), rank_contents(job.of_stage(rank), rank), bubble=False) for rank in ranks]
    else:
        floors = [_floor(job, contents) for contents in rank_kinds(job, pipeline_ranks_to_price(job))]
    return max(floors, key=lambda floor: floor.seconds)


def _floor(job: Job, contents: RankContents, *, bubble: bool = True) -> Floor:
    compute = stage_compute(job, contents)
    traffics = with_exposed_seconds(step_traffic(at_peak(job), contents), compute.windows(job.microbatches))
    idle = bubble_seconds(job, compute) if bubble else 0.0
    silent = job.microbatches * (compute.forward + compute.backward) + idle
    return Floor(job, contents, compute, tuple(waiting_for_links(job, traffics, silent)), idle)
