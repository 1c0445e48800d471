"""Offload: transfers between a device and its host or disk in one step.

The optimizer's share sends gradients down and updated weights up once a step, since its update runs on the host (Ren
et al. 2021, ZeRO-Offload, arXiv 2101.06840). This project's engine updates on a GPU instead: states come up and go down
again, beside the next forward pass (`engine/offload/streamed.py`). States on a disk are read and written there in every
step (Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857). Offloaded activations go down in the forward and up in
the backward pass of every microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwise.collectives import CollectiveKind, Level, Topology
from shardwise.collectives.arrays import maximum, minimum, select
from shardwise.collectives.shapes import Switch
from shardwise.cost.memory.device import offloaded_activations
from shardwise.cost.memory.states import StateBytes, rank_state_bytes, updated_parameters
from shardwise.cost.memory.sum import first_elements, head_elements, last_layer_stays, moved_share, share_on_device
from shardwise.cost.step.stage_time import part_seconds, stage_seconds
from shardwise.cost.traffic.traffic import Traffic, Window, collective_price, priced
from shardwise.layout.payloads import Payload, Role, sent_backward, sent_forward
from shardwise.layout.pieces import update_chunk
from shardwise.layout.sharding import Sharding, last_weights_stay, sharding_of, updates_on_device
from shardwise.layout.stages import RankContents
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.training import Recipe

Target = Literal["cpu", "nvme"]
_NEVER_AWAITED = 1e6  # times a pass: longer than any transfer


@dataclass(frozen=True)
class OffloadLine:
    """One kind of transfer: its size, how many in a step, its overlap, and its link."""

    payload: Payload
    size_bytes: Any
    count: Any  # transfers in a step
    window_share: Any = 1.0  # the share of its pass, over all microbatches, that can hide it
    last_only: bool = False  # it can hide in the last microbatch only
    hidden: bool = True  # whether it can be overlapped, if the strategy does
    link: Target | None = None  # by default that of the offload's target
    of_layers: Any = None
    """The share of the time in layers that can hide it, where the head cannot: what must arrive before the head, or
    leaves after it in a backward pass. None: the whole pass can."""
    after_bytes: Any = 0.0  # it begins once so many bytes have been sent the other way
    both_ways: bool = False  # as much is sent the other way at the same time

    def window(self, in_layers: Any) -> Any:
        """The share of its pass that can hide it; ``in_layers`` is the share of a pass that is spent in layers."""
        return self.window_share if self.of_layers is None else self.window_share * self.of_layers * in_layers

    def topology(self, cluster: Cluster, target: Target) -> Topology:
        """Its link; ``target`` is the offload's."""
        role = self.payload.role
        if target == "nvme" and role in _ON_THE_HOST:
            return disk_topology(cluster, out=role is Role.STATES_TO_DISK)
        return host_topology(cluster, self.link or target, out=role in LEAVING, both_ways=self.both_ways)

    def window_if(self, overlapped: bool) -> Window:
        return self.payload.in_pass if overlapped and self.hidden else "none"


def state_lines(
    contents: RankContents, sharding: Sharding, recipe: Recipe, states: StateBytes, microbatches: Any, *,
    on_device: bool = False, tied: bool = False, pp: int = 1,
) -> list[OffloadLine]:  # fmt: skip
    """Every possible transfer of weights, gradients and optimizer results.

    ``on_device``: the device updates the states, and the next forward pass waits for them (`_device_update`).

    Where shards are fp32, or all states have one format, the device has the master weights: they go to the host with
    the gradients, unless they are there already. Our engine does this, and moves both only once the norm of all
    gradients is known, since the norm may skip the step: no pass is left to overlap them with.
    """
    offload, m = sharding.offload, microbatches
    updated, disk = updated_parameters(contents, sharding), offload.target == "nvme"
    weights, again = _gathered_weights(contents, sharding, recipe, pp)
    gradients = (updated if sharding.gradients_sharded else contents.total) * recipe.gradient * offload.gradients
    if recipe.fp32_shards:
        gradients = updated * 4 * offload.gradients
    gradient, weight, master = _update_elements(sharding, recipe)
    apart = updated * max(0.0, offload.optimizer - offload.weights)  # updated on the host, computed with on the device
    down, up = updated * max(0.0, offload.optimizer - offload.gradients) * gradient, apart * weight
    own = recipe.fp32_shards
    hidden = not own
    on_disk = (states.stored + (0.0 if hidden else weights)) * disk
    gathers = 1 if sharding.gathers_once else m
    loads = gathers
    if on_device:
        first, head = (each(contents, sharding, tied=tied) for each in (first_elements, head_elements))
        elements = updated * offload.optimizer
        last = maximum(0.0, elements - (updated - head)) / maximum(1.0, elements)  # the share that is the head's
        update = _device_update(
            elements, first, last, states.stored + updated * 4 * offload.weights, m, contents.layers
        )
        loads = gathers - (offload.weights > 0)  # the first forward pass has them from the update
    else:
        update = [
            OffloadLine(sent_backward(Role.LAST_GRADIENTS_TO_HOST), down, 1, 1 / m, True, hidden, link="cpu"),
            OffloadLine(sent_backward(Role.WEIGHTS_TO_HOST), apart * master, 1, hidden=False, link="cpu"),
            OffloadLine(sent_backward(Role.STATES_FROM_DISK), on_disk, 1, hidden=False),
            OffloadLine(sent_forward(Role.STATES_TO_DISK), on_disk, 1, hidden=False),
            OffloadLine(sent_forward(Role.UPDATED_WEIGHTS_FROM_HOST), up, 1, 1 / m, True, hidden, link="cpu"),
        ]
    return [
        *update,
        OffloadLine(sent_forward(Role.WEIGHTS_FROM_HOST), weights, loads),
        OffloadLine(
            sent_backward(Role.WEIGHTS_FROM_HOST),
            again,
            gathers,
            of_layers=_before_last(contents.layers) if own else None,
        ),
        OffloadLine(sent_backward(Role.GRADIENTS_TO_HOST), gradients, m),
        # Each microbatch is added to the gradients on disk, and all are read for the update.
        OffloadLine(sent_backward(Role.GRADIENTS_FROM_DISK), gradients * (disk and not hidden), m),
    ]


def _device_update(
    elements: Any, first: Any, head: Any, kept: Any, microbatches: Any, layers: Any
) -> list[OffloadLine]:
    """States that are ``kept`` on the host, sent to the device for the update and back.

    At least the states of the ``first`` elements have arrived, during the step before, when the update begins. Every
    further chunk takes the place of one that has been sent back. Each layer of the forward pass waits for its own
    states: the last layer for all but the ``head``'s share, which the head waits for.
    Nothing waits for what is sent back: as much arrives in the other direction at the same time.
    """
    ahead = share_on_device(elements, minimum(first, elements))
    during = kept * (1 - ahead)
    late = minimum(during, kept * head)
    chunk = kept * minimum(1.0, update_chunk(elements) / maximum(1, elements))
    layers_states, head_states = sent_forward(Role.STATES_FROM_HOST), sent_forward(Role.HEAD_STATES_FROM_HOST)
    shared: dict[str, Any] = {"last_only": True, "link": "cpu", "after_bytes": chunk, "both_ways": True}
    before_last = _before_last(layers)
    return [
        OffloadLine(sent_backward(Role.FIRST_STATES_FROM_HOST), kept * ahead, 1, link="cpu"),
        OffloadLine(layers_states, during - late, 1, 1 / microbatches, of_layers=before_last, **shared),
        OffloadLine(head_states, late, 1, 1 / microbatches, of_layers=1.0, **shared),
        OffloadLine(sent_forward(Role.STATES_TO_HOST), kept, 1, _NEVER_AWAITED, link="cpu", both_ways=True),
    ]


def _before_last(layers: Any) -> Any:
    """Share of a pass through all layers that is over when its last layer begins."""
    return 1 - 1 / maximum(1, layers)


def how_updated(job: Job) -> dict[str, Any]:
    """What `state_lines` has to know of a job."""
    on_device = updates_on_device(job, job.strategy.offload)
    return {"on_device": on_device, "tied": job.model.tied_embeddings, "pp": job.strategy.pp}


def share_in_layers(job: Job, contents: RankContents) -> float:
    """The share of a forward pass that a rank computes before its head."""
    if not contents.has_head:
        return 1.0
    head = part_seconds(job, RankContents(contents.rank, (), False, True, 0.0, 0.0, 0.0)).forward
    return 1 - float(head / stage_seconds(job, contents).forward)


def _gathered_weights(contents: RankContents, sharding: Sharding, recipe: Recipe, pp: int) -> tuple[Any, Any]:
    """Bytes loaded for a forward pass, and for a backward pass, of one microbatch.

    This project's engine loads fp32 shards, and for the backward pass only those of the layers: the ends of the network
    stay gathered, or are not needed, and the last layer may stay too.
    """
    updated, share = updated_parameters(contents, sharding), sharding.offload.weights
    if not recipe.fp32_shards:
        weights = select(sharding.zero == 3, updated, contents.total) * recipe.weight * share
        frozen = share * _frozen(contents, sharding, recipe)
        return weights + frozen, weights + frozen
    layers = contents.layer_matrices / sharding.shards + contents.experts / sharding.expert_shards
    most = select(last_weights_stay(pp, sharding), _before_last(contents.layers), 1.0)
    frozen = _frozen(contents, sharding, recipe)
    again = (layers * 4 + frozen) * minimum(share, most) * (not sharding.gathers_once)
    return updated * 4 * share + frozen * share, again


def _frozen(contents: RankContents, sharding: Sharding, recipe: Recipe) -> Any:
    """Bytes of a device's frozen weights in layers, as they are kept."""
    each = recipe.base or recipe.weight
    shards, expert_shards = (select(sharding.zero == 3, part, 1) for part in (sharding.shards, sharding.expert_shards))
    return each * (contents.frozen_matrices / shards + contents.frozen_experts / expert_shards)


def _update_elements(sharding: Sharding, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Bytes per element of gradients down, weights up, and master weights down before an update on the host."""
    if not recipe.fp32_shards:
        return recipe.gradient, recipe.weight, 0.0
    shards = sharding.zero >= 1
    return (
        select(shards, 4, recipe.gradient),
        select(shards, 4, recipe.weight),
        select(shards, 4, 0.0 if recipe.master else recipe.weight),
    )


def activation_lines(job: Job, moved_bytes: Any, microbatches: Any) -> list[OffloadLine]:
    """Activations of every microbatch, out in the forward and back in the backward pass.

    Where the loss follows at once, all must have left before the head computes it. The activations of a layer come
    back while the backward pass is in the layer after it, so those of the first layer before the pass reaches it.
    """
    stays, layers = last_layer_stays(job), job.model.layers
    out, back = (1.0, _before_last(layers)) if stays else (None, None)
    return [
        OffloadLine(sent_forward(Role.ACTIVATIONS_TO_HOST), moved_bytes, microbatches, of_layers=out),
        OffloadLine(sent_backward(Role.ACTIVATIONS_FROM_HOST), moved_bytes, microbatches, of_layers=back),
    ]


def offload_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """Transfers over the device's own link to its host, or to the node's first storage level."""
    strategy, m = job.strategy, job.microbatches
    if not strategy.offload.any:
        return []
    target, sharding = strategy.offload.target, sharding_of(strategy)
    states = rank_state_bytes(contents, sharding, job.recipe, job.training.optimizer)
    share = moved_share(job, strategy.offload.activations)
    moved = offloaded_activations(job, contents).saved * share if share else 0.0
    lines = state_lines(contents, sharding, job.recipe, states, m, **how_updated(job))
    lines += activation_lines(job, moved, m)
    in_layers = share_in_layers(job, contents)
    return [
        priced(
            "offload",
            line.payload,
            CollectiveKind.SEND_RECV,
            line.size_bytes,
            line.count,
            (link := line.topology(job.cluster, target)),
            "auto",
            window=line.window_if(strategy.overlap.offload),
            window_share=float(line.window(in_layers)),
            last_only=line.last_only,
            delay_seconds=float(sent_seconds(link, line.after_bytes)),
        )
        for line in lines
        if line.size_bytes and line.count
    ]


def sent_seconds(link: Topology, size_bytes: Any) -> Any:
    """What a message takes; an empty one takes nothing, not even the latency."""
    return collective_price(CollectiveKind.SEND_RECV, size_bytes, link, "auto").seconds * (size_bytes > 0)


# What goes from the device to the host; a host's link carries both directions at once.
LEAVING = (Role.GRADIENTS_TO_HOST, Role.LAST_GRADIENTS_TO_HOST, Role.WEIGHTS_TO_HOST, Role.STATES_TO_HOST,
           Role.ACTIVATIONS_TO_HOST)  # fmt: skip


# Between a disk and host memory, where the host updates or adds: none of it crosses the device's link.
_ON_THE_HOST = (Role.STATES_FROM_DISK, Role.STATES_TO_DISK, Role.GRADIENTS_FROM_DISK)


def disk_topology(cluster: Cluster, *, out: bool) -> Topology:
    """A device's share of its node's first storage, as a network of two."""
    if not cluster.storage:
        problem = "nvme, but the cluster names no storage"
        raise SpecError("strategy.offload.target", problem, "add storage, or use cpu")
    disk = cluster.storage[0]
    return _one_link(cluster.disk_share(out=out), disk.link.latency, disk.name)


def host_topology(cluster: Cluster, target: Target, *, out: bool = False, both_ways: bool = False) -> Topology:
    """One direction of the link to the offload target, as a network of two; ``both_ways``: the other is as busy.

    It is no faster than the device's share of the host's memory bandwidth. That share halves where every byte is both
    read and written there: traffic in both directions, and traffic with a disk.
    """
    if cluster.host_link is None:
        raise SpecError("strategy.offload", "the cluster names no host_link", "add one, such as host_link: pcie-4")
    link, of_memory = cluster.host_link, cluster.host.copied_bytes / cluster.node_devices
    share = link.duplex if both_ways else link.outward if out else 1.0
    name = "host link, out" if out else "host link, in"
    bandwidth = min(link.bandwidth * link.efficiency * share, of_memory / (2 if both_ways else 1))
    latency = link.latency
    if target == "nvme":
        disk = disk_topology(cluster, out=out).levels[0]
        bandwidth, latency, name = min(bandwidth, of_memory / 2, disk.bandwidth), latency + disk.latency, disk.name
    return _one_link(bandwidth, latency, name)


def _one_link(bandwidth: float, latency: float, name: str) -> Topology:
    return Topology((Level(Switch(2), bandwidth, latency, name=name),))
