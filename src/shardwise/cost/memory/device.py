"""The memory of one device, split into its parts, for every kind of pipeline rank; and the figures behind a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from shardwise.cost.compute.recompute import blend, fully_recomputed_share, layers_stay_whole, layers_to_recompute
from shardwise.cost.memory.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    layer_copy_bytes,
)
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.memory.restored import left_by_router_bytes, recomputed_layer_bytes, restored_bytes
from shardwise.cost.memory.states import (
    ParameterGroup,
    StateBytes,
    group_states,
    square_roots,
    state_bytes,
    update_copies,
    updated_parameters,
)
from shardwise.cost.memory.sum import (
    MomentMemory,
    OffloadedActivations,
    PassMemory,
    held_at,
    kept_activations,
    last_layer_stays,
    layers_at_loss,
    pass_memory,
    reduces_in_turn,
)
from shardwise.cost.memory.transient import (
    MOMENTS,
    Moment,
    cached_copy_bytes,
    divided_units,
    gathered_matrices,
    message_buffer_bytes,
    transient_bytes,
)
from shardwise.layout.sharding import Sharding, sharding_of
from shardwise.layout.stages import RankContents, rank_contents
from shardwise.layout.views import held_by, ranks_to_price
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.training import OPTIMIZERS, RECIPES


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device of a pipeline rank at its peak."""

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
    host: float  # what offload moved off the device; no part of its total

    PARTS: ClassVar[tuple[str, ...]]  # the fields that add up to the total

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part) for part in self.PARTS))

    def __float__(self) -> float:
        return self.total

    def to_dict(self) -> dict[str, float]:
        sizes = {f"{name}_bytes": getattr(self, name) for name in (*self.PARTS, "host")}
        return {"pipeline_rank": self.pipeline_rank, **sizes, "total_bytes": self.total}


DeviceMemory.PARTS = tuple(part.name for part in fields(DeviceMemory) if part.name not in ("pipeline_rank", "host"))


def memory_of_rank(job: Job, pipeline_rank: int) -> DeviceMemory:
    """The peak memory of one device of a pipeline rank."""
    return max((_peak(view, pipeline_rank) for view in held_by(job, pipeline_rank)), key=lambda memory: memory.total)


def _peak(job: Job, pipeline_rank: int) -> DeviceMemory:
    contents = rank_contents(job, pipeline_rank)
    alone = (memory_at_update(job, contents), memory_at_load(job, contents))
    moments = (*memory_at_moments(job, contents).values(), *alone)
    return max((memory for memory in moments if memory), key=lambda memory: memory.total)


def memory_at_moments(job: Job, contents: RankContents) -> dict[Moment, DeviceMemory]:
    """The memory of a device at each moment of its passes; a rank without a head has no loss."""
    transient = _transient(job, contents)
    passes = _passes(job, contents, {moment: sum(both) for moment, both in transient.items()})
    replicated = job.strategy.gradient_group > 1
    held = held_at(job, contents, sharding_of(job.strategy), tuple(transient), replicated=replicated)
    return {memory.moment: _parts(MomentMemory(memory, passes), *transient[memory.moment]) for memory in held}


def memory_at_update(job: Job, contents: RankContents) -> DeviceMemory | None:
    """In the optimizer's update, where it copies gradients: no pass holds anything then."""
    replicated = job.strategy.gradient_group > 1
    (held,) = held_at(job, contents, sharding_of(job.strategy), ("layer",), replicated=replicated)
    if not held.copied_for_update:
        return None
    parts = {"weights": held.states.weights, "optimizer": held.states.optimizer, "allowance": held.allowance}
    parts |= {"gradients": held.gradients_at_update, "temporary": held.copied_for_update, "host": held.states.offloaded}
    return DeviceMemory(contents.rank, **{**dict.fromkeys((*DeviceMemory.PARTS, "host"), 0.0), **parts})


def memory_at_load(job: Job, contents: RankContents) -> DeviceMemory | None:
    """Before the first step, where whole weights are loaded beside their shards."""
    replicated = job.strategy.gradient_group > 1
    (held,) = held_at(job, contents, sharding_of(job.strategy), ("layer",), replicated=replicated)
    if not held.whole_weights:
        return None
    parts = {"weights": held.states.weights, "gathered": held.whole_weights, "allowance": held.allowance}
    return DeviceMemory(contents.rank, **{**dict.fromkeys((*DeviceMemory.PARTS, "host"), 0.0), **parts})


def _parts(memory: MomentMemory, communication: float, temporary: float) -> DeviceMemory:
    """The terms of ``memory.total``; the last two are those of the passes' transient memory."""
    held, states, absent = memory.held, memory.held.states, memory.absent
    recomputed = 0.0 if memory.moment == "loss" else memory.passes.recomputed
    return DeviceMemory(
        pipeline_rank=held.contents.rank,
        weights=states.weights,
        gradients=states.gradients - absent.gradients,
        optimizer=states.optimizer + held.update_slots,
        activations=memory.activations + memory.hooked,
        recomputed=max(0.0, recomputed) - absent.recomputed,
        gathered=held.gathered - absent.left_over,
        communication=communication,
        temporary=temporary + min(0.0, recomputed),
        allowance=held.allowance,
        host=memory.host,
    )


def _transient(job: Job, contents: RankContents) -> dict[Moment, tuple[float, float]]:
    moments = [moment for moment in MOMENTS if moment != "loss" or contents.has_head]
    kinds, messages = tuple(kind for kind, _ in contents.held), job.microbatches * message_buffer_bytes(job)
    each = {moment: transient_bytes(job, kinds, moment, has_head=contents.has_head) for moment in moments}
    if "loss" in each:
        communication, temporary = each["loss"]
        cached = cached_copy_bytes(job, contents.kinds, fully_recomputed_share(job, contents))
        each["loss"] = communication, temporary + cached
    return {moment: (communication + messages, temporary) for moment, (communication, temporary) in each.items()}


def _passes(job: Job, contents: RankContents, transient: dict[Moment, float]) -> PassMemory:
    strategy = job.strategy
    wanted = layers_to_recompute(strategy.recompute, strategy.recompute_layers)
    return pass_memory(
        transient,
        kept_by_layers(job, contents),
        _kept_by_head(job, contents),
        _recomputed_layer_bytes(job, contents),
        stay_whole=layers_stay_whole(wanted, contents.layers, strategy.chunks_per_rank),
        in_flight=microbatches_in_flight(job, contents.rank),
        microbatches=job.microbatches,
        forwards_first=strategy.schedule_record.forwards_first,
        in_turn=reduces_in_turn(strategy.pp, strategy.schedule, job.microbatches),
    )


def offloaded_activations(job: Job, contents: RankContents) -> OffloadedActivations:
    passes = _passes(job, contents, dict.fromkeys(MOMENTS, 0.0))
    at_loss, stays = layers_at_loss(job.stack), last_layer_stays(job)
    return OffloadedActivations(passes.saved, passes.in_flight, contents.layers, at_loss, stays)


def device_memories(job: Job) -> tuple[DeviceMemory, ...]:
    """Memory of the pipeline ranks whose figures differ, in the order of `ranks_to_price`."""
    return tuple(_peak(view, rank) for view, rank in ranks_to_price(job))


def peak_memory(job: Job) -> DeviceMemory:
    """The fullest device of the job."""
    return max(device_memories(job), key=lambda memory: memory.total)


def activation_bytes(job: Job, contents: RankContents) -> float:
    """Activations alive on a rank at its peak: its layers times the microbatches in flight, and the ends."""
    in_flight = microbatches_in_flight(job, contents.rank)
    layers, head = kept_by_layers(job, contents), _kept_by_head(job, contents)
    return float(kept_activations(layers, head, in_flight, job.strategy.schedule_record.forwards_first))


def _kept_by_head(job: Job, contents: RankContents) -> float:
    return head_activation_bytes(job) if contents.has_head else 0.0


def kept_by_layers(job: Job, contents: RankContents) -> float:
    """Activations that one microbatch keeps in the layers and the embedding of a rank."""
    share = fully_recomputed_share(job, contents)
    kept = embedding_activation_bytes(job) if contents.has_embedding else 0.0
    for kind, count in contents.held:
        if job.strategy.recompute == "full":
            whole, checkpoint = (layer_activation_bytes(job, kind, recompute=mode) for mode in ("none", "full"))
            kept += count * blend(share, whole, checkpoint)
        else:
            kept += count * layer_activation_bytes(job, kind)
    return kept


def _recomputed_layer_bytes(job: Job, contents: RankContents) -> float:
    if job.strategy.recompute == "none" or job.strategy.recompute_layers == 0:
        return 0.0
    restored = recomputed_layer_bytes((1, restored_bytes(job, kind)) for kind, _ in contents.held)
    left = 0.0
    if job.strategy.recompute_layers is None:
        left = max((left_by_router_bytes(job, kind) for kind, _ in contents.held), default=0.0)
    return float(restored + left * max(0, contents.moe_layers - 1))


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


# -- Each part of a device's memory as the figures that make it: a sum of products that is the part itself
# What a user wants to see behind a bar: so many parameters, so many bytes of each, divided over so many devices.

_ROUNDING = 1e-9  # of a part


@dataclass(frozen=True)
class MemoryFactor:
    """A factor of a product, or a divisor."""

    meaning: str
    value: float
    unit: Literal["count", "bytes"] = "count"
    divides: bool = False


@dataclass(frozen=True)
class MemoryTerm:
    """The memory of something, as a product."""

    what: str
    factors: tuple[MemoryFactor, ...]

    @property
    def bytes(self) -> float:
        return math.prod(1 / factor.value if factor.divides else factor.value for factor in self.factors)


def memory_terms(job: Job, memory: DeviceMemory) -> dict[str, tuple[MemoryTerm, ...]]:
    """The terms of every part that is not 0; ``job`` as the memory's pipeline rank sees it."""
    contents = rank_contents(job, memory.pipeline_rank)
    known: dict[str, Iterator[MemoryTerm]] = {
        **_states(job, contents),
        "activations": _activations(job, contents),
        "gathered": _gathered(job, contents, memory.gathered),
        "communication": _communication(job, memory.communication),
        "temporary": _temporary(job, contents, memory),
    }
    parts = {part: getattr(memory, part) for part in memory.PARTS if getattr(memory, part)}
    return {part: _with_rest(tuple(known.get(part, ())), size, part) for part, size in parts.items()}


# What the rest of a part is that its terms do not explain.
_REST = {
    "gradients": "not there at the peak",
    "optimizer": "kept for less communication, or on the device for an update",
    "activations": "inputs of the loss, with autocast a copy of the head, less what is offloaded",
    "recomputed": "one layer, restored for its backward pass",
    "allowance": "of driver and libraries, as the device's file says",
}


def _with_rest(terms: tuple[MemoryTerm, ...], size: float, part: str) -> tuple[MemoryTerm, ...]:
    """The terms, and one more where they do not add up to the part."""
    rest = size - sum(term.bytes for term in terms)
    if abs(rest) <= _ROUNDING * size:
        return terms
    return (*terms, MemoryTerm(_REST.get(part, "the rest"), (MemoryFactor("bytes", rest, "bytes"),)))


def _states(job: Job, contents: RankContents) -> dict[str, Iterator[MemoryTerm]]:
    sharding = sharding_of(job.strategy)
    groups = group_states(contents, sharding, job.recipe, job.training.optimizer)
    divided = {
        "weights": sharding.zero >= 3,
        "gradients": sharding.gradients_sharded,
        "optimizer": sharding.zero >= 1,
    }
    return {part: _parameters(part, groups, contents, sharding, is_divided=own) for part, own in divided.items()}


def _parameters(
    part: str,
    groups: Mapping[ParameterGroup, StateBytes],
    contents: RankContents,
    sharding: Sharding,
    *,
    is_divided: bool,
) -> Iterator[MemoryTerm]:
    """Parameters times bytes of each, divided over the devices that share them."""
    counts: dict[ParameterGroup, tuple[float, int]] = {
        "dense": (contents.dense, sharding.shards),
        "experts": (contents.experts, sharding.expert_shards),
    }
    for name, (count, shards) in counts.items():
        size, over = float(getattr(groups[name], part)), shards if is_divided else 1
        if not count or not size:
            continue
        what = "parameters outside routed experts" if contents.experts and name == "dense" else "parameters"
        what = "parameters of routed experts" if name == "experts" else what
        factors = [MemoryFactor(what, count), MemoryFactor("bytes of each", size * over / count, "bytes")]
        if over > 1:
            factors.append(MemoryFactor(f"devices that share them by ZeRO-{sharding.zero}", over, divides=True))
        yield MemoryTerm(f"{part} of {what}", tuple(factors))


def _activations(job: Job, contents: RankContents) -> Iterator[MemoryTerm]:
    if not contents.layers:
        return
    in_flight = MemoryFactor("microbatches in flight", microbatches_in_flight(job, contents.rank))
    copied = _copied_weights(job, contents)
    saved = (kept_by_layers(job, contents) - 2 * copied) / contents.layers
    yield MemoryTerm(
        "saved for the backward pass",
        (
            in_flight,
            MemoryFactor("layers", contents.layers),
            MemoryFactor("bytes that a layer saves", saved, "bytes"),
        ),
    )
    if copied:
        each = MemoryFactor("bytes of each", 2, "bytes")
        factors = (in_flight, MemoryFactor("parameters of layers that are not recomputed", copied), each)
        yield MemoryTerm("copies that autocast makes of their fp32 weights, saved too", factors)


def _copied_weights(job: Job, contents: RankContents) -> float:
    """Parameters of layers that autocast makes 16-bit copies of, as far as recompute leaves them."""
    if not job.autocasts or "alternate-products" in job.recomputed_operators:
        return 0.0
    every = sum(count * layer_copy_bytes(job, kind) for kind, count in contents.held) / 2
    return every * (1 - fully_recomputed_share(job, contents))


def _gathered(job: Job, contents: RankContents, size: float) -> Iterator[MemoryTerm]:
    tied, matrices = job.model.tied_embeddings, gathered_matrices(job)
    unit = divided_units(contents, sharding_of(job.strategy), job.recipe, tied=tied, matrices=matrices)
    if unit.layer and size:
        whole, what = ("matrices", "of a matrix") if matrices else ("layers", "of a layer")
        each = MemoryFactor(f"bytes of each: whole {whole} in use and on their way", size / unit.layer, "bytes")
        yield MemoryTerm("gathered parameters and gradients", (MemoryFactor(f"parameters {what}", unit.layer), each))


def _communication(job: Job, size: float) -> Iterator[MemoryTerm]:
    tokens, element = job.microbatch_tokens, job.training.recipe.communication
    buffer = tokens * job.model.hidden * element
    yield MemoryTerm(
        "buffers of hidden states",
        (
            MemoryFactor("tokens of a microbatch", tokens),
            MemoryFactor("hidden size", job.model.hidden),
            MemoryFactor("bytes of an element", element, "bytes"),
            MemoryFactor("buffers of that size", size / buffer),
        ),
    )


def _temporary(job: Job, contents: RankContents, memory: DeviceMemory) -> Iterator[MemoryTerm]:
    tokens, size = job.microbatch_tokens, memory.temporary
    sharding = sharding_of(job.strategy)
    copies = update_copies(job, contents, sharding)
    if size == square_roots(job, contents, sharding):  # the peak is in the update
        updated = updated_parameters(contents, sharding)
        each = MemoryFactor("bytes of each", size / updated, "bytes")
        factors = (MemoryFactor("parameters that the device updates", updated), each)
        yield MemoryTerm("square roots of second moments, for the optimizer's update", factors)
        return
    if copies.bytes == size:  # the peak is in the update
        each = MemoryFactor("bytes of each, in one tensor and in the format of the masters", copies.each, "bytes")
        factors = (MemoryFactor("gradients at a time", copies.elements), each)
        yield MemoryTerm("copies of gradients for the optimizer's update", factors)
        return
    held = "logits, or gradients on their way"
    if job.autocasts:
        held += ", with what autocast's cache still holds"
    each = MemoryFactor(f"bytes of each: {held}", size / tokens, "bytes")
    yield MemoryTerm("temporary tensors", (MemoryFactor("tokens of a microbatch", tokens), each))
