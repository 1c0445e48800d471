"""The request for a dry run: the job in the requested size, and the rank to trace."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.memory.device import device_memories
from shardwise.layout.ranks import rank_at
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job


def resized(job: Job, world: int) -> Job:
    """The same job on ``world`` ranks: data parallelism takes what the other dimensions leave."""
    strategy = job.strategy
    others = strategy.world // strategy.data_parallel
    if world % others:
        low = world // others * others
        raise SpecError(
            "--world",
            f"{world} is not a multiple of tp {strategy.tp} × cp {strategy.cp} × pp {strategy.pp} = {others}",
            f"use {low} or {low + others}" if low else f"use {others}",
        )
    cluster = job.cluster.with_devices(world)
    return replace(job, cluster=cluster, strategy=replace(strategy, dp=world // others))


def fullest_rank(job: Job) -> int:
    """The first rank of the pipeline stage that the planner gives most memory."""
    fullest = max(device_memories(job), key=lambda memory: memory.total)
    return rank_at(job.strategy, {"pp": fullest.pipeline_rank})


def check_rank(job: Job, rank: int) -> int:
    if not 0 <= rank < job.strategy.world:
        raise SpecError("--rank", f"{rank} is none of the job's {job.strategy.world} ranks", "count from 0")
    return rank
