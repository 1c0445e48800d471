"""All communication of a step, and how the job's stack and device run it: its overlap and its compute units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.collectives import CollectiveKind
from shardwise.collectives.arrays import maximum, select
from shardwise.cost.traffic.context import context_traffic
from shardwise.cost.traffic.data import data_traffic
from shardwise.cost.traffic.expert import beside_other_microbatches, expert_traffic
from shardwise.cost.traffic.offload import offload_traffic
from shardwise.cost.traffic.pipeline import pipeline_traffic
from shardwise.cost.traffic.tensor import tensor_traffic
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.payloads import Role
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


def step_traffic(job: Job, contents: RankContents) -> list[Traffic]:
    """All communication of one step on a device of the given pipeline rank, not yet overlapped.

    Traffics claim the computation they may overlap with in this order: first those inside a layer, last those that
    span the step.
    """
    return [
        *tensor_traffic(job, contents),
        *context_traffic(job, contents),
        *expert_traffic(job, contents),
        *pipeline_traffic(job, contents),
        *data_traffic(job, contents),
        *offload_traffic(job, contents),
    ]


# PyTorch's async TP decomposes a gather and the matmuls that read it, and a matmul and the scatter of its result: not
# the scatter of a sum of several matmuls, nor a gather for weight gradients, which reads along its rows
# (torch/_inductor/fx_passes/micro_pipeline_tp.py, _find_producer_matmul and _find_consumer_matmuls).
_NOT_DECOMPOSED = (Role.INPUT_GRADIENTS, Role.SAVED_INPUTS)


def executed(job: Job, traffic: Traffic) -> Traffic:
    """The traffic with the compute units it occupies and its stack's kind of overlap."""
    taken = units_taken(job, traffic.dimension, traffic.kind, traffic.level_seconds)
    traffic = traffic.but(units_taken=float(taken))
    stack = job.stack
    if traffic.dimension != "tp" or not job.strategy.overlap.tp or traffic.window == "none":
        return traffic
    if stack.tp_overlap == "buffers":
        return traffic.but(unhideable=job.cluster.device.efficiency.overlapped_tp_exposed)
    if stack.tp_gradients == "in turn" and traffic.payload.role in _NOT_DECOMPOSED:
        return traffic.but(window="none")
    return traffic


def in_its_step(job: Job, traffic: Traffic) -> Traffic:
    """The traffic as executed, with what of it the step's first and last microbatches leave exposed."""
    traffic = executed(job, traffic)
    if traffic.dimension != "ep" or traffic.window == "none" or job.stack.ep_overlap != "microbatches":
        return traffic
    return replace(traffic, unhideable=1 - float(beside_other_microbatches(job.strategy.pp, job.microbatches)))


def units_taken(job: Job, dimension: str, kind: CollectiveKind, link_seconds: Mapping[str, Any]) -> Any:
    """Share of the device's compute units that a communication occupies."""
    taken = job.cluster.device.units_taken
    if dimension == "offload":
        return taken.copies
    if dimension == "tp" and job.strategy.overlap.tp and job.stack.tp_overlap == "decomposed" and not job.stack.is_own:
        return taken.copies  # its pieces are copied between symmetric buffers; ours are messages
    if job.strategy.collective in ("nvls", "sharp"):
        return taken.in_network
    own, all_units = job.stack.exchange_units, job.cluster.device.compute_units
    if dimension == "ep" and job.strategy.dispatch == "deduplicated" and 0 < own < all_units:
        return own / all_units
    if kind is CollectiveKind.ALL_TO_ALL and dimension != "dp":
        return taken.collectives if taken.exchanges is None else taken.exchanges
    units = taken.messages if kind is CollectiveKind.SEND_RECV else None
    units = taken.collectives if units is None else units
    return units * busy_share(job.cluster.levels[0].name, link_seconds) if units else 0.0


def busy_share(own_link: str, link_seconds: Mapping[str, Any]) -> Any:
    """Share of a collective's time during which it uses the device's own link, and the channels that fill it.

    NCCL runs as many channels, each on a compute unit, as fill the links of a group (its author in NVIDIA/nccl issue
    1360): 24 for the NVLink of a DGX H100 (issue 1367), a few where a node's network port sets the pace.
    """
    own: Any = link_seconds.get(own_link, 0.0)
    longest: Any = 0.0
    for seconds in link_seconds.values():
        longest = maximum(longest, seconds)
    return select(longest > 0, own / select(longest > 0, longest, 1.0), 1.0)
