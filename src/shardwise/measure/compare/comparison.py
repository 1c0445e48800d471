"""A run against its prediction: every part of the step and of memory, and likely causes of the largest differences."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost.memory.device import DeviceMemory, memory_of_rank
from shardwise.cost.step.trace import step_trace
from shardwise.engine.labels import DIMENSIONS, label_of
from shardwise.layout.groups import coordinate
from shardwise.layout.mesh import mesh_divisions
from shardwise.layout.views import kind_of
from shardwise.measure.compare.recorded import Exchange, SentBytes, mismatch, sent_bytes
from shardwise.measure.compare.step_parts import (
    BUBBLE,
    LATE,
    Measured,
    Predicted,
    exchange_seconds,
    layers_of,
    measured,
    predicted,
)
from shardwise.run.checkpoint.folder import RunFolder, run_folder
from shardwise.run.metrics.lines import read_lines, summarise
from shardwise.run.records import HOST, STREAMS, NamedRange, RankRecord, read_records
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.spec.model import Model

# -- ranks that are slower than others ---------------------------------------------------------------

SLOW = 1.25  # times as long for a layer as on the usual rank


def same_work(job: Job) -> tuple[Hashable, ...]:
    """For every rank, what the time of a layer depends on: the degrees of its stage, and its kind of device."""
    stages = (job.strategy.of_stage(coordinate(job.strategy, "pp", rank)) for rank in range(job.strategy.world))
    return tuple((own.tp, own.microbatch, kind_of(job, rank)) for rank, own in enumerate(stages))


def rank_slowness(
    model: Model, recorded: Measured, alike: Sequence[Hashable] | None = None
) -> tuple[float, ...] | None:
    """How many times as long each rank takes for a layer as the usual one; None if no layer was recorded.

    Layers are compared with others of their kind and, if ``alike`` is given, ranks with those of an equal value there.
    The usual rank is the median; of two, the faster.
    """
    kinds: list[dict[Hashable, float]] = []
    for rank in recorded.ranks:
        each: dict[Hashable, list[float]] = defaultdict(list)
        for layer, seconds in rank.layers.items():
            each[model.every_layer[layer], None if alike is None else alike[rank.rank]].append(seconds)
        kinds.append({kind: statistics.fmean(seconds) for kind, seconds in each.items()})
    if not any(kinds):
        return None
    usual = {
        kind: statistics.median_low(own[kind] for own in kinds if kind in own)
        for kind in {kind for own in kinds for kind in own}
    }
    return tuple(
        statistics.mean(seconds / usual[kind] for kind, seconds in own.items()) if own else 1.0 for own in kinds
    )


def straggler(slowness: tuple[float, ...] | None) -> int | None:
    """The slowest rank, if it is much slower than the usual one."""
    if slowness is None or len(slowness) < 2:
        return None
    slowest = max(range(len(slowness)), key=lambda rank: slowness[rank])
    return slowest if slowness[slowest] >= SLOW else None


def straggler_of_steps(model: Model, recorded: Measured) -> int | None:
    """The rank that is the straggler in every single step; None if there is none."""
    named = set()
    for number in range(len(recorded.numbers)):
        ranks = tuple(
            replace(rank, layers=layers_of([own[number]])) for rank, own in zip(recorded.ranks, recorded.steps)
        )
        named.add(straggler(rank_slowness(model, replace(recorded, ranks=ranks))))
    return named.pop() if len(named) == 1 else None


# -- slow links, found by the collectives and messages that cross them -------------------------------

SLOW_LINK = 2.0  # times as long as the same exchange between other ranks
FAR = 3.0  # times the ratio of measured to priced time of everything else
WORTH = 0.02  # of the step: shorter exchanges are ignored, smaller differences not explained


@dataclass(frozen=True)
class MeasuredLink:
    """Exchanges of one size between the same ranks: how many there are in a step, and their median time."""

    dimension: str
    what: str
    is_message: bool  # between the stages of a pipeline
    members: tuple[int, ...]
    nodes: tuple[int, ...]
    bytes: int
    count: float
    seconds: float
    price_seconds: float | None

    @property
    def step_seconds(self) -> float:
        return self.count * self.seconds

    @property
    def ratio(self) -> float | None:
        """Measured over priced."""
        return self.seconds / self.price_seconds if self.price_seconds else None

    @property
    def carries(self) -> tuple[str, str, int]:
        """Links with an equal value are compared: pipeline messages of one size are, whichever stage sends."""
        return self.dimension, "" if self.is_message else self.what, self.bytes

    @property
    def between(self) -> str:
        ranks = f"ranks {' and '.join(map(str, sorted(self.members)))}"
        return ranks if len(self.nodes) == 1 else f"{ranks} (nodes {' and '.join(map(str, self.nodes))})"


@dataclass(frozen=True)
class SlowLink:
    link: MeasuredLink
    times: float  # as long
    than: str


def links_of(job: Job, recorded: Measured) -> tuple[MeasuredLink, ...]:
    """A link for every size and name of exchange between the same ranks, both directions together."""
    same: dict[tuple[str, str, tuple[int, ...], int], list[Exchange]] = defaultdict(list)
    for exchange in recorded.exchanges:
        same[exchange.dimension, exchange.what, tuple(sorted(exchange.members)), exchange.bytes].append(exchange)
    links = []
    for (dimension, what, members, size), some in same.items():
        shown = [exchange.seconds for exchange in some if exchange.shows_the_link]
        if not shown:
            continue
        nodes = tuple(sorted({recorded.records[rank].node for rank in members}))
        count, seconds = len(some) / len(recorded.numbers), statistics.median(shown)
        is_message, price = bool(some[0].label.message), exchange_seconds(job, some[0])
        links.append(MeasuredLink(dimension, what, is_message, members, nodes, size, count, seconds, price))
    return tuple(links)


def slow_link(links: Sequence[MeasuredLink], step_seconds: float, compute_ratio: float) -> SlowLink | None:
    """The slow link that costs most: slower than others that carry the same or, if none is, than its price.

    If everything takes longer than its price, even computation, the prices are wrong and no link is to blame.
    """
    worth = [link for link in links if link.step_seconds >= WORTH * step_seconds]
    slow_links = [slow for link in worth if (slow := _against_others(link, links)) is not None]
    if not slow_links:
        slow_links = [slow for link in worth if (slow := _against_price(link, links, compute_ratio)) is not None]
    return max(slow_links, key=lambda slow: slow.link.step_seconds * (1 - 1 / slow.times), default=None)


def _against_others(link: MeasuredLink, links: Sequence[MeasuredLink]) -> SlowLink | None:
    same = [other.seconds for other in links if other.members != link.members and other.carries == link.carries]
    usual = statistics.median_low(same) if same else None
    if not usual or link.seconds < SLOW_LINK * usual:
        return None
    return SlowLink(link, link.seconds / usual, "between other ranks")


def _against_price(link: MeasuredLink, links: Sequence[MeasuredLink], compute_ratio: float) -> SlowLink | None:
    others = [other.ratio for other in links if other.members != link.members and other.ratio is not None]
    usual = max(1.0, min([compute_ratio, *others]))
    if link.ratio is None or link.ratio < FAR * usual:
        return None
    return SlowLink(link, link.ratio, "its description")


# -- a run's folder and what was recorded in it ------------------------------------------------------


@dataclass(frozen=True)
class ProfiledRun:
    folder: RunFolder
    job: Job
    measured: Measured


def profiled_run(text: str) -> ProfiledRun:
    """The run in a folder; raises SpecError if there is none, or none that was profiled."""
    folder = run_folder(text)
    job = Job.from_dict(read_yaml(str(folder.job)))
    records = read_records(folder.profile, job.strategy.world)
    planned = mesh_divisions(job.strategy)
    if any(records[0].groups[name] not in planned[name] for name in job.strategy.order):
        problem = "was recorded with another layout than the run has now"
        raise SpecError(str(folder.profile), problem, "profile it again: ⟨profile=steps=10:12⟩")
    return ProfiledRun(folder, job, measured(records, pipelined=job.strategy.pp > 1))


# -- likely causes of a part of a step differing from its price --------------------------------------

PARTS = ("compute", *DIMENSIONS, "offload", BUBBLE, LATE, "optimizer", "data", "checkpoint", "host")


@dataclass(frozen=True)
class Part:
    """Seconds of a step, or bytes of memory; hidden seconds are not included, and None if unknown."""

    name: str
    predicted: float
    measured: float
    hidden_predicted: float | None = None
    hidden_measured: float | None = None
    cause: str = ""  # of the difference, if one is known

    @property
    def difference(self) -> float:
        return self.measured - self.predicted


@dataclass(frozen=True)
class Evidence:
    part: Part
    slow_rank: int | None
    slowness: float  # of that rank
    slow_link: SlowLink | None

    @property
    def longer(self) -> bool:
        return self.part.difference > 0

    @property
    def own_link(self) -> SlowLink | None:
        """The slow link, if this part goes over it."""
        own = self.slow_link is not None and self.slow_link.link.dimension == self.part.name
        return self.slow_link if own else None


def _always(evidence: Evidence) -> bool:
    return True


# Parts, when the cause applies, and what it is; the first that applies is given.
CAUSES: tuple[tuple[tuple[str, ...], Callable[[Evidence], bool], str], ...] = (
    (("compute",),
     lambda e: e.slow_rank is not None and e.longer and e.part.measured < 2 * e.slowness * e.part.predicted,
     "rank {0.slow_rank} takes {0.slowness:.2f} times as long for a layer as others do"),
    (("compute",), lambda e: e.longer,
     "slower on every rank than the device's description: `shardwise calibrate` measures this device"),
    (("compute",), _always, "the device is faster than its description: `shardwise calibrate`"),
    (("bubble", "late ranks"), lambda e: e.slow_rank is not None and e.longer,
     "the others wait for rank {0.slow_rank}"),
    (("bubble",), lambda e: e.longer, "stages differ: `shardwise calibrate --from` rebalances them"),
    (("late ranks",), _always,
     "ranks arrive at different times: other work on their machines, or uneven data and experts"),
    (DIMENSIONS, lambda e: e.own_link is not None and e.longer,
     "the link between {0.slow_link.link.between} takes {0.slow_link.times:.1f} times as long as {0.slow_link.than}"),
    (DIMENSIONS, lambda e: e.longer,
     "slower than the network's description, or less of it is hidden: `shardwise calibrate` measures links"),
    (DIMENSIONS, _always, "the network is faster than its description, or more of it is hidden"),
    (("data",), _always, "the loop waits for batches: more run.data.workers, or run.data.stage"),
    (("checkpoint",), _always,
     "training waits while the state is copied or written: fewer checkpoints, or asynchronous ones"),
    (("optimizer",), lambda e: e.longer,
     "the update moves fewer bytes per second here than predicted: `shardwise calibrate`"),
    (("optimizer",), _always, "the update is faster than predicted: `shardwise calibrate`"),
    (("host",), _always, "the host between the phases: metrics, logging, garbage collection"),
)  # fmt: skip


def cause_of(evidence: Evidence) -> str:
    """Empty if none is known."""
    causes = (text for parts, applies, text in CAUSES if evidence.part.name in parts and applies(evidence))
    return next(causes, "").format(evidence)


# -- the comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    job: Job
    measured: Measured
    predicted: Predicted
    parts: tuple[Part, ...]
    memory: tuple[Part, ...]
    differences: tuple[Part, ...]  # the largest first
    usual_seconds: float | None  # of steps that were not profiled
    slowness: tuple[float, ...] | None  # of every rank, relative to the usual one
    slow_rank: int | None
    slow_link: SlowLink | None
    sent: tuple[SentBytes, ...] = ()  # of the rank whose step is shown
    mismatch: str | None = None  # ranks that did not begin the same collectives
    missing_steps: str = ""  # without a line in the run's metrics


def compare(run: ProfiledRun) -> Comparison:
    job, recorded, expected = run.job, run.measured, predicted(run.job)
    busiest = recorded.busiest
    parts = tuple(
        Part(name, expected.parts.get(name, 0.0), busiest.parts.get(name, 0.0), *_hidden(name, expected, recorded))
        for name in PARTS
        if expected.parts.get(name) or busiest.parts.get(name)
    )
    slowness = rank_slowness(job.model, recorded, alike=same_work(job))
    slow_rank = straggler(slowness)
    fastest = min(rank.parts.get("compute", 0.0) for rank in recorded.ranks)
    ratio = fastest / expected.parts["compute"] if expected.parts["compute"] else 1.0
    slow = slow_link(links_of(job, recorded), recorded.step_seconds, ratio)
    slowest = 1.0 if slow_rank is None or slowness is None else slowness[slow_rank]
    differences = [
        replace(part, cause=cause_of(Evidence(part, slow_rank, slowest, slow)))
        for part in parts
        if abs(part.difference) >= WORTH * recorded.step_seconds
    ]
    differences.sort(key=lambda part: -abs(part.difference))
    lines = list(read_lines(run.folder.metrics))
    profile = job.run.profile
    plain = [line for line in lines if profile is None or not profile.first <= line["step"] <= profile.last]
    return Comparison(
        job, recorded, expected, parts, _memory(job, recorded, lines), tuple(differences),
        summarise(plain).step_seconds, slowness, slow_rank, slow,
        sent_bytes(job, recorded.records[busiest.rank], recorded.steps[busiest.rank]), mismatch(recorded.records),
        summarise(lines).missing_steps,
    )  # fmt: skip


def _hidden(name: str, expected: Predicted, recorded: Measured) -> tuple[float | None, float | None]:
    """Hidden seconds, predicted and measured; unknown for pipeline messages, whose time in flight is not recorded."""
    if name not in DIMENSIONS:
        return None, None
    return expected.hidden.get(name, 0.0), None if name == "pp" else recorded.busiest.hidden.get(name, 0.0)


def _memory(job: Job, recorded: Measured, lines: list[dict[str, object]]) -> tuple[Part, ...]:
    """The memory of the fullest rank; if no step was counted, what rank 0 holds between steps."""
    counted = [line["memory_bytes_of_ranks"] for line in lines if isinstance(line.get("memory_bytes_of_ranks"), list)]
    peaks: list[int] = counted[-1] if counted else []  # type: ignore[assignment]
    rank = peaks.index(max(peaks)) if peaks else 0
    expected = memory_of_rank(job, coordinate(job.strategy, "pp", rank))
    parts = _states(job, expected, recorded.records[rank].memory)
    if peaks:
        held = sum(part.measured for part in parts)
        priced = sum(part.predicted for part in parts)
        tensors = expected.total - expected.allowance  # the framework's own memory is not measured
        parts.append(Part("all else at the peak", tensors - priced, peaks[rank] - held))
        parts.append(Part(f"peak of rank {rank}", tensors, peaks[rank]))
    return tuple(parts)


def _states(job: Job, expected: DeviceMemory, held: Mapping[str, int]) -> list[Part]:
    """What is held between two steps; ZeRO-1 and 2 then hold weights only as the optimizer's own shard."""
    if job.strategy.zero in (1, 2):
        return [Part("optimizer and its weights", expected.optimizer, sum(held.values()))]
    return [Part(name, getattr(expected, name), held[name]) for name in ("weights", "optimizer")]


# -- the predicted step and the measured ones in one Chrome trace ------------------------------------

_MEASURED = 100_000  # process numbers from here on are measured ranks


def timeline(job: Job, recorded: Measured) -> dict[str, Any]:
    """Both begin at 0: the prediction, and the first measured step of the rank that begins first."""
    trace = step_trace(job)
    events = [
        {**event, "args": {"name": f"predicted: {event['args']['name']}"}} if event["name"] == "process_name" else event
        for event in trace["traceEvents"]
    ]
    zero = min(steps[0].start for steps in recorded.steps)
    for record in recorded.records:
        events += _rank(record, zero)
    return {**trace, "traceEvents": events}


def _rank(record: RankRecord, zero: float) -> Iterator[dict[str, Any]]:
    process = _MEASURED + record.rank
    named = {"ph": "M", "pid": process}
    yield {**named, "name": "process_name", "args": {"name": f"measured: rank {record.rank}, node {record.node}"}}
    yield {**named, "name": "process_sort_index", "args": {"sort_index": process}}
    lanes = dict.fromkeys(named.lane for named in record.ranges)
    for lane in lanes:
        yield {**named, "name": "thread_name", "tid": lane, "args": {"name": _lane_name(lane)}}
    yield from (_event(process, named, zero) for named in record.ranges)


def _lane_name(lane: int) -> str:
    if lane == HOST:
        return "training thread"
    return f"backend {lane}" if lane < STREAMS else f"stream {lane - STREAMS}"


def _event(process: int, named: NamedRange, zero: float) -> dict[str, Any]:
    label = label_of(named.name)
    return {
        "ph": "X",
        "name": named.name,
        "cat": label.part or label.kind,
        "pid": process,
        "tid": named.lane,
        "ts": (named.start - zero) * 1e6,
        "dur": named.seconds * 1e6,
        "args": {"bytes": label.bytes} if label.bytes else {},
    }
