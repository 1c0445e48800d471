"""Who is who: for every rank its node, local rank and group in each dimension."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.job import Job


@dataclass(frozen=True)
class RankPlace:
    """One rank: where it sits, its coordinate and its group (numbered) in every dimension."""

    rank: int
    node: int
    local_rank: int
    coordinates: dict[str, int]
    groups: dict[str, int]


def rank_places(job: Job) -> list[RankPlace]:
    """All ranks of the job, in order."""
    return [_place(job, rank) for rank in range(job.strategy.world)]


def _place(job: Job, rank: int) -> RankPlace:
    strategy, node_devices = job.strategy, job.cluster.node_devices
    coordinates: dict[str, int] = {}
    groups: dict[str, int] = {}
    for name in strategy.order:
        stride, degree = strategy.stride(name), strategy.degree(name)
        coordinates[name] = rank // stride % degree
        # Ranks of a group differ only in this coordinate: number the groups by what is left without it.
        groups[name] = rank // (stride * degree) * stride + rank % stride
    if job.model.moe is not None:
        coordinates["ep"], groups["ep"] = _expert_place(job, coordinates, rank)
    return RankPlace(rank, rank // node_devices, rank % node_devices, coordinates, groups)


def _expert_place(job: Job, coordinates: dict[str, int], rank: int) -> tuple[int, int]:
    """Expert coordinate and group: expert_tp innermost, then ep, over the stage's tp·cp·dp ranks."""
    strategy = job.strategy
    index, distance = 0, 1
    for name in strategy.order:
        if name != "pp":
            index += coordinates[name] * distance
            distance *= strategy.degree(name)
    inner = strategy.expert_tensor_parallel
    block = inner * strategy.ep
    group = index // block * inner + index % inner
    return index // inner % strategy.ep, coordinates["pp"] * (distance // strategy.ep) + group
