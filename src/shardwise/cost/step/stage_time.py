"""Seconds that one device of a pipeline rank computes for one microbatch, from the operators of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardwise.collectives.arrays import maximum, select
from shardwise.cost.compute.operators import (
    LayerShape,
    Operator,
    OperatorKind,
    OperatorRole,
    ends_operators,
    gradient_share,
    layer_operators,
)
from shardwise.cost.compute.recompute import fully_recomputed_share, share_run_again
from shardwise.cost.compute.roofline import Seconds, mode_of, operator_seconds, product_bytes
from shardwise.cost.memory.activations import key_value_features
from shardwise.cost.memory.states import rank_state_bytes, updated_parameters
from shardwise.layout.sharding import Sharding, last_weights_stay, updates_on_device
from shardwise.layout.stages import RankContents, layers_of_kind
from shardwise.spec.efficiency import by_layer
from shardwise.spec.fine_tuning import Tuning
from shardwise.spec.hardware import UPDATE_BYTES, Device
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.parameters import trained_parameters
from shardwise.spec.stack import Stack
from shardwise.spec.training import OPTIMIZERS, Recipe


@dataclass(frozen=True)
class StageSeconds(Seconds):
    """One microbatch on one pipeline rank."""

    attention: Seconds = Seconds()  # the part of it in attention
    recomputed: float = 0.0  # forward passes that recompute repeats; ``input_gradient`` includes them


def layer_shape(job: Job, context_rank: int | None = None) -> LayerShape:
    """The shape of the job's layers on one device, by default of the busiest context rank, which is the last."""
    strategy = job.strategy
    tokens, lengths, seq = job.computed_tokens, job.training.lengths, job.training.seq
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    zigzag = strategy.cp if strategy.context_method != "ulysses" else 1
    rank = zigzag - 1 if context_rank is None or zigzag == 1 else context_rank
    experts = job.model.moe.experts / strategy.ep if job.model.moe else 1.0
    shards, dropout, attended = strategy.expert_tensor_parallel, job.training.dropout, 1.0
    if lengths is not None and lengths.packing == "packed":
        attended = lengths.attended_share(seq)
    elif lengths is not None:
        seq = round(seq * lengths.computed_share(seq, strategy.microbatch))
    rows, adapters = job.stack.rows_of_experts(job.model), job.stack.adapters
    of_layers = (shards, zigzag, rank, experts, dropout, attended, rows, adapters, job.stack.joins_adapters)
    return LayerShape(tokens, region, seq, strategy.tp, *of_layers)


def _head_shape(job: Job, shape: LayerShape) -> LayerShape:
    tp = job.stack.head_tensor_parallel(shape.tp)
    return shape if tp == shape.tp else replace(shape, tp=tp)


def stage_seconds(job: Job, contents: RankContents) -> StageSeconds:
    """One microbatch on a device of this pipeline rank, including the calls of its chunks."""
    call = job.cluster.device.efficiency.stage_call_seconds * job.strategy.chunks_per_rank
    return part_seconds(job, contents, call)


def part_seconds(job: Job, contents: RankContents, call: float = 0.0) -> StageSeconds:
    """One microbatch through the layers and ends in ``contents``; each pass has ``call`` seconds on top."""
    passes, attention, again = Seconds(), Seconds(), 0.0
    share = fully_recomputed_share(job, contents)
    for operator, seconds, repeated in _layers(job, contents, share):
        passes += seconds.with_weights_at_once(share)
        if operator.kind == "attention":
            attention += seconds
        again += repeated
    for _, seconds in _ends(job, contents):
        passes += seconds
    passes += Seconds(call, call)
    forward = passes.forward * job.training.forward_passes
    return StageSeconds(forward, passes.input_gradient + again, passes.weight_gradient, attention, again)


def seconds_by_kind(job: Job, contents: RankContents) -> dict[OperatorKind, float]:
    """Both passes of one microbatch by the kind of operator, without what recompute runs again."""
    by_kind: dict[OperatorKind, float] = {"product": 0.0, "attention": 0.0, "traffic": 0.0}
    passes = job.training.forward_passes
    of_layers = ((operator, seconds) for operator, seconds, _ in _layers(job, contents, 0.0))
    for operator, seconds in (*of_layers, *_ends(job, contents)):
        by_kind[operator.kind] += passes * seconds.forward + seconds.backward
    return by_kind


def timed_operators(job: Job, contents: RankContents) -> Iterator[tuple[Operator, Seconds]]:
    """The operators of one layer of every kind that a pipeline rank has, and of its end of the model."""
    slower = slowdown(job)
    for kind, _ in contents.held:
        yield from timed_layer(job, kind, slower)
    yield from _ends(job, contents)


def timed_layer(job: Job, kind: LayerRecord, slower: float = 1.0) -> tuple[tuple[Operator, Seconds], ...]:
    """The operators of one layer; matmuls and attention take ``slower`` times as long as at full clock."""
    device, training = job.cluster.device, job.training
    return _timed_layer(
        job.model, layer_shape(job), kind, training.tuning, device, training.recipe, job.running_stack, slower
    )


@lru_cache(maxsize=4096)
def _timed_layer(
    model: Model,
    shape: LayerShape,
    kind: LayerRecord,
    tuning: Tuning,
    device: Device,
    recipe: Recipe,
    stack: Stack,
    slower: float,
) -> tuple[tuple[Operator, Seconds], ...]:
    """Computed once for all modes of recompute and all that reads a layer's seconds."""
    operators = layer_operators(model, shape, kind, tuning)
    return tuple((operator, operator_seconds(operator, device, recipe, stack, slower)) for operator in operators)


def _layers(job: Job, contents: RankContents, full_share: float) -> Iterator[tuple[Operator, Seconds, float]]:
    """Operators of the layers, both their passes, and what recompute repeats of the forward pass."""
    slower = slowdown(job)
    for kind, count in contents.held:
        whole, repeated, kernels, kernels_repeated = Seconds(), 0.0, 0, 0.0
        for operator, seconds in timed_layer(job, kind, slower):
            again = share_run_again(job, operator, full_share)
            whole, kernels = whole + seconds, kernels + operator.kernels
            repeated += again * seconds.forward
            kernels_repeated += again * operator.kernels
            yield operator, seconds * count, again * seconds.forward * count
        each_pass = _host_of_layer(job, kind) / _PASSES
        again = max(0.0, each_pass * kernels_repeated / kernels - repeated)
        flows = gradient_share(job.model, job.training.tuning)
        yield _HOST, _beyond_kernels(each_pass, flows * each_pass, whole) * count, again * count


def _beyond_kernels(forward: float, gradient: float, layer: Seconds) -> Seconds:
    """How much longer the host takes than a layer's kernels; it launches both gradients one after the other."""
    backward = max(2 * gradient, layer.backward)
    weights = max(layer.weight_gradient, min(gradient, backward - layer.input_gradient))
    inputs = backward - weights - layer.input_gradient
    return Seconds(max(0.0, forward - layer.forward), inputs, weights - layer.weight_gradient)


_PASSES = 3  # an operator has its kernels in each: forward, gradients of inputs, gradients of weights
_HOST = Operator(OperatorRole.STARTS, "traffic", kernels=0)


def _host_seconds(job: Job, of_layers: Mapping[str, float], kind: LayerRecord) -> float:
    return by_layer(
        of_layers, mode_of(job.running_stack), rotary=job.model.rotates(kind), moe=kind.feed_forward == "mixture"
    )


def _host_of_layer(job: Job, kind: LayerRecord) -> float:
    """Seconds in which the host launches both passes of a layer; a graph needs no launches."""
    efficiency, stack = job.cluster.device.efficiency, job.running_stack
    if stack.launched_by_graphs:
        return 0.0
    if stack.is_own and efficiency.own is not None:
        host = _host_seconds(job, efficiency.own.host_seconds, kind)
    elif stack.launches == "one by one":
        host = _host_seconds(job, efficiency.host_seconds, kind)
    else:
        return 0.0
    if job.stack.has_adapter_units(job.training, job.strategy):
        host += _UNIT_SECONDS * _adapter_units(job, kind)
    return host + _HOOKS_OF_A_LAYER if job.stack.module_hooks and job.strategy.zero == 3 else host


def _adapter_units(job: Job, kind: LayerRecord) -> float:
    """Matrices of the adapters of a layer; the mean of its kind of layers."""
    model, tuning = job.model, job.training.tuning
    assert tuning.adapters is not None
    mlp = model.mlp_matrices(model.ffn)
    matrices = [*model.mixer_matrices(kind), *mlp]
    if moe := model.experts_of(kind):
        experts = moe.experts // job.strategy.ep if tuning.adapters.experts else 0
        matrices = [*model.mixer_matrices(kind), *mlp * (experts + (moe.shared_ffn > 0))]
    return 2 * sum(map(tuning.adapters.adapts, matrices)) * tuning.adapted_share(layers_of_kind(model, kind))


# What Python takes for a unit of FSDP1 in both passes: 0.46 ms in the forward pass, which recompute repeats, and 0.60
# in the backward pass. Measured: torch 2.13 on a CPU, 64 adapters with units of their own beside the same ones without,
# on a process group that sends nothing. Two RTX 3090 with a 7B and 512 tokens leave 1.1 ms (AnswerDotAI/fsdp_qlora).
_UNIT_SECONDS = 1.06e-3


# Hooks of DeepSpeed's ZeRO-3 in both passes of a layer, of which recompute repeats a third: before and after each of
# about 14 modules Python walks its parameters, waits for their gathers and issues the next (runtime/zero/
# parameter_offload.py; partitioned_param_coordinator.py, fetch_sub_module and release_sub_module). Measured:
# fine-tuning Qwen-7B on two A100, 0.50 s for each microbatch of 256 and of 512 tokens, 15.6 ms a layer, of which
# gathers take 2 and launches 4.7 (QwenLM/Qwen README). Qwen-72B with LoRA on four: 27.5 ms, of which gathers take 12.
_HOOKS_OF_A_LAYER = 6.7e-3


def _ends(job: Job, contents: RankContents) -> Iterator[tuple[Operator, Seconds]]:
    if contents.has_head:
        device, recipe, stack = job.cluster.device, job.training.recipe, job.running_stack
        slower = slowdown(job)
        for operator in ends_operators(job.model, _head_shape(job, layer_shape(job)), job.training.tuning):
            yield operator, operator_seconds(operator, device, recipe, stack, slower)


def slowdown(job: Job) -> float:
    """How many times longer matmuls and attention take because of the power limit (`Efficiency.slowdown`)."""
    efficiency = job.cluster.device.efficiency
    if efficiency.power_slowdown == 1:
        return 1.0
    matmuls, attention, other = unslowed_seconds(job)
    parameters = trained_parameters(job.model, job.training.tuning) / job.strategy.tp
    return efficiency.slowdown(
        matmuls, attention, other + _update_seconds(job, (update_bytes(job) + 8) * parameters, parameters)
    )


def unslowed_seconds(job: Job) -> tuple[float, float, float]:
    """Seconds of matmuls, of attention and of all else in the passes of a step, at full clock.

    Through the whole model, not one rank's part, since all of a step runs at one clock.
    """
    device, recipe, stack, model = job.cluster.device, job.training.recipe, job.running_stack, job.model
    tuning = job.training.tuning.over(None)
    shape, other, slowed = layer_shape(job), 0.0, {"product": 0.0, "attention": 0.0, "traffic": 0.0}
    parts = [(count, layer_operators(model, shape, kind, tuning)) for kind, count in model.layers_of_kinds]
    full = 1.0 if job.strategy.recompute == "full" else 0.0
    for count, operators in (*parts, (1, ends_operators(model, _head_shape(job, shape), tuning))):
        for operator in operators:
            alone, doubled = (operator_seconds(operator, device, recipe, stack, times) for times in (1.0, 2.0))
            again = share_run_again(job, operator, full)
            once, twice = (float(seconds.total + again * seconds.forward) for seconds in (alone, doubled))
            slowed[operator.kind] += job.microbatches * count * (twice - once)
            other += job.microbatches * count * (2 * once - twice)
    return slowed["product"], slowed["attention"], other


def step_overhead(job: Job) -> float:
    """What the host adds to a step: nothing where the whole step, its optimizer included, is one graph.

    Our engine's host waits for nothing within a step, so it adds only what the layers' kernels do not hide. That holds
    where its launches were measured, and on a single GPU, where nothing else could make it wait.
    """
    efficiency, stack = job.cluster.device.efficiency, job.running_stack
    if stack.cuda_graphs == "step":
        return 0.0
    alone = job.strategy.world == 1 and job.run_device == "cuda"
    if not stack.is_own or (efficiency.own is None and not alone):
        return efficiency.step_seconds
    ahead = (sum(unslowed_seconds(job)) - _launches(job)) / job.strategy.pp
    return max(0.0, efficiency.step_seconds - max(0.0, ahead))


def _launches(job: Job) -> float:
    """Seconds that the host takes to launch the layers of a step."""
    efficiency, model, tuning = job.cluster.device.efficiency, job.model, job.training.tuning.over(None)
    total = 0.0
    for kind, count in model.layers_of_kinds:
        if efficiency.own is not None:
            total += count * _host_seconds(job, efficiency.own.host_seconds, kind)
        else:
            kernels = sum(operator.kernels for operator in layer_operators(model, layer_shape(job), kind, tuning))
            total += count * _PASSES * kernels * efficiency.operator_seconds
    return job.microbatches * total


# Elements that torch's AdamW reads or writes of a parameter where it is not one fused kernel: decay 2, first moment 3,
# second moment 2 and 3, its root, correction and epsilon 2 each, the weight 4 (torch/optim/adam.py,
# _multi_tensor_adam and _single_tensor_adam). Instead of seven in fp32, which `UPDATE_BYTES` counts.
_UNFUSED_ELEMENTS, _FUSED_BYTES = 20, 28


_BUCKET_BYTES = 12  # of a gradient: copied to a bucket, divided there, and copied back (InternEvo c18bec9)


def update_bytes(job: Job) -> float:
    """Bytes that the update of a parameter moves."""
    root = OPTIMIZERS[job.training.optimizer].root
    if job.stack.adamw == "in place" or not root:
        return UPDATE_BYTES
    return UPDATE_BYTES - _FUSED_BYTES + _UNFUSED_ELEMENTS * root


def _update_seconds(job: Job, moved: Any, parameters: Any) -> Any:
    """Seconds to move so many bytes in an update; our own engine's update of ``parameters`` as measured, if it was.

    That reads and writes both moments (16 bytes), the weight and the rest of its master (8), and reads the gradient,
    which the norm has read before.
    """
    efficiency = job.cluster.device.efficiency
    if efficiency.own is not None and job.stack.is_own:
        moved = efficiency.own.update_traffic * (24 + 2 * job.training.recipe.gradient) * parameters
    return moved / (job.cluster.device.memory_bandwidth * efficiency.memory)


_ACCUMULATION_BYTES = 10  # of a parameter: its 16-bit gradient is read, the fp32 sum read and written


def _accumulation_seconds(job: Job, contents: RankContents) -> Any:
    """What adding up the gradients of all microbatches takes, on our engine where it was measured."""
    efficiency = job.cluster.device.efficiency
    if efficiency.own is None or not job.stack.is_own:
        return 0.0
    moved = efficiency.own.accumulation_traffic * _ACCUMULATION_BYTES * contents.total * (job.microbatches - 1)
    return moved / (job.cluster.device.memory_bandwidth * efficiency.memory)


# Bytes moved per parameter. A gather reads fp32, writes 16 bits, and copies those. A reduction copies 16-bit gradients
# twice, and writes them in fp32. An update copies the masters to where they are gathered from.
_GATHER_BYTES, _REDUCTION_BYTES, _MASTER_BYTES = 6 + 4, 4 + 4 + 6, 8


def copied_alone_seconds(job: Job, contents: RankContents, sharding: Sharding) -> tuple[Any, Any]:
    """Seconds of FSDP's copies of offloaded weights and of their gradients: per microbatch, and once a step.

    On a GPU that shares its states with no other, and so keeps its last layer gathered (`last_weights_stay`).
    """
    if not (job.stack.is_own and job.run_device == "cuda"):
        return 0.0, 0.0
    device, layers = job.cluster.device, contents.layer_matrices + contents.experts
    rate = device.memory_bandwidth * device.efficiency.memory
    share = sharding.offload.weights * last_weights_stay(job.strategy.pp, sharding)
    again = layers * (1 - 1 / maximum(1, contents.layers)) * (not sharding.gathers_once)
    each = _GATHER_BYTES * (contents.total + again) + _REDUCTION_BYTES * contents.total
    return share * each / rate, share * _MASTER_BYTES * contents.total / rate


def host_update_seconds(job: Job, contents: RankContents, sharding: Sharding) -> Any:
    """How much longer a host's cores take to update offloaded states than the device would.

    Our engine reads and writes states on disk while it updates others; DeepSpeed by default does not.
    """
    share, cluster = sharding.offload.optimizer, job.cluster
    if not share or job.run_device == "cpu" or updates_on_device(job, sharding.offload):
        return 0.0
    updated = updated_parameters(contents, sharding) * share
    seconds = updated * cluster.node_devices / cluster.host.updates
    if job.stack.is_own and sharding.offload.target == "nvme" and cluster.storage:
        stored = rank_state_bytes(contents, sharding, job.recipe, job.training.optimizer).stored
        seconds = maximum(0.0, seconds - sum(stored / cluster.disk_share(out=out) for out in (False, True)))
    return seconds - _update_seconds(job, update_bytes(job) * updated, updated)


def optimizer_seconds(job: Job, contents: RankContents, sharding: Sharding) -> Any:
    """The optimizer step, which is bound by memory, and the fixed overhead of a step.

    It moves `update_bytes` per updated parameter, 8 per local one (gradient norm and zeroing) and the bytes of gradient
    compression at sustained bandwidth; offloaded states are updated where they are.
    """
    device = job.cluster.device
    updated = updated_parameters(contents, sharding)
    local = updated if sharding.gradients_sharded else contents.total
    moved = update_bytes(job) * updated + 8 * local + sharding.moved_bytes * contents.total
    if job.stack.owned_parameters:
        moved = moved + _BUCKET_BYTES * contents.total
    seconds = _update_seconds(job, moved, updated) + _accumulation_seconds(job, contents) + step_overhead(job)
    seconds = seconds + host_update_seconds(job, contents, sharding)
    if sharding.offload.weights:
        each, once = copied_alone_seconds(job, contents, sharding)
        seconds = seconds + job.microbatches * each + once
    if job.stack.per_parameter_shards:
        matrices = len(job.model.attention_matrices) + len(job.model.mlp_matrices(job.model.ffn))
        # One copy into the reduce-scatter buffer, one out of the all-gather's, for every rank's part of every matrix.
        copies = select(sharding.zero == 1, 2 * sharding.shards * contents.layers * matrices, 0)
        seconds = seconds + copies * device.efficiency.operator_seconds
    return seconds


# -- The operators of a rank's layers on a roofline: FLOPs, bytes moved and seconds of each forward pass
# Williams et al. 2009, "Roofline: an insightful visual performance model for multicore architectures", CACM 52(4).


@dataclass(frozen=True)
class OperatorPoint:
    """All operators of one role in a layer, for one microbatch; those without FLOPs are left out."""

    role: OperatorRole
    flops: float
    moved_bytes: float
    seconds: float

    @property
    def words(self) -> str:
        return self.role.value

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.moved_bytes

    @property
    def rate(self) -> float:
        """FLOP/s, as predicted."""
        return self.flops / self.seconds


def operator_points(job: Job, contents: RankContents) -> tuple[OperatorPoint, ...]:
    """The matmuls and the attention of a pipeline rank, in the order of a layer."""
    by_role: dict[OperatorRole, tuple[float, float, float]] = {}
    for operator, seconds in timed_operators(job, contents):
        if operator.kind == "traffic":
            continue
        flops, moved, took = by_role.get(operator.role, (0.0, 0.0, 0.0))
        flops += float(operator.flops * operator.attended)
        by_role[operator.role] = flops, moved + _moved_bytes(job, operator), took + float(seconds.forward)
    return tuple(OperatorPoint(role, *figures) for role, figures in by_role.items())


def _moved_bytes(job: Job, operator: Operator) -> float:
    """Operands and results once each; of attention queries, keys, values and output (Dao et al. 2022, section 3.2)."""
    element = job.training.recipe.activation
    if operator.kind == "product":
        return float(product_bytes(operator, element))
    keys_and_values = job.microbatch_tokens * job.strategy.cp * key_value_features(job)
    return float(element * (operator.rows * operator.inner + keys_and_values))
