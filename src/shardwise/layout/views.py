"""A job as some of its ranks see it: with the degrees of their stage, on devices of their kind.

Everything that is priced rank by rank is priced in such a view, which is a plain job; that of a job whose ranks are
all alike is the job itself.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.layout.ranks import coordinate
from shardwise.layout.stages import pipeline_ranks_to_price
from shardwise.spec.clusters import mixed_kinds
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.kinds import across_kinds


def is_unlike(job: Job) -> bool:
    """Whether pipeline ranks differ by more than what they hold."""
    return job.strategy.has_unlike_stages or mixed_kinds(job.cluster) is not None


def held_by(job: Job, pipeline_rank: int) -> tuple[Job, ...]:
    """What decides the memory of a pipeline rank: one view for every kind of device that it is on."""
    own, mixed = job.of_stage(pipeline_rank), mixed_kinds(job.cluster)
    if mixed is None:
        return (own,)
    across = across_kinds(mixed, job.strategy)
    if across.dimension == "pp":
        return (own.unchecked(cluster=mixed.kinds[across.kinds[pipeline_rank]]),)
    return tuple(_replica(job, kind, job.strategy.data_parallel, mixed.kinds[kind]) for kind in _used(across.kinds))


def timed_on(job: Job, pipeline_rank: int) -> Job:
    """What decides the time of a pipeline rank: as many stages again beyond the network between the kinds."""
    own, mixed = job.of_stage(pipeline_rank), mixed_kinds(job.cluster)
    if mixed is None:
        return _with_all_devices(own)
    across = across_kinds(mixed, job.strategy)
    assert across.dimension == "pp"
    kind = across.kinds[pipeline_rank]
    strategy = own.strategy.unchecked(pp=2 * len(across.members(kind)))
    return own.unchecked(cluster=mixed.joined[kind], strategy=strategy)


def _with_all_devices(own: Job) -> Job:
    """On as many devices as a job has whose stages all have these degrees: its groups then divide them."""
    if own.strategy.world == own.cluster.devices:
        return own
    try:
        return own.unchecked(cluster=own.cluster.with_devices(own.strategy.world))
    except SpecError:  # no cluster of that size: whoever prices its groups says what does not fit
        return own


def message_views(job: Job, pipeline_rank: int) -> tuple[Job, Job]:
    """What decides the time of a message of this rank: one to its own kind of device, and one to another."""
    beyond, mixed = timed_on(job, pipeline_rank), mixed_kinds(job.cluster)
    if mixed is None:
        return beyond, beyond
    across = across_kinds(mixed, job.strategy)
    kind = across.kinds[pipeline_rank]
    strategy = beyond.strategy.unchecked(pp=len(across.members(kind)))
    return beyond.unchecked(cluster=mixed.kinds[kind], strategy=strategy), beyond


def same_kind(job: Job, first: int, second: int) -> bool:
    """Whether two pipeline ranks are on the same kind of device."""
    mixed = mixed_kinds(job.cluster)
    if mixed is None:
        return True
    kinds = across_kinds(mixed, job.strategy).kinds
    return kinds[first] == kinds[second]


def replicas_by_kind(job: Job) -> tuple[Job, ...]:
    """Where data parallelism goes across the kinds: the replicas of each, and as many beyond the network between.

    Empty where it does not.
    """
    mixed = mixed_kinds(job.cluster)
    if mixed is None:
        return ()
    across = across_kinds(mixed, job.strategy)
    if across.dimension != "dp":
        return ()
    return tuple(_replica(job, kind, 2 * len(across.members(kind)), mixed.joined[kind]) for kind in _used(across.kinds))


def seen_by(job: Job, rank: int) -> Job:
    """A job in which all ranks are like this one: with the degrees of its stage, its share of the batch, its device.

    For what does not depend on a network: bytes, memory, arithmetic. All its devices are on one level.
    """
    strategy, mixed = job.strategy, mixed_kinds(job.cluster)
    own = _with_all_devices(job.of_stage(coordinate(strategy, "pp", rank)))
    if strategy.dp_shares is not None:
        rows = len(job.rows_of(coordinate(strategy, "dp", rank)))
        own = own.unchecked(
            strategy=strategy.unchecked(dp_shares=None),
            training=job.training.unchecked(global_batch=rows * strategy.data_parallel),
        )
    if mixed is not None:
        device = mixed.kinds[kind_of(job, rank)].device
        level = replace(mixed.between, size=own.strategy.world)
        own = own.unchecked(cluster=Cluster(device=device, levels=(level,), name=mixed.name))
    return own


def kind_of(job: Job, rank: int) -> int:
    """Which of the cluster's kinds of nodes a rank is on; 0 where there is one."""
    mixed = mixed_kinds(job.cluster)
    if mixed is None:
        return 0
    across = across_kinds(mixed, job.strategy)
    return across.kinds[coordinate(job.strategy, across.dimension, rank)]


def _replica(job: Job, kind: int, replicas: int, cluster: object) -> Job:
    """A job of equal replicas, each like the busiest of a kind."""
    mixed = mixed_kinds(job.cluster)
    assert mixed is not None
    members = across_kinds(mixed, job.strategy).members(kind)
    rows = max(len(job.rows_of(member)) for member in members)
    return job.unchecked(
        cluster=cluster,
        strategy=job.strategy.unchecked(dp=replicas, dp_shares=None),
        training=job.training.unchecked(global_batch=rows * replicas),
    )


def _used(kinds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(kinds))


def ranks_to_price(job: Job) -> tuple[tuple[Job, int], ...]:
    """The pipeline ranks whose memory differs, each with its view."""
    ranks = range(job.strategy.pp) if is_unlike(job) else pipeline_ranks_to_price(job)
    return tuple(dict.fromkeys((view, rank) for rank in ranks for view in held_by(job, rank)))
