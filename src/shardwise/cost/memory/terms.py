"""Each part of a device's memory as the figures that make it: a sum of products that is the part itself.

What a user wants to see behind a bar: so many parameters, so many bytes of each, divided over so many devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.cost.compute.operators import fully_recomputed_share
from shardwise.cost.memory.activations import layer_copy_bytes, microbatches_in_flight
from shardwise.cost.memory.device import DeviceMemory, kept_by_layers
from shardwise.cost.memory.states import ParameterGroup, StateBytes, group_states, update_copies
from shardwise.cost.memory.transient import divided_units
from shardwise.layout.sharding import Sharding, sharding_of
from shardwise.layout.stages import RankContents, rank_contents
from shardwise.spec.job import Job

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
    kinds = ((contents.dense_layers, False), (contents.moe_layers, True))
    every = sum(count * layer_copy_bytes(job, moe=moe) for count, moe in kinds if count) / 2
    return every * (1 - fully_recomputed_share(job, contents))


def _gathered(job: Job, contents: RankContents, size: float) -> Iterator[MemoryTerm]:
    unit = divided_units(contents, sharding_of(job.strategy), job.recipe, tied=job.model.tied_embeddings)
    if unit.layer and size:
        each = MemoryFactor("bytes of each: whole layers in use and on their way", size / unit.layer, "bytes")
        yield MemoryTerm("gathered parameters and gradients", (MemoryFactor("parameters of a layer", unit.layer), each))


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
    copies = update_copies(job, contents, sharding_of(job.strategy))
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
