"""What ranks recorded of their steps: the segments of each rank's time, and exchanges as all their ranks saw them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwise.collectives import CollectiveKind
from shardwise.cost.traffic.execution import step_traffic
from shardwise.engine.labels import DIMENSIONS, WHOLE_PHASES, Label, backend_kind, label_of
from shardwise.layout.groups import coordinate
from shardwise.layout.stages import rank_contents
from shardwise.layout.views import seen_by
from shardwise.measure.collectives.request import bus_factor
from shardwise.run.records import HOST, STREAMS, Flight, NamedRange, RankRecord
from shardwise.spec.job import Job

# -- a rank's time: a moment belongs to the innermost range that names a part ------------------------


@dataclass(frozen=True)
class Segment:
    """A time during which one part of the step ran."""

    start: float
    end: float
    part: str
    layer: NamedRange | None = None  # the layer's forward pass that it belongs to, if any

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Step:
    """One step on one rank: the ranges of the training thread, and the same time in segments without gaps.

    Evaluations, and ranges inside a checkpoint, are left out.
    """

    number: int
    start: float
    end: float
    ranges: tuple[NamedRange, ...]
    backend: tuple[NamedRange, ...]  # what the backend does on threads of its own
    segments: tuple[Segment, ...]
    flights: tuple[Flight, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(segment.seconds for segment in self.segments)

    def segments_in(self, within: NamedRange) -> Sequence[Segment]:
        first = bisect_right(self.segments, within.start, key=lambda segment: segment.end)
        return self.segments[first : bisect_left(self.segments, within.end, key=lambda segment: segment.start)]


def steps_of(record: RankRecord) -> tuple[Step, ...]:
    """The steps of a rank's record, in order; a step repeated after a roll-back counts once."""
    host = [named for named in record.ranges if named.lane == HOST]
    steps = {label_of(named.name).number: named for named in host if label_of(named.name).kind == "step"}
    found_steps = []
    for number, step in sorted(steps.items()):
        own = _OwnTime(step.start, step.end, host)
        inside = tuple(named for named in host if named.end <= step.end and own.has(named))
        backend = tuple(named for named in record.ranges if label_of(named.name).kind == "backend" and own.has(named))
        segments = tuple(segment for segment in _segments(inside) if segment.part != "evaluation")
        flights = tuple(flight for flight in record.flights if own.has(flight))
        found_steps.append(Step(number, step.start, step.end, inside, backend, segments, flights))
    return tuple(found_steps)


class _OwnTime:
    """The time from ``start`` to ``end`` without the evaluations and checkpoints among ``ranges``."""

    def __init__(self, start: float, end: float, ranges: Sequence[NamedRange]) -> None:
        self.start, self.end = start, end
        self.others = [
            named for named in ranges if start <= named.start <= end and label_of(named.name).part in WHOLE_PHASES
        ]

    def has(self, event: NamedRange | Flight) -> bool:
        """Whether it begins in this time; an evaluation or a checkpoint itself does."""
        inside = any(other.start <= event.start < other.end and other is not event for other in self.others)
        return self.start <= event.start <= self.end and not inside


def _segments(ranges: Sequence[NamedRange]) -> Iterator[Segment]:
    """``ranges`` are ordered by start, outer ones before those inside them."""
    open_ranges: list[tuple[NamedRange, str, NamedRange | None]] = []
    now = ranges[0].start

    def until(moment: float) -> Iterator[Segment]:
        nonlocal now
        while open_ranges and open_ranges[-1][0].end <= moment:
            done, part, layer = open_ranges.pop()
            if done.end > now:
                yield Segment(now, done.end, part, layer)
                now = done.end
        if open_ranges and moment > now:
            _, part, layer = open_ranges[-1]
            yield Segment(now, moment, part, layer)
            now = moment

    for named in ranges:
        yield from until(named.start)
        label = label_of(named.name)
        _, around, layer = open_ranges[-1] if open_ranges else (named, "host", None)
        if label.kind == "layer":  # one that is recomputed in a backward pass is not a forward pass
            again = any(label_of(outer.name).pass_kind == "backward" for outer, _, _ in open_ranges)
            layer = None if again else named
        open_ranges.append((named, label.part or around, layer))
    yield from until(float("inf"))


# -- steps on a GPU: the host runs ahead, so the kernels determine where the time went ---------------
# A moment belongs to the computation that runs then, or else to the (exposed) communication. If nothing runs, it is
# counted as what the host does meanwhile, if that is data, a checkpoint or an evaluation, or as "host".

_GAP_SECONDS = 20e-6  # shorter gaps between kernels are launches, and count as the kernel before
_HOST_PARTS = ("data", "checkpoint", "evaluation")


@dataclass(frozen=True)
class _Kernel:
    range: NamedRange
    part: str
    layer: NamedRange | None
    communicates: bool


def device_steps(record: RankRecord) -> tuple[Step, ...]:
    """A step lasts until the first kernel of the next one. There are no flights: no GPU backend's record is read."""
    on_device = [named for named in record.ranges if named.lane >= STREAMS]
    marks = [named for named in on_device if label_of(named.name).kind not in ("none", "backend")]
    kernels = [kernel for lane in {named.lane for named in on_device} for kernel in _kernels(on_device, lane)]
    bounds = _bounds(marks)
    host = [named for named in record.ranges if named.lane == HOST and label_of(named.name).part in _HOST_PARTS]
    steps = []
    for number, (start, end) in sorted(bounds.items()):
        running = [kernel for kernel in kernels if start <= kernel.range.start < end]
        segments = [segment for segment in _device_segments(running, host, start, end) if segment.part != "evaluation"]
        own = _OwnTime(start, end, marks)
        ranges = tuple(mark for mark in marks if mark.start < end and own.has(mark))
        backend = tuple(kernel.range for kernel in running if kernel.communicates and own.has(kernel.range))
        steps.append(Step(number, start, end, ranges, backend, tuple(segments)))
    return tuple(steps)


def _bounds(marks: Sequence[NamedRange]) -> dict[int, tuple[float, float]]:
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for mark in marks:
        if (label := label_of(mark.name)).kind == "step":
            starts[label.number] = min(mark.start, starts.get(label.number, mark.start))
            ends[label.number] = max(mark.end, ends.get(label.number, mark.end))
    return {number: (start, starts.get(number + 1, ends[number])) for number, start in starts.items()}


def _kernels(on_device: Sequence[NamedRange], lane: int) -> Iterator[_Kernel]:
    """The kernels of one stream, each named by the ranges around it."""
    around: list[NamedRange] = []  # the outermost first
    for named in sorted(
        (named for named in on_device if named.lane == lane),
        key=lambda named: (named.start, -named.end, _is_kernel(named)),
    ):
        while around and around[-1].end <= named.start:
            around.pop()
        if _is_kernel(named):
            yield _kernel(named, around)
        elif label_of(named.name).kind != "backend":
            around.append(named)


def _is_kernel(named: NamedRange) -> bool:
    """Whether it is a kernel, not a range named by us or PyTorch."""
    return label_of(named.name).kind == "none"


def _kernel(kernel: NamedRange, around: Sequence[NamedRange]) -> _Kernel:
    parts = [label.part for outer in reversed(around) if (label := label_of(outer.name)).part and label.kind != "step"]
    communicates = label_of(kernel.name).communicates
    if whole := [part for part in parts if part in WHOLE_PHASES]:
        parts = whole
    elif communicates:
        parts = [part for part in parts if part in (*DIMENSIONS, "world")] or ["dp"]
    again = any(label_of(outer.name).pass_kind == "backward" for outer in around)
    layer = None if again else next((outer for outer in around if label_of(outer.name).kind == "layer"), None)
    return _Kernel(kernel, parts[0] if parts else "compute", layer, communicates)


def _device_segments(kernels: Sequence[_Kernel], host: Sequence[NamedRange], start: float, end: float) -> list[Segment]:
    moments = sorted(
        {start, end, *(moment for kernel in kernels for moment in (kernel.range.start, min(kernel.range.end, end)))}
    )
    running: list[list[_Kernel]] = [[] for _ in moments]
    for kernel in kernels:
        first = bisect_right(moments, kernel.range.start) - 1
        for place in range(first, bisect_right(moments, min(kernel.range.end, end)) - 1):
            running[place].append(kernel)
    segments: list[Segment] = []
    for place, (begin, until) in enumerate(pairwise(moments)):
        # Computation takes precedence: communication beside it costs nothing.
        now = min(running[place], key=lambda kernel: kernel.communicates, default=None)
        if now is not None:
            segments.append(Segment(begin, until, now.part, now.layer))
        elif segments and until - begin < _GAP_SECONDS:
            segments.append(Segment(begin, until, segments[-1].part, segments[-1].layer))
        else:
            middle = (begin + until) / 2
            doing = next((label_of(phase.name).part for phase in host if phase.start <= middle <= phase.end), "host")
            segments.append(Segment(begin, until, doing))
    return segments


# -- exchanges: when each rank began, and how long they took once all had ----------------------------
# And the bytes that a rank sent according to the backend's own record, against the plan.


@dataclass
class Participation:
    """One rank's part in a collective: when it began, when its host was blocked on it, and when it was done."""

    rank: int
    label: Label
    begin: float
    blocked: list[NamedRange] = field(default_factory=list)
    ends: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """A collective of ``members``, or a message from the first of two to the second."""

    label: Label
    what: str
    step: int
    members: tuple[int, ...]
    bytes: int
    complete: float  # when the last rank had begun
    end: float
    blocked: Mapping[int, tuple[NamedRange, ...]]  # when each rank's host was blocked

    @property
    def dimension(self) -> str:
        return self.label.dimension

    @property
    def seconds(self) -> float:
        """Seconds since the last rank had begun."""
        return max(0.0, self.end - self.complete)

    def waited_for_others(self, rank: int) -> float:
        """Seconds that a rank was blocked before the last one had begun."""
        return sum(max(0.0, min(wait.end, self.complete) - wait.start) for wait in self.blocked.get(rank, ()))

    @property
    def shows_the_link(self) -> bool:
        """Whether a rank waited until it completed; otherwise it may have completed long before anyone looked."""
        waits = [wait.end - max(wait.start, self.complete) for ranges in self.blocked.values() for wait in ranges]
        return max(waits, default=0.0) > 0.5 * self.seconds


def exchanges_of(records: Sequence[RankRecord], steps: Sequence[Sequence[Step]]) -> tuple[Exchange, ...]:
    """All exchanges; ``steps[r]`` are rank r's. Collectives that not all ranks of a group recorded are left out."""
    exchanges: list[Exchange] = []
    for of_step in zip(*steps):
        begun = [_participations(record, step) for record, step in zip(records, of_step)]
        exchanges += _collectives(records, begun, of_step[0].number)
        exchanges += _messages(records, begun, of_step)
    return tuple(exchanges)


Participations = dict[tuple[str, str], list[Participation]]


def _participations(record: RankRecord, step: Step) -> Participations:
    """What a rank began, by dimension and name, with its waits and the end of the backend's work."""
    begun: Participations = defaultdict(list)
    waits: dict[tuple[str, str], int] = defaultdict(int)
    newest: list[tuple[float, Participation]] = []
    for named in step.ranges:
        label = label_of(named.name)
        key = label.dimension, label.what
        if label.kind == "begin":
            blocked = [named] if named.lane == HOST else _exposed(named, step, label.part)
            share = Participation(record.rank, label, named.start, blocked, named.end)
            begun[key].append(share)
            newest.append((named.start, share))
        elif label.kind == "wait" and waits[key] < len(begun.get(key, ())):
            share = begun[key][waits[key]]
            waits[key] += 1
            share.blocked.append(named)
            share.ends = max(share.ends, named.end)
            newest.append((named.start, share))
    _note_backend(newest, step)
    return begun


def _exposed(collective: NamedRange, step: Step, part: str) -> list[NamedRange]:
    """The parts of a collective on a GPU during which nothing is computed."""
    return [
        replace(collective, start=max(collective.start, segment.start), end=min(collective.end, segment.end))
        for segment in step.segments_in(collective)
        if segment.part == part
    ]


def _note_backend(newest: Sequence[tuple[float, Participation]], step: Step) -> None:
    """Corrects ends by the backend's last activity: it may be done long before a rank waits."""
    ended: dict[int, tuple[Participation, float]] = {}
    place = 0
    for work in sorted(step.backend, key=lambda activity: activity.start):
        if label_of(work.name).ends_when_waited:
            continue
        while place + 1 < len(newest) and newest[place + 1][0] <= work.start:
            place += 1
        if newest and newest[place][0] <= work.start:
            share = newest[place][1]
            before = ended.get(id(share), (share, 0.0))[1]
            ended[id(share)] = share, max(before, work.end)
    for share, end in ended.values():
        if len(share.blocked) > 1 and share.blocked[0].lane == HOST:
            share.ends = min(share.ends, end)


def members_of(record: RankRecord, label: Label, world: int) -> tuple[int, ...]:
    """The ranks that take part in what a rank began."""
    if label.dimension == "world":
        return tuple(range(world))
    if label.dimension == "dp" and not label.over_the_batch:
        shard = record.groups["shard"]
        return shard if len(shard) > 1 else record.groups["replicate"]
    return record.groups.get(label.dimension, (record.rank,))


def _collectives(records: Sequence[RankRecord], begun: Sequence[Participations], step: int) -> Iterator[Exchange]:
    world = len(records)
    for record, mine in zip(records, begun):
        for (dimension, what), shares in mine.items():
            label = shares[0].label
            members = members_of(record, label, world)
            if label.message:
                continue
            if dimension == "pp":  # some are only between the first and the last stage
                members = tuple(rank for rank in members if (dimension, what) in begun[rank])
            if record.rank != min(members) or len(members) < 2:
                continue
            everyone = [begun[rank].get((dimension, what), []) for rank in members]
            if any(len(own) != len(shares) for own in everyone):
                continue
            for together in zip(*everyone):
                complete, end = max(share.begin for share in together), max(share.ends for share in together)
                blocked = {share.rank: tuple(share.blocked) for share in together}
                yield Exchange(label, what, step, members, together[0].label.bytes, complete, end, blocked)


def _messages(
    records: Sequence[RankRecord], begun: Sequence[Participations], of_step: Sequence[Step]
) -> Iterator[Exchange]:
    """Messages between pipeline stages: what one rank sends, another waits for in the same order."""
    for record, mine in zip(records, begun):
        for sends in mine.values():
            message = sends[0].label.message
            if not message:
                continue
            for receiver in record.groups["pp"]:
                labelled = ((named, label_of(named.name)) for named in of_step[receiver].ranges)
                waits = [named for named, label in labelled if label.kind == "wait" and label.what == message]
                if receiver == record.rank or len(waits) != len(sends):
                    continue
                for send, wait in zip(sends, waits):
                    members, blocked = (record.rank, receiver), {receiver: (wait,)}
                    step = of_step[0].number
                    yield Exchange(send.label, message, step, members, send.label.bytes, send.begin, wait.end, blocked)


# -- bytes by the backend's own record ---------------------------------------------------------------


_EQUAL_SIZES = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)  # on all ranks of a group
_BY_EXCHANGE = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
# Which dimension a group's traffic is priced as.
_DIMENSION = (
    ("tp", "tp"), ("kv_copies", "tp"), ("cp", "cp"), ("ep", "ep"), ("expert_tp", "ep"), ("pp", "pp"), ("dp", "dp"),
    ("replicate", "dp"), ("shard", "dp"), ("expert_replicate", "dp"), ("expert_shard", "dp"),
)  # fmt: skip


@dataclass(frozen=True)
class SentBytes:
    dimensions: tuple[str, ...]  # several if they have the same ranks
    collectives: float
    planned: float
    recorded: float
    unrecorded: tuple[str, ...] = ()
    """Begun by the engine but not recorded by the backend: on gloo all messages, also those of our own schedules."""


def sent_bytes(job: Job, record: RankRecord, steps: Sequence[Step]) -> tuple[SentBytes, ...]:
    """Bytes of the rank's ``steps``; what it sends between steps or in evaluations is not part of the plan."""
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
    """Dimension and name, each once, of what began without the backend recording anything."""
    starts = sorted(flight.start for flight in flights)
    labels = (
        label_of(named.name) for named in begun if bisect_left(starts, named.start) == bisect_right(starts, named.end)
    )
    return list(dict.fromkeys((label.dimension, label.what) for label in labels))


def _named(flight: Flight, begun: Sequence[NamedRange]) -> CollectiveKind | None:
    """The collective by the label of the engine's range in which the flight began; None if there is none."""
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
