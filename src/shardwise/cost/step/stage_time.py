"""Seconds that one device of a pipeline rank computes for one microbatch, from the operators of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import select
from shardwise.cost.compute.operators import (
    LayerShape,
    Operator,
    OperatorKind,
    ends_operators,
    fully_recomputed_share,
    layer_operators,
    share_run_again,
)
from shardwise.cost.compute.roofline import Seconds, operator_seconds
from shardwise.cost.memory.states import Sharding, owned_parameters
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


@dataclass(frozen=True)
class StageSeconds(Seconds):
    """One microbatch on one pipeline rank; ``input_gradient`` includes the forward passes that are ``recomputed``."""

    attention: Seconds = Seconds()
    recomputed: float = 0.0


def layer_shape(job: Job, context_rank: int | None = None) -> LayerShape:
    """The shape of the job's layers on one device; of the context ranks by default the busiest, which is the last."""
    strategy = job.strategy
    tokens = job.microbatch_tokens
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    zigzag = strategy.cp if strategy.context_method != "ulysses" else 1
    rank = zigzag - 1 if context_rank is None or zigzag == 1 else context_rank
    experts = job.model.moe.experts / strategy.ep if job.model.moe else 1.0
    shards = strategy.expert_tensor_parallel
    return LayerShape(tokens, region, job.training.seq, strategy.tp, shards, zigzag, rank, experts)


def stage_seconds(job: Job, contents: RankContents) -> StageSeconds:
    """One microbatch on a device of this pipeline rank, including the calls of its chunks."""
    call = job.cluster.device.efficiency.stage_call_seconds * job.strategy.chunks_per_rank
    return part_seconds(job, contents, call)


def part_seconds(job: Job, contents: RankContents, call: float = 0.0) -> StageSeconds:
    """One microbatch through the layers and ends in ``contents``; each pass has ``call`` seconds on top."""
    passes, attention, again = Seconds(), Seconds(), 0.0
    share = fully_recomputed_share(job, contents)
    for operator, seconds in _layers(job, contents):
        passes += seconds.with_weights_at_once(share)
        if operator.kind == "attention":
            attention += seconds
        again += seconds.forward * share_run_again(job, operator, share)
    for _, seconds in _ends(job, contents):
        passes += seconds
    passes += Seconds(call, call)
    return StageSeconds(passes.forward, passes.input_gradient + again, passes.weight_gradient, attention, again)


def seconds_by_kind(job: Job, contents: RankContents) -> dict[OperatorKind, float]:
    """Both passes of one microbatch by the kind of operator, without what recompute runs again."""
    found: dict[OperatorKind, float] = {"product": 0.0, "attention": 0.0, "traffic": 0.0}
    for operator, seconds in (*_layers(job, contents), *_ends(job, contents)):
        found[operator.kind] += seconds.forward + seconds.backward
    return found


def _layers(job: Job, contents: RankContents) -> Iterator[tuple[Operator, Seconds]]:
    shape, seconds_of = layer_shape(job), _timed(job)
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        if count:
            for operator in layer_operators(job.model, shape, moe=moe):
                yield operator, seconds_of(operator) * count


def _ends(job: Job, contents: RankContents) -> Iterator[tuple[Operator, Seconds]]:
    if contents.has_head:
        seconds_of = _timed(job)
        for operator in ends_operators(job.model, layer_shape(job)):
            yield operator, seconds_of(operator)


def _timed(job: Job) -> Callable[[Operator], Seconds]:
    device, recipe, stack = job.cluster.device, job.training.recipe, job.running_stack
    return lambda operator: operator_seconds(operator, device, recipe, stack)


def step_overhead(job: Job) -> float:
    """What the host adds to a step: nothing where the step is one graph, its optimizer included."""
    return 0.0 if job.running_stack.cuda_graphs == "step" else job.cluster.device.efficiency.step_seconds


def optimizer_seconds(job: Job, contents: RankContents, sharding: Sharding) -> Any:
    """The optimizer step, which is bound by memory, and the fixed overhead of a step.

    30 bytes per owned parameter (gradient, master weight and two moments read, three written, weight written), 8 per
    local one (gradient norm and zeroing), and the bytes that gradient compression moves, at sustained bandwidth.
    """
    device = job.cluster.device
    owned = owned_parameters(contents, sharding)
    local = owned if sharding.gradients_sharded else contents.total
    moved = 30 * owned + 8 * local + sharding.moved_bytes * contents.total
    seconds = moved / (device.memory_bandwidth * device.efficiency.memory) + step_overhead(job)
    if job.stack.per_parameter_shards:
        matrices = len(job.model.attention_matrices) + len(job.model.mlp_matrices(job.model.ffn))
        # One copy into the reduce-scatter buffer, one out of the all-gather's, for every rank's part of every matrix.
        copies = select(sharding.zero == 1, 2 * sharding.shards * contents.layers * matrices, 0)
        seconds = seconds + copies * device.efficiency.operator_seconds
    return seconds
