"""Collectives over lists of tensors, one for each rank: what PyTorch copies before or after NCCL's single buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwise.collectives import CollectiveCost, CollectiveKind
from shardwise.spec.job import Job


@dataclass(frozen=True)
class ListCopies:
    """What PyTorch adds to a gather or scatter of a list of tensors, one for each rank: copies from or to one piece.

    NCCL takes one buffer, so every rank's part is copied by a kernel of its own (ProcessGroupNCCL.cpp, allgather and
    reduce_scatter; pytorch/pytorch pull requests 33924 and 57769: the single-tensor forms were added to avoid it).
    """

    start: float  # seconds of a copy, besides its bytes
    rate: float  # bytes/s that a copy reads, and writes

    @classmethod
    def of(cls, job: Job) -> ListCopies | None:
        device = job.cluster.device
        if not job.stack.per_parameter_gathers:
            return None
        return cls(device.efficiency.operator_seconds, device.memory_bandwidth * device.efficiency.memory)

    def added_to(self, cost: CollectiveCost, kind: CollectiveKind, size_bytes: Any, ranks: int) -> CollectiveCost:
        if kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
            return cost
        return replace(cost, latency_seconds=cost.latency_seconds + ranks * self.start + 2 * size_bytes / self.rate)
