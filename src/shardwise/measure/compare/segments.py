"""Divides the training thread's time into segments: a moment belongs to the innermost range that names a part."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.engine.labels import DIMENSIONS, WHOLE_PHASES, label_of
from shardwise.run.profile import HOST, STREAMS, Flight, NamedRange, RankRecord


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
        """The segments that overlap a range."""
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
