"""What each rank records of itself: its last collectives, who is missing from one, and its profiled steps."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from shardwise.run.attempt import rank_file
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, read_json
from shardwise.spec.units import readable_bytes

# -- a rank's record: a small file that appears complete and is replaced by the next -----------------


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has begun."""

    number: int  # counted within its group, from 1
    operation: str  # in the backend's words, such as all-reduce
    bytes: int  # this rank's input
    done: bool
    at_ns: int  # when it was begun


@dataclass(frozen=True)
class GroupRecord:
    """The last collectives of a group, oldest first."""

    name: str  # the backend's
    meaning: str  # what the group is for
    ranks: tuple[int, ...]
    collectives: tuple[Collective, ...]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Equal on all ranks of the group."""
        return self.name, self.ranks


@dataclass(frozen=True)
class FlightRecord:
    rank: int
    written_at: float  # seconds since the epoch
    groups: tuple[GroupRecord, ...]

    def text(self) -> str:
        return json.dumps(asdict(self))

    def write(self, folder: Path) -> None:
        write_flight(folder, self.rank, self.text())


def write_flight(folder: Path, rank: int, text: str) -> None:
    path = rank_file(folder, rank, "flight.json")
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def read_flight(folder: Path, rank: int) -> FlightRecord | None:
    """None if there is none, or it is damaged."""
    try:
        document = read_json(rank_file(folder, rank, "flight.json"), "flight record", most_values=IN_BULK)
        groups = tuple(
            GroupRecord(
                str(group["name"]),
                str(group["meaning"]),
                tuple(map(int, group["ranks"])),
                tuple(Collective(**each) for each in group["collectives"]),
            )
            for group in document["groups"]
        )
        return FlightRecord(int(document["rank"]), float(document["written_at"]), groups)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_flights(folder: Path, ranks: Iterable[int]) -> dict[int, FlightRecord]:
    """The records that exist, by rank."""
    return {rank: record for rank in ranks if (record := read_flight(folder, rank)) is not None}


# -- who is missing ----------------------------------------------------------------------------------
# The collectives of a group are numbered, and all its ranks must begin the same ones in the same order. A rank that has
# not begun a collective in which others wait is missing; one whose collective of some number differs is out of step. A
# missing rank may itself be waiting in another group: the rank that waits for nobody is to blame.

STALE_SECONDS = 5.0  # older than the newest record by this much: its rank could not write another
BACKGROUND = ("agreement", "checkpoint")  # groups whose collectives run in the background
_EQUAL_SIZES = ("all-reduce", "reduce-scatter", "broadcast")  # on all ranks of a group
GroupKey = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class OutOfStep:
    ranks: tuple[int, ...]  # those to blame
    text: str  # a sentence without its full stop


@dataclass(frozen=True)
class _Waiting:
    """A collective that some ranks of a group have begun and others have not."""

    group: GroupRecord
    collective: Collective
    waiting: tuple[int, ...]  # ranks that have begun it
    missing: tuple[int, ...]  # ranks that have not


def out_of_step(records: Mapping[int, FlightRecord]) -> OutOfStep | None:
    """Who is to blame in a stuck or failed attempt; None if all ranks were in the same collectives."""
    fresh = fresh_records(records)
    groups = _by_group(fresh)
    for members in groups.values():
        different = _different(members)
        if different is not None:
            return different
    waits = [wait for members in groups.values() if (wait := _waiting(members)) is not None]
    return _blamed([wait for wait in waits if wait.group.meaning not in BACKGROUND], fresh) or _blamed(waits, fresh)


def fresh_records(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    """The records of this moment, without older ones of ranks that did not answer."""
    newest = max((record.written_at for record in records.values()), default=0.0)
    return {rank: record for rank, record in records.items() if newest - record.written_at < STALE_SECONDS}


def _by_group(records: Mapping[int, FlightRecord]) -> dict[GroupKey, dict[int, GroupRecord]]:
    by_group: dict[GroupKey, dict[int, GroupRecord]] = defaultdict(dict)
    for rank, record in sorted(records.items()):
        for group in record.groups:
            by_group[group.key][rank] = group
    return by_group


# -- ranks in different collectives ----------------------------------------------------------------


def _different(members: Mapping[int, GroupRecord]) -> OutOfStep | None:
    """The first number at which the ranks of a group entered different collectives."""
    calls: dict[int, dict[int, Collective]] = defaultdict(dict)
    for rank, group in members.items():
        for collective in group.collectives:
            calls[collective.number][rank] = collective
    for number, ranks in sorted(calls.items()):
        who: dict[str, list[int]] = defaultdict(list)
        for rank, collective in ranks.items():
            who[_call(collective)].append(rank)
        if len(who) > 1:
            group = next(iter(members.values()))
            parts = [f"{names(some)} entered {call}" for call, some in sorted(who.items(), key=lambda side: side[1])]
            return OutOfStep(
                _fewest(list(who.values())), f"collective #{number:,} of {_named(group)}: {', '.join(parts)}"
            )
    return None


def _call(collective: Collective) -> str:
    operation = _operation(collective)
    return f"{operation} of {readable_bytes(collective.bytes)}" if operation in _EQUAL_SIZES else operation


# -- ranks that others wait for --------------------------------------------------------------------


def _waiting(members: Mapping[int, GroupRecord]) -> _Waiting | None:
    """The first collective of a group that some have begun and others have not."""
    pending = {}
    for rank, member in members.items():
        if undone := [collective for collective in member.collectives if not collective.done]:
            pending[rank] = undone[0]
    if not pending:
        return None
    first = min(pending.values(), key=lambda collective: collective.number)
    group = next(iter(members.values()))
    begun = [
        rank for rank, member in members.items() if member.collectives and member.collectives[-1].number >= first.number
    ]
    missing = tuple(rank for rank in group.ranks if rank not in begun)
    waiting = tuple(rank for rank in begun if rank in pending)
    return _Waiting(group, first, waiting, missing) if missing else None


def _blamed(waits: Sequence[_Waiting], fresh: Collection[int]) -> OutOfStep | None:
    """Blames missing ranks that do not wait for others themselves."""
    busy = {rank for wait in waits for rank in wait.waiting}
    for wait in waits:
        idle = tuple(rank for rank in wait.missing if rank not in busy)
        if idle:
            return OutOfStep(idle, _missing_text(wait, idle, fresh))
    return _crossed(waits, fresh) if waits else None


def _crossed(waits: Sequence[_Waiting], fresh: Collection[int]) -> OutOfStep:
    """Ranks wait for each other in different collectives: blames the smallest side."""
    odd = _fewest([wait.waiting for wait in waits])
    most = max(waits, key=lambda wait: len(wait.waiting))
    parts = [f"{names(wait.waiting)} in {_place(wait)}" for wait in waits]
    if not odd or set(odd) - set(most.missing):
        return OutOfStep((), f"each waits for another: {', '.join(parts)}")
    own = next(wait for wait in waits if wait.waiting == odd)
    return OutOfStep(
        odd, f"{_missing_text(most, odd, fresh)}; {names(odd)} wait{'s' * (len(odd) == 1)} in {_place(own)}"
    )


def _fewest(sides: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The smallest side, if only one has that size: more ranks agree on something else."""
    few = min(sides, key=len)
    return tuple(few) if sum(len(side) == len(few) for side in sides) == 1 else ()


def _missing_text(wait: _Waiting, missing: Sequence[int], fresh: Collection[int]) -> str:
    where = _place(wait)
    waits = f"{names(wait.waiting)} wait{'s' * (len(wait.waiting) == 1)} in it"
    silent = [rank for rank in missing if rank not in fresh]
    if silent:
        return f"{names(silent)} left no record of {where}; {waits}"
    return f"{names(missing)} did not enter {where}; {waits}"


def _place(wait: _Waiting) -> str:
    return f"{_operation(wait.collective)} #{wait.collective.number:,} of {_named(wait.group)}"


def _operation(collective: Collective) -> str:
    return collective.operation.strip("_").replace("_", "-")


def _named(group: GroupRecord) -> str:
    return group.meaning or names(group.ranks)


def names(ranks: Collection[int]) -> str:
    """Such as "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


# -- ranks that are late ---------------------------------------------------------------------------

LEAST_COLLECTIVES = 20
LATE = 0.15  # of the time: a rank that computes a quarter longer makes others wait for a fifth
MORE = 2.0  # times the median of its group


@dataclass(frozen=True)
class Lateness:
    """How late a rank is, in the group in which it is latest."""

    rank: int
    share: float  # of the time, that the first rank to arrive waits for this one
    usual: float  # median share of the group's other ranks

    @property
    def straggles(self) -> bool:
        return self.share >= LATE and self.share >= MORE * self.usual


def lateness(records: Mapping[int, FlightRecord], stage_of: Mapping[int, int]) -> tuple[Lateness, ...]:
    """How late each rank begins collectives; ranks of different pipeline stages are not compared.

    Measured by the hosts' wall clocks: hosts share no other.
    """
    worst: dict[int, Lateness] = {}
    for members in _by_group(fresh_records(records)).values():
        group = next(iter(members.values()))
        if group.meaning in BACKGROUND or len(members) < len(group.ranks) or len({stage_of[r] for r in members}) > 1:
            continue
        for late in _of_group(members):
            if late.rank not in worst or late.share > worst[late.rank].share:
                worst[late.rank] = late
    return tuple(worst[rank] for rank in sorted(worst))


def _of_group(members: Mapping[int, GroupRecord]) -> Iterator[Lateness]:
    """The lateness of each rank in its group.

    A delay counts at most until the first rank begins its next collective: otherwise the delays of collectives in the
    background would be counted several times.
    """
    times = {
        rank: {collective.number: collective.at_ns for collective in group.collectives}
        for rank, group in members.items()
    }
    common = sorted(set.intersection(*(set(some) for some in times.values())))
    if len(common) < LEAST_COLLECTIVES:
        return
    late = dict.fromkeys(times, 0)
    for number, following in pairwise(common):
        first = min(times, key=lambda rank: times[rank][number])
        bound = times[first][following] - times[first][number]
        for rank, some in times.items():
            late[rank] += min(some[number] - times[first][number], max(0, bound))
    span = min(some[common[-1]] for some in times.values()) - min(some[common[0]] for some in times.values())
    shares = {rank: delay / span if span > 0 else 0.0 for rank, delay in late.items()}
    for rank, share in shares.items():
        others = [other_share for other, other_share in shares.items() if other != rank]
        yield Lateness(rank, share, statistics.median(others))


# -- profiled steps: named time ranges on a clock shared by all ranks --------------------------------


HOST = 0  # the lane of the thread that trains
STREAMS = 1000  # lanes from here on are streams of a GPU
_MOST_CHARACTERS = 256 * 2**20
_PLAIN = ("rank", "node", "device", "clock_error", "groups", "stages", "memory")  # fields written as they are


@dataclass(frozen=True)
class NamedRange:
    """A named stretch of time on one rank, in seconds since the first rank's record began."""

    name: str
    start: float
    end: float
    lane: int = HOST  # thread or GPU stream; ranges of a lane are nested or disjoint

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Flight:
    """A collective as the backend recorded it."""

    name: str
    members: tuple[int, ...]
    bytes: int  # this rank's input
    start: float


@dataclass(frozen=True)
class RankRecord:
    """What a rank recorded of the profiled steps."""

    rank: int
    node: int
    device: str
    clock_error: float  # seconds by which its clock may differ from rank 0's
    groups: Mapping[str, tuple[int, ...]]
    """Ranks that it communicates with, by the name of the group (`engine.mesh.Mesh`)."""
    stages: Mapping[int, tuple[int, ...]]  # layers of every stage that it holds
    memory: Mapping[str, int]  # bytes of its states
    ranges: tuple[NamedRange, ...]
    flights: tuple[Flight, ...] = ()

    def write(self, folder: Path) -> None:
        content = {
            **{name: getattr(self, name) for name in _PLAIN},
            "ranges": [(span.name, round(span.start, 7), round(span.end, 7), span.lane) for span in self.ranges],
            "flights": [(flight.name, flight.members, flight.bytes, round(flight.start, 7)) for flight in self.flights],
        }
        folder.mkdir(exist_ok=True)
        temporary = folder / f"rank-{self.rank}.part"
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path_of(folder, self.rank))


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def read_records(folder: Path, world: int) -> tuple[RankRecord, ...]:
    """The records of all ranks; raises SpecError if there are none, or not all of them."""
    paths = [path_of(folder, rank) for rank in range(world)]
    there = [path for path in paths if path.is_file()]
    if not there:
        remedy = "train with ⟨profile=steps=10:12⟩ (raise ⟨steps⟩ to continue a finished run)"
        raise SpecError(str(folder), "this run was not profiled", remedy)
    if len(there) < world:
        missing = next(path.name for path in paths if path not in there)
        raise SpecError(str(folder), f"{missing} is missing", "copy the records of all hosts into this folder")
    return tuple(_read(path) for path in paths)


def _read(path: Path) -> RankRecord:
    try:
        content = read_json(path, "record of a rank", _MOST_CHARACTERS, IN_BULK)
        converted = {
            "groups": {name: tuple(ranks) for name, ranks in content["groups"].items()},
            "stages": {int(stage): tuple(layers) for stage, layers in content["stages"].items()},
            "ranges": tuple(NamedRange(*fields) for fields in content["ranges"]),
            "flights": tuple(Flight(name, tuple(ranks), *rest) for name, ranks, *rest in content.get("flights", ())),
        }
        return RankRecord(**{**content, **converted})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(str(path), f"is not a record of a rank ({error})", "profile the run again") from None
