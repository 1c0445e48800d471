"""Seconds that one device of a pipeline rank computes for one microbatch, from the operators of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import select
from shardwise.cost.compute.operators import (
    LayerShape,
    Operator,
    OperatorKind,
    fully_recomputed_share,
    head_operators,
    layer_operators,
    prediction_operators,
    share_run_again,
)
from shardwise.cost.compute.roofline import Seconds, operator_seconds
from shardwise.cost.memory.states import Sharding, owned_parameters
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


@dataclass(frozen=True)
class StageSeconds:
    """One microbatch on one pipeline rank: the passes, attention's part of them, and what runs again."""

    passes: Seconds
    attention: Seconds
    recomputed: float

    @property
    def forward(self) -> float:
        return self.passes.forward

    @property
    def input_gradient(self) -> float:
        """Input gradients, and the forward passes that recompute runs before them."""
        return self.passes.input_gradient + self.recomputed

    @property
    def weight_gradient(self) -> float:
        return self.passes.weight_gradient

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient


def layer_shape(job: Job, context_rank: int | None = None) -> LayerShape:
    """The shape of the job's layers on one device; of the context ranks the busiest, the last, unless one is given."""
    strategy = job.strategy
    tokens = job.microbatch_tokens
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    zigzag = strategy.cp if strategy.context_method != "ulysses" else 1
    rank = zigzag - 1 if context_rank is None or zigzag == 1 else context_rank
    return LayerShape(tokens, region, job.training.seq, strategy.tp, strategy.expert_tensor_parallel, zigzag, rank)


def _seconds(job: Job, operator: Operator) -> Seconds:
    device, recipe = job.cluster.device, job.training.recipe
    return operator_seconds(operator, device, recipe, job.stack)


def stage_seconds(job: Job, contents: RankContents) -> StageSeconds:
    """What a device of this pipeline rank computes for one microbatch, the calls of its chunks included."""
    parts = part_seconds(job, contents)
    call = job.cluster.device.efficiency.stage_call_seconds * job.strategy.chunks_per_rank
    return StageSeconds(parts.passes + Seconds(call, call), parts.attention, parts.recomputed)


def part_seconds(job: Job, contents: RankContents) -> StageSeconds:
    """What the layers and ends among ``contents`` compute for one microbatch."""
    passes, attention, again = Seconds(), Seconds(), 0.0
    share = fully_recomputed_share(job, contents)
    for operator, seconds in _layers(job, contents):
        passes += seconds.with_weights_at_once(share)
        if operator.kind == "attention":
            attention += seconds
        again += seconds.forward * share_run_again(job, operator, share)
    for _, seconds in _ends(job, contents):
        passes += seconds
    return StageSeconds(passes, attention, again)


def seconds_by_kind(job: Job, contents: RankContents) -> dict[OperatorKind, float]:
    """Both passes of one microbatch by the kind of operator; what recompute runs again is not counted."""
    found: dict[OperatorKind, float] = {"product": 0.0, "attention": 0.0, "traffic": 0.0}
    for operator, seconds in (*_layers(job, contents), *_ends(job, contents)):
        found[operator.kind] += seconds.total
    return found


def _layers(job: Job, contents: RankContents) -> Iterator[tuple[Operator, Seconds]]:
    shape = layer_shape(job)
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        if count:
            for operator in layer_operators(job.model, shape, moe=moe):
                yield operator, _seconds(job, operator) * count


def _ends(job: Job, contents: RankContents) -> Iterator[tuple[Operator, Seconds]]:
    if contents.has_head:
        shape = layer_shape(job)
        after = head_operators(job.model, shape) + job.model.mtp_layers * prediction_operators(job.model, shape)
        for operator in after:
            yield operator, _seconds(job, operator)


def optimizer_seconds(job: Job, contents: RankContents, sharding: Sharding) -> Any:
    """The optimizer step: owned states are read and written in fp32, local weights and gradients touched once.

    30 bytes per owned parameter (gradient, master weight and two moments read, three written, weight written) and 8 per
    local one (gradient norm and zeroing), and what compressing gradients moves, at the memory's sustained speed; plus
    what a step costs besides.
    """
    device = job.cluster.device
    owned = owned_parameters(contents, sharding)
    local = owned if sharding.gradients_sharded else contents.total
    moved = 30 * owned + 8 * local + sharding.moved_bytes * contents.total
    seconds = moved / (device.memory_bandwidth * device.efficiency.memory) + device.efficiency.step_seconds
    if job.stack.per_parameter_shards:
        matrices = len(job.model.attention_matrices) + len(job.model.mlp_matrices(job.model.ffn))
        # One copy into what is reduced, one out of what is gathered, for every rank's part of every matrix.
        copies = select(sharding.zero == 1, 2 * sharding.shards * contents.layers * matrices, 0)
        seconds = seconds + copies * device.efficiency.operator_seconds
    return seconds
