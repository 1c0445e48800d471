"""Bytes that a rank sent by the backend's own record, against the plan; and ranks whose records disagree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.collectives import CollectiveKind
from shardwise.cost.traffic.execution import step_traffic
from shardwise.engine.labels import backend_kind, label_of
from shardwise.layout.ranks import coordinate
from shardwise.layout.stages import rank_contents
from shardwise.layout.views import seen_by
from shardwise.measure.collectives.request import bus_factor
from shardwise.measure.compare.segments import Step
from shardwise.run.profile import Flight, NamedRange, RankRecord
from shardwise.spec.job import Job

_EQUAL_SIZES = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)  # on all ranks of a group
_BY_EXCHANGE = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
# Which dimension a group's traffic is priced as.
_DIMENSION = (
    ("tp", "tp"), ("kv_copies", "tp"), ("cp", "cp"), ("ep", "ep"), ("expert_tp", "ep"), ("pp", "pp"), ("dp", "dp"),
    ("replicate", "dp"), ("shard", "dp"), ("expert_replicate", "dp"), ("expert_shard", "dp"),
)  # fmt: skip


@dataclass(frozen=True)
class SentBytes:
    """Of one rank in a step. ``unrecorded`` names what the engine began and the backend did not record: on gloo
    messages, also those of a collective that runs as a schedule of its own. ``recorded`` is without them."""

    dimensions: tuple[str, ...]  # several where they have the same ranks
    collectives: float
    planned: float
    recorded: float
    unrecorded: tuple[str, ...] = ()


def sent_bytes(job: Job, record: RankRecord, steps: Sequence[Step]) -> tuple[SentBytes, ...]:
    """``steps`` are the rank's: what is sent between them, or for an evaluation, is not planned for a step."""
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    recorded: dict[tuple[str, ...], float] = defaultdict(float)
    planned: dict[str, float] = defaultdict(float)
    seen = seen_by(job, record.rank)
    for traffic in step_traffic(seen, rank_contents(seen, coordinate(job.strategy, "pp", record.rank))):
        planned[traffic.dimension] += traffic.bytes_sent
    begun = [named for step in steps for named in step.ranges if label_of(named.name).kind == "begin"]
    flights = [flight for step in steps for flight in step.flights]
    for flight in flights:
        own = dict.fromkeys(priced_as for name, priced_as in _DIMENSION if record.groups.get(name) == flight.members)
        dimensions = tuple(name for name in own if planned[name])
        if dimensions:
            counts[dimensions] += 1
            recorded[dimensions] += _bytes_sent(flight, _named(flight, begun))
    missing = _unrecorded(flights, begun)
    return tuple(
        SentBytes(
            names,
            counts[names] / len(steps),
            sum(planned[name] for name in names),
            recorded[names] / len(steps),
            tuple(what for dimension, what in missing if dimension in names),
        )
        for names in counts
    )


def mismatch(records: Sequence[RankRecord]) -> str | None:
    """A sentence about the first rank whose collectives in a group differ from those of the group's first rank."""
    for record in records:
        for members in dict.fromkeys(flight.members for flight in record.flights):
            first = records[members[0]]
            pairs = zip(_of(first, members), _of(record, members))
            for number, (theirs, own) in enumerate(pairs, 1):
                if theirs.name != own.name or (theirs.bytes != own.bytes and backend_kind(own.name) in _EQUAL_SIZES):
                    return (
                        f"Rank {record.rank}'s collective {number} with {', '.join(map(str, members))} is {own.name} "
                        f"of {own.bytes} B, rank {first.rank}'s is {theirs.name} of {theirs.bytes} B."
                    )
    return None


def _of(record: RankRecord, members: tuple[int, ...]) -> list[Flight]:
    return [flight for flight in record.flights if flight.members == members]


def _unrecorded(flights: Sequence[Flight], begun: Sequence[NamedRange]) -> list[tuple[str, str]]:
    """Dimension and name of what began while the backend recorded nothing, each once."""
    starts = sorted(flight.start for flight in flights)
    labels = (
        label_of(named.name) for named in begun if bisect_left(starts, named.start) == bisect_right(starts, named.end)
    )
    return list(dict.fromkeys((label.dimension, label.what) for label in labels))


def _named(flight: Flight, begun: Sequence[NamedRange]) -> CollectiveKind | None:
    """The collective by the engine's label, in whose range it began; None without a label."""
    number = bisect_right(begun, flight.start, key=lambda range: range.start) - 1
    inside = number >= 0 and flight.start <= begun[number].end
    return label_of(begun[number].name).collective if inside else None


def _bytes_sent(flight: Flight, meant: CollectiveKind | None) -> float:
    kind, n = backend_kind(flight.name), len(flight.members)
    if kind is None:
        return 0.0
    # Two ranks on gloo gather and scatter by one exchange of what the other lacks (`engine.collectives.reductions`).
    if kind is CollectiveKind.ALL_TO_ALL and n == 2 and meant in _BY_EXCHANGE:
        return float(flight.bytes)
    size = flight.bytes * (n if kind is CollectiveKind.ALL_GATHER else 1)
    return size * bus_factor(kind, n)
