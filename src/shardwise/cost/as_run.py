"""A traffic as the job's stack and device run it: how it is overlapped, and which compute units it takes."""

from __future__ import annotations

from dataclasses import replace

from shardwise.collectives import CollectiveKind
from shardwise.cost.traffic import Traffic
from shardwise.spec.job import Job

# Async TP cuts products into pieces that run less well: TorchTitan prints a gain of 10% with it, as if this share of
# the communication stayed exposed (torchtitan benchmarks/asyncTP_llama3_h100_2025-06).
_DECOMPOSED_EXPOSED = 0.85


def as_run(job: Job, traffic: Traffic) -> Traffic:
    """The traffic with its device's share of compute units and its stack's kind of overlap."""
    traffic = replace(traffic, units_taken=_units_taken(job, traffic))
    if traffic.dimension != "tp" or not job.strategy.overlap.tp or traffic.window == "none":
        return traffic
    if job.stack.tp_overlap == "buffers":
        return replace(traffic, unhideable=job.cluster.device.efficiency.overlapped_tp_exposed)
    return replace(traffic, unhideable=max(traffic.unhideable, _DECOMPOSED_EXPOSED))


def _units_taken(job: Job, traffic: Traffic) -> float:
    taken = job.cluster.device.units_taken
    if traffic.dimension == "offload":
        return taken.copies
    if job.strategy.collective in ("nvls", "sharp"):
        return taken.in_network
    if traffic.kind is CollectiveKind.SEND_RECV:
        return taken.of_messages()
    return taken.of_exchanges() if traffic.kind is CollectiveKind.ALL_TO_ALL else taken.collectives
