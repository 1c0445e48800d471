"""A job as some of its ranks see it: with the degrees and the tuned layers of their stage, on devices of their kind.

Everything that is priced rank by rank is priced in such a view, which is a plain job; that of a job whose ranks are
all alike is the job itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.layout.groups import coordinate, coordinates, first_rank, stage_of
from shardwise.layout.stages import pipeline_ranks_to_price, tuned_at
from shardwise.spec.clusters import mixed_kinds
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.kinds import across_kinds


def is_unlike(job: Job) -> bool:
    """Whether pipeline ranks differ by more than what they hold."""
    return job.strategy.has_unlike_stages or mixed_kinds(job.cluster) is not None


def _at_stage(job: Job, pipeline_rank: int) -> Job:
    """With the degrees of a stage, and the tuning of its layers."""
    return tuned_at(job.of_stage(pipeline_rank), pipeline_rank)


def held_by(job: Job, pipeline_rank: int) -> tuple[Job, ...]:
    """What decides the memory of a pipeline rank: one view for every kind of device that it is on."""
    own, mixed = _at_stage(job, pipeline_rank), mixed_kinds(job.cluster)
    if mixed is None:
        return (own,)
    across = across_kinds(mixed, job.strategy)
    if across.dimension == "pp":
        return (own.unchecked(cluster=mixed.kinds[across.kinds[pipeline_rank]]),)
    return tuple(_replica(job, kind, job.strategy.data_parallel, mixed.kinds[kind]) for kind in _used(across.kinds))


def timed_on(job: Job, pipeline_rank: int) -> Job:
    """What decides the time of a pipeline rank: as many stages again beyond the network between the kinds."""
    own, mixed = _at_stage(job, pipeline_rank), mixed_kinds(job.cluster)
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
    own = _with_all_devices(_at_stage(job, coordinate(strategy, "pp", rank)))
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


# -- Between two stages of unlike degrees: which part of a microbatch's hidden states goes from which rank to which
# A microbatch is a table of sequences by tokens. The data-parallel ranks of a stage cut its sequences, context
# parallelism cuts its tokens the same way in all stages, and tensor parallelism cuts them once more under sequence
# parallelism; without it every tensor-parallel rank holds all of them.

Span = tuple[int, int]  # from the first to behind the last


@dataclass(frozen=True)
class SharedPiece:
    """A rectangle of this rank's hidden states that ``rank`` holds too: ``rows`` and ``tokens`` of the tensor here."""

    rank: int
    rows: Span
    tokens: Span


def pieces_sent(job: Job, rank: int, stage: int) -> tuple[SharedPiece, ...]:
    """What a rank sends of a tensor to the ranks of a neighbouring pipeline rank ``stage``."""
    return _pieces(job, rank, stage, sends=True)


def pieces_received(job: Job, rank: int, stage: int) -> tuple[SharedPiece, ...]:
    """What a rank receives of a tensor from the ranks of a neighbouring pipeline rank ``stage``."""
    return _pieces(job, rank, stage, sends=False)


@dataclass(frozen=True)
class _Held:
    """What a rank holds of a microbatch of all replicas."""

    rows: Span
    tokens: Span
    place: dict[str, int]
    tensor_parallel: int


def _pieces(job: Job, rank: int, stage: int, *, sends: bool) -> tuple[SharedPiece, ...]:
    own, own_first = stage_of(job.strategy, rank)
    here = _held(job, own, rank - own_first)
    there = job.strategy.of_stage(stage)
    first, ranks = first_rank(job.strategy, stage), there.tp * there.cp * there.data_parallel
    pieces = []
    for number in range(ranks):
        other = _held(job, stage, number)
        sender, receiver = (here, other) if sends else (other, here)
        rows, tokens = _common(here.rows, other.rows), _common(here.tokens, other.tokens)
        if rows and tokens and here.place["cp"] == other.place["cp"] and _is_sent(job, sender, receiver):
            pieces.append(SharedPiece(first + number, _from(here.rows, rows), _from(here.tokens, tokens)))
    return tuple(pieces)


def _is_sent(job: Job, sender: _Held, receiver: _Held) -> bool:
    """Of ranks that hold the same, one sends to each receiver."""
    if job.strategy.sequence_parallel:
        return True
    return receiver.place["tp"] % sender.tensor_parallel == sender.place["tp"]


def _held(job: Job, stage: int, number: int) -> _Held:
    """What the rank with this number inside its stage holds."""
    strategy = job.strategy.of_stage(stage)
    place, tokens = coordinates(strategy, number), job.training.seq // strategy.cp
    parts = strategy.tp if strategy.sequence_parallel else 1
    part = place["tp"] if strategy.sequence_parallel else 0
    return _Held(
        _part(strategy.microbatch * strategy.data_parallel, strategy.data_parallel, place["dp"]),
        _part(tokens, parts, part),
        place,
        strategy.tp,
    )


def _part(whole: int, parts: int, number: int) -> Span:
    each = whole // parts
    return number * each, (number + 1) * each


def _common(first_span: Span, second_span: Span) -> Span | None:
    first, end = max(first_span[0], second_span[0]), min(first_span[1], second_span[1])
    return (first, end) if first < end else None


def _from(origin: Span, span: Span) -> Span:
    return span[0] - origin[0], span[1] - origin[0]
