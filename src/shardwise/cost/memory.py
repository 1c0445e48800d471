"""The memory of one device, split into its parts, for every kind of pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwise.cost.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    layer_saved_tensors,
    logits_temporary_bytes,
)
from shardwise.cost.gathered import divided_units, gathered_bytes, left_over
from shardwise.cost.in_flight import chunks_in_flight
from shardwise.cost.operators import layer_operators
from shardwise.cost.passing import (
    Moment,
    gradients_absent,
    layer_moment_bytes,
    loss_moment_bytes,
    moments_of,
)
from shardwise.cost.recompute import fully_recomputed_share
from shardwise.cost.stage_time import layer_shape
from shardwise.cost.stages import RankContents, pipeline_ranks_to_price, rank_contents
from shardwise.cost.states import StateBytes, rank_state_bytes, sharding_of, state_bytes
from shardwise.cost.travel import Travel
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.training import OPTIMIZERS, RECIPES


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device of a pipeline rank at its peak; ``host`` is what offload moved off it."""

    pipeline_rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    recomputed: float
    gathered: float
    communication: float
    temporary: float
    allowance: float
    host: float

    PARTS = (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "recomputed",
        "gathered",
        "communication",
        "temporary",
        "allowance",
    )

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part) for part in self.PARTS))

    def __float__(self) -> float:
        return self.total

    def to_dict(self) -> dict[str, float]:
        parts = {f"{f.name}_bytes": getattr(self, f.name) for f in fields(self) if f.name != "pipeline_rank"}
        return {"pipeline_rank": self.pipeline_rank, **parts, "total_bytes": self.total}


def memory_of_rank(job: Job, pipeline_rank: int) -> DeviceMemory:
    """The peak memory of one device of a pipeline rank."""
    contents = rank_contents(job, pipeline_rank)
    return max(memory_at_moments(job, contents).values(), key=lambda memory: memory.total)


def memory_at_moments(job: Job, contents: RankContents) -> dict[Moment, DeviceMemory]:
    """One by itself, or at each of the moments that a rank has."""
    moments = [one for one in moments_of(job.stack) if one != "loss" or contents.has_head]
    return {moment: _memory_at(job, contents, moment) for moment in moments}


def _memory_at(job: Job, contents: RankContents, moment: Moment) -> DeviceMemory:
    sharding = sharding_of(job.strategy)
    states = rank_state_bytes(contents, sharding, job.recipe, job.training.optimizer)
    kept, share = activation_bytes(job, contents), job.strategy.offload.activations
    activations = kept - (head_activation_bytes(job) if moment == "layer" and contents.has_head else 0.0)
    if share:
        activations = _left_by_offload(job, contents, activations, moment)
    communication, temporary = passing_bytes(job, kinds_of(contents), moment, has_head=contents.has_head)
    recomputed = 0.0 if moment == "loss" else _recomputed_layer_bytes(job, contents)
    gradients = states.gradients
    gathered = gathered_bytes(contents, sharding, job.recipe, moment, tied=job.model.tied_embeddings)
    if moment != "together":
        gradients = gradients - _gradients_absent(job, contents, states.gradients, activations)
    if moment == "loss" and _is_alone(job, contents):
        gathered -= left_over(divided_units(contents, sharding, tied=job.model.tied_embeddings), sharding, job.recipe)
    return DeviceMemory(
        pipeline_rank=contents.rank,
        weights=states.weights,
        gradients=gradients,
        optimizer=states.optimizer,
        activations=activations,
        recomputed=recomputed,
        gathered=gathered,
        communication=communication,
        temporary=temporary,
        allowance=job.cluster.device.framework_memory,
        host=states.offloaded + kept * share,
    )


def _left_by_offload(job: Job, contents: RankContents, activations: float, moment: Moment) -> float:
    return float(travel_of(job, contents, moment).on_device(activations, job.strategy.offload.activations, moment))


def travel_of(job: Job, contents: RankContents, moment: Moment) -> Travel:
    in_flight = chunks_in_flight(job, contents.rank) / job.strategy.chunks_per_rank
    head = head_activation_bytes(job) if moment != "together" and contents.has_head else 0.0
    return Travel((activation_bytes(job, contents) - head) / in_flight, in_flight, contents.layers)


def passing_bytes(job: Job, kinds: tuple[bool, ...], moment: Moment, *, has_head: bool) -> tuple[float, float]:
    """Buffers of communication, and temporary tensors, at a moment; ``kinds`` of layer that the rank has."""
    if moment == "together":
        return communication_buffer_bytes(job), temporary_bytes(job, has_head=has_head)
    if moment == "loss":
        return 0.0, loss_moment_bytes(job) if has_head else 0.0
    return communication_buffer_bytes(job), layer_moment_bytes(job, kinds)


def _gradients_absent(job: Job, contents: RankContents, gradients: float, activations: float) -> float:
    if not _is_alone(job, contents):
        return 0.0
    of_a_microbatch = activations / (chunks_in_flight(job, contents.rank) / job.strategy.chunks_per_rank)
    return float(gradients_absent(gradients, job.strategy.zero, job.strategy).bytes(of_a_microbatch))


def _is_alone(job: Job, contents: RankContents) -> bool:
    """No microbatch has gone back before the peak."""
    return job.microbatches <= chunks_in_flight(job, contents.rank) / job.strategy.chunks_per_rank


def _head_bytes(job: Job, contents: RankContents) -> float:
    """Activations of the head that a rank holds at its peak: the loss of a microbatch is followed by its backward."""
    if not contents.has_head:
        return 0.0
    in_flight = chunks_in_flight(job, contents.rank) / job.strategy.chunks_per_rank
    return head_activation_bytes(job) * (1 if job.strategy.schedule != "gpipe" else in_flight)


def kinds_of(contents: RankContents) -> tuple[bool, ...]:
    """Whether layers have experts: the kinds of layer that a rank has."""
    return tuple(moe for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)) if count)


def temporary_bytes(job: Job, *, has_head: bool) -> float:
    """Logits while the loss is computed; where it is known of the stack, what gradients hold on their way as well."""
    logits = logits_temporary_bytes(job) if has_head else 0.0
    if job.stack.dummy_gradients:
        at_the_head = logits + _head_gradient_bytes(job) if has_head else 0.0
        return _dummy_gradient_bytes(job) + max(at_the_head, _activation_gradient_bytes(job))
    if job.stack.gradients == "made":
        return max(logits, layer_moment_bytes(job, _kinds(job)))
    if job.stack.gated_activation == "separate":
        return max(logits, _activation_gradient_bytes(job))
    return logits


def _dummy_gradient_bytes(job: Job) -> float:
    """Empty gradients that Transformer Engine hands to autograd after a fused accumulation, one of every weight shape.

    It caches them (pytorch/module/base.py, get_dummy_wgrad); router and head are not its modules.
    """
    shapes = {
        (operator.columns, operator.inner)
        for moe in _kinds(job)
        for operator in layer_operators(job.model, layer_shape(job), moe=moe)
        if operator.kind == "product" and not operator.wide
    }
    return 2 * sum(columns * inner for columns, inner in shapes)


def _head_gradient_bytes(job: Job) -> float:
    """Gradients of the head's weights (Megatron-Core, tensor_parallel/layers.py) and of its input, in 16 bit."""
    weights = job.model.vocab * job.model.hidden / job.strategy.tp
    return 2 * (weights + job.model.hidden * job.microbatch_tokens)


def _activation_gradient_bytes(job: Job) -> float:
    """The gradient of an MLP's activation inputs beside those inputs, of the widest kind of layer."""
    return max(
        tensor.bytes
        for moe in _kinds(job)
        for tensor in layer_saved_tensors(job, moe=moe)
        if tensor.name.endswith("activation inputs")
    )


def _kinds(job: Job) -> tuple[bool, ...]:
    """Whether layers have experts: the kinds of layer that the model has."""
    model = job.model
    if not model.moe_layers:
        return (False,)
    return (True,) if model.moe_layers == model.layers else (False, True)


def device_memories(job: Job) -> tuple[DeviceMemory, ...]:
    """Memory of the pipeline ranks whose figures differ."""
    return tuple(memory_of_rank(job, rank) for rank in pipeline_ranks_to_price(job))


def peak_memory(job: Job) -> DeviceMemory:
    """The fullest device of the job."""
    return max(device_memories(job), key=lambda memory: memory.total)


def activation_bytes(job: Job, contents: RankContents) -> float:
    """Activations alive on a rank at its peak: its layers times the microbatches in flight, and the ends."""
    in_flight = chunks_in_flight(job, contents.rank) / job.strategy.chunks_per_rank
    layers = _kept_by_layers(job, contents) * in_flight
    if contents.has_embedding:
        layers += embedding_activation_bytes(job) * in_flight
    return layers + _head_bytes(job, contents)


def _kept_by_layers(job: Job, contents: RankContents) -> float:
    recomputed_share = fully_recomputed_share(job, contents)
    kept = 0.0
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        if not count:
            continue
        if job.strategy.recompute == "full":
            whole = layer_activation_bytes(job, moe=moe, recompute="none")
            checkpoint = layer_activation_bytes(job, moe=moe, recompute="full")
            kept += count * (recomputed_share * checkpoint + (1 - recomputed_share) * whole)
        else:
            kept += count * layer_activation_bytes(job, moe=moe)
    return kept


def _recomputed_layer_bytes(job: Job, contents: RankContents) -> float:
    """Tensors that recompute brings back while one layer runs its backward pass."""
    if job.strategy.recompute == "none" or job.strategy.recompute_layers == 0:
        return 0.0
    kinds = kinds_of(contents)
    brought_back = (
        layer_activation_bytes(job, moe=moe, recompute="none") - layer_activation_bytes(job, moe=moe) for moe in kinds
    )
    return max(brought_back, default=0.0)


def communication_buffer_bytes(job: Job) -> float:
    """Buffers that tensors pass through on their way between devices."""
    model, strategy, recipe = job.model, job.strategy, job.training.recipe
    tokens = job.microbatch_tokens
    region = tokens / strategy.tp if strategy.sequence_parallel else tokens
    hidden = model.hidden * recipe.communication
    buffers = 0.0
    if strategy.tp > 1 and strategy.sequence_parallel:
        buffers += hidden * tokens  # the gathered input of the linear layer in use
    if strategy.pp > 1:
        buffers += 2 * hidden * region  # one activation received, one gradient
    if strategy.cp > 1:
        buffers += 2 * _key_value_bytes(job) * (strategy.cp if strategy.context_method == "all-gather" else 1)
    if strategy.ep > 1 and model.moe:
        buffers += 2 * hidden * region * model.moe.top_k  # sent and received tokens
    return buffers


def _key_value_bytes(job: Job) -> float:
    model, tensor = job.model, job.strategy.tp
    heads = model.heads if model.mla else model.key_value_heads
    per_token = heads / min(tensor, heads) * (model.query_key_dim + model.value_dim)
    return per_token * job.microbatch_tokens * job.training.recipe.communication


def per_gpu_memory_bytes(
    job: Job | None = None,
    *,
    parameters: float | None = None,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> DeviceMemory | StateBytes:
    """Memory of the fullest device of a job; or, from a bare parameter count, its model states alone.

    >>> per_gpu_memory_bytes(parameters=7.5e9, dp=64, zero=1).total / 1e9   # ZeRO, Figure 1
    31.40625
    """
    if job is not None:
        return peak_memory(job)
    if parameters is None:
        raise SpecError("parameters", "neither a job nor a parameter count is given", "give one of them")
    for field, value, known in (("precision", precision, RECIPES), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise SpecError(field, f"unknown {field} {shown(value)}", nearest_name(value, known))
    return state_bytes(parameters / (tp * pp), precision=precision, optimizer=optimizer, zero=zero, shards=dp)
