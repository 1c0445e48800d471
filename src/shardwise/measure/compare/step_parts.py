"""Where the time of a step went, and where the planner expects it to go, in the same parts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwise.collectives import CollectiveKind
from shardwise.cost.step.simulation import step_parts
from shardwise.cost.traffic.traffic import collective_price
from shardwise.engine.labels import label_of
from shardwise.layout.groups import coordinate, expert_runs, group_runs, node_of
from shardwise.layout.network import network, spanned
from shardwise.layout.views import is_unlike, replicas_by_kind, timed_on
from shardwise.measure.compare.recorded import Exchange, Step, device_steps, exchanges_of, steps_of
from shardwise.planner.candidate import Candidate, candidate
from shardwise.run.records import NamedRange, RankRecord
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

# -- measured ----------------------------------------------------------------------------------------

BUBBLE, LATE = "bubble", "late ranks"
WAITS = (BUBBLE, LATE)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a step on one rank, as means over the profiled steps."""

    rank: int
    node: int
    step_seconds: float
    parts: dict[str, float]  # these add up to the step
    hidden: dict[str, float]  # by dimension: communication during computation
    layers: dict[int, float]  # the forward pass of every layer, without communication

    @property
    def waits(self) -> float:
        """Seconds of waiting for other ranks."""
        return sum(self.parts.get(name, 0.0) for name in WAITS)

    @property
    def layer_seconds(self) -> float | None:
        """The mean over the layers of this rank."""
        return statistics.fmean(self.layers.values()) if self.layers else None


@dataclass(frozen=True)
class Measured:
    """The same steps as recorded by all ranks."""

    records: tuple[RankRecord, ...]
    steps: tuple[tuple[Step, ...], ...]  # of every rank
    exchanges: tuple[Exchange, ...]
    ranks: tuple[RankTimes, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(step.number for step in self.steps[0])

    @property
    def busiest(self) -> RankTimes:
        """The rank that waits least for others, and so the one they wait for."""
        return min(self.ranks, key=lambda rank: rank.waits)

    @property
    def step_seconds(self) -> float:
        return self.busiest.step_seconds


def measured(records: Sequence[RankRecord], *, pipelined: bool) -> Measured:
    """With ``pipelined``, waiting for others may be part of the schedule."""
    steps = tuple(device_steps(record) if record.device == "cuda" else steps_of(record) for record in records)
    if not steps[0] or any([step.number for step in own] != [step.number for step in steps[0]] for own in steps):
        raise SpecError("profile", "the ranks did not record the same steps", "profile the run again")
    exchanges = exchanges_of(records, steps)
    ranks = tuple(_times(record, own, exchanges, pipelined) for record, own in zip(records, steps))
    return Measured(tuple(records), steps, exchanges, ranks)


def _times(record: RankRecord, steps: Sequence[Step], exchanges: Sequence[Exchange], pipelined: bool) -> RankTimes:
    parts: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    for step in steps:
        for segment in step.segments:
            parts[segment.part] += segment.seconds
        for part, seconds in _hidden(step).items():
            hidden[part] += seconds
    for exchange in exchanges:
        waited = exchange.waited_for_others(record.rank)
        if waited:
            part = "ep" if exchange.dimension == "expert_tp" else exchange.dimension
            waited = min(waited, parts[part])
            parts[part] -= waited
            parts[BUBBLE if pipelined and part in ("pp", "world") else LATE] += waited
    parts["optimizer"] += parts.pop("world", 0.0)  # the all-reduce of the norm, without waiting
    count = len(steps)
    return RankTimes(
        record.rank,
        record.node,
        sum(step.seconds for step in steps) / count,
        {part: seconds / count for part, seconds in parts.items() if seconds > 0},
        {part: seconds / count for part, seconds in hidden.items() if seconds > 0},
        layers_of(steps),
    )


def _hidden(step: Step) -> dict[str, float]:
    """Seconds that the backend worked for each dimension while the host was not blocked on it."""
    hidden: dict[str, float] = defaultdict(float)
    begun = [
        (named.start, label.part) for named in step.ranges if (label := label_of(named.name)).kind in ("begin", "wait")
    ]
    for work in step.backend:
        if label_of(work.name).ends_when_waited:
            continue
        part = next((part for start, part in reversed(begun) if start <= work.start), None)
        if part is not None and part != "world":
            blocked = [segment for segment in step.segments_in(work) if segment.part == part]
            exposed = sum(min(segment.end, work.end) - max(segment.start, work.start) for segment in blocked)
            hidden[part] += work.seconds - exposed
    return hidden


def layers_of(steps: Sequence[Step]) -> dict[int, float]:
    """The mean forward pass of each layer; a median would miss a rank that is slow in some passes only."""
    each: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        passes: dict[NamedRange, float] = defaultdict(float)
        for segment in step.segments:
            if segment.layer is not None and segment.part == "compute":
                passes[segment.layer] += segment.seconds
        for layer, seconds in passes.items():
            each[label_of(layer.name).number].append(seconds)
    return {layer: statistics.fmean(seconds) for layer, seconds in sorted(each.items())}


# -- predicted ---------------------------------------------------------------------------------------

_DIMENSIONS = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": ("cp", "dp"), "world": ("tp", "cp", "dp", "pp")}


@dataclass(frozen=True)
class Predicted:
    """``parts`` add up to the step; ``hidden`` as in `RankTimes`."""

    price: Candidate
    parts: dict[str, float]
    hidden: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return self.price.step_seconds


def predicted(job: Job) -> Predicted:
    price = candidate(job)
    parts = dict(price.parts)
    parts["compute"] += parts.pop("recompute")
    parts[LATE] = parts.pop("stragglers")
    messages = step_parts(price)["pp"]
    parts["pp"], parts["bubble"] = messages, parts["bubble"] - messages
    hidden: dict[str, float] = defaultdict(float)
    for traffic in price.prediction.slowest.traffics:
        hidden[traffic.dimension] += traffic.hidden_seconds
    return Predicted(price, parts, dict(hidden))


def exchange_seconds(job: Job, exchange: Exchange) -> float | None:
    """The price of one collective or message; None if it is not priced alone."""
    kind = exchange.label.collective
    if kind is None:
        return None
    if kind is CollectiveKind.SEND_RECV:
        return _message(job, exchange)
    unlike = is_unlike(job) and not replicas_by_kind(job)
    own = timed_on(job, coordinate(job.strategy, "pp", exchange.members[0])) if unlike else job
    strategy = own.strategy
    runs = (
        expert_runs(strategy)
        if exchange.dimension == "ep"
        else group_runs(strategy, _DIMENSIONS.get(exchange.dimension, ()))
    )
    topology = spanned(own.cluster, runs, "strategy")
    if topology is None or prod(level.size for level in topology.levels) != len(exchange.members):
        return None
    size = exchange.bytes * (len(exchange.members) if kind is CollectiveKind.ALL_GATHER else 1)
    return float(collective_price(kind, float(size), topology, strategy.collective).seconds)


def _message(job: Job, exchange: Exchange) -> float:
    """Over the innermost level that both ranks share."""
    inside = 1
    for level in (levels := network(job.cluster).levels):
        inside *= level.size
        if node_of(exchange.members[0], inside) == node_of(exchange.members[-1], inside):
            break
    else:
        level = levels[-1]
    return float(level.latency + level.startup + exchange.bytes / (level.bandwidth * level.efficiency))
