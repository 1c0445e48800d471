"""A run against its prediction: every part of the step and of the memory, the largest differences with their causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cost.memory.device import DeviceMemory, memory_of_rank
from shardwise.engine.labels import DIMENSIONS
from shardwise.layout.ranks import coordinate
from shardwise.measure.compare.causes import Evidence, cause_of
from shardwise.measure.compare.flights import SentBytes, sent_bytes, unlike
from shardwise.measure.compare.links import SlowLink, links_of, slow_link
from shardwise.measure.compare.measured import BUBBLE, LATE, Measured
from shardwise.measure.compare.predicted import Predicted, predicted
from shardwise.measure.compare.run import ProfiledRun
from shardwise.measure.compare.stragglers import rank_slowness, straggler
from shardwise.spec.job import Job
from shardwise.training.metrics.lines import read_lines, summarise

PARTS = ("compute", *DIMENSIONS, "offload", BUBBLE, LATE, "optimizer", "data", "checkpoint", "host")
WORTH = 0.02  # of the step: a smaller difference is not explained


@dataclass(frozen=True)
class Part:
    """Seconds of a step. What is hidden takes none of it; None if that is not known."""

    name: str
    predicted: float
    measured: float
    hidden_predicted: float | None = None
    hidden_measured: float | None = None

    @property
    def difference(self) -> float:
        return self.measured - self.predicted


@dataclass(frozen=True)
class MemoryPart:
    name: str
    predicted_bytes: float
    measured_bytes: float


@dataclass(frozen=True)
class Difference:
    part: Part
    cause: str


@dataclass(frozen=True)
class Comparison:
    """``usual_seconds``: what steps took that were not profiled; ``slowness`` of ranks, of the usual one's time."""

    job: Job
    found: Measured
    predicted: Predicted
    parts: tuple[Part, ...]
    memory: tuple[MemoryPart, ...]
    differences: tuple[Difference, ...]  # the largest first
    usual_seconds: float | None
    slowness: tuple[float, ...] | None
    slow_rank: int | None
    slow_link: SlowLink | None
    sent: tuple[SentBytes, ...] = ()  # of the rank whose step is shown
    unlike: str | None = None  # ranks that did not begin the same collectives
    missing_steps: str = ""  # of which the run's metrics have no line


def compare(run: ProfiledRun) -> Comparison:
    job, found, expected = run.job, run.measured, predicted(run.job)
    busiest = found.busiest
    parts = tuple(
        Part(name, expected.parts.get(name, 0.0), busiest.parts.get(name, 0.0), *_hidden(name, expected, found))
        for name in PARTS
        if expected.parts.get(name) or busiest.parts.get(name)
    )
    slowness = rank_slowness(job.model, found)
    slow_rank = straggler(slowness)
    fastest = min(one.parts.get("compute", 0.0) for one in found.ranks)
    ratio = fastest / expected.parts["compute"] if expected.parts["compute"] else 1.0
    slow = slow_link(links_of(job, found), found.step_seconds, ratio)
    slowest = 1.0 if slow_rank is None or slowness is None else slowness[slow_rank]
    differences = [
        Difference(part, cause_of(Evidence(part.name, part.predicted, part.measured, slow_rank, slowest, slow)))
        for part in parts
        if abs(part.difference) >= WORTH * found.step_seconds
    ]
    differences.sort(key=lambda one: -abs(one.part.difference))
    lines = list(read_lines(run.folder.metrics))
    asked = job.run.profile
    plain = [one for one in lines if asked is None or not asked.first <= one["step"] <= asked.last]
    return Comparison(
        job, found, expected, parts, _memory(job, found, lines), tuple(differences),
        summarise(plain).step_seconds, slowness, slow_rank, slow,
        sent_bytes(job, found.records[busiest.rank], len(found.numbers)), unlike(found.records),
        summarise(lines).missing_steps,
    )  # fmt: skip


def _hidden(name: str, expected: Predicted, found: Measured) -> tuple[float | None, float | None]:
    """Unknown for pipeline messages: nobody sees how long one was in flight."""
    if name not in DIMENSIONS:
        return None, None
    return expected.hidden.get(name, 0.0), None if name == "pp" else found.busiest.hidden.get(name, 0.0)


def _memory(job: Job, found: Measured, lines: list[dict[str, object]]) -> tuple[MemoryPart, ...]:
    """Of the fullest rank; where no step was counted, of what rank 0 holds between steps."""
    counted = [one["memory_bytes_of_ranks"] for one in lines if isinstance(one.get("memory_bytes_of_ranks"), list)]
    peaks: list[int] = counted[-1] if counted else []  # type: ignore[assignment]
    rank = peaks.index(max(peaks)) if peaks else 0
    expected = memory_of_rank(job, coordinate(job.strategy, "pp", rank))
    parts = _states(job, expected, found.records[rank].memory)
    if peaks:
        held = sum(one.measured_bytes for one in parts)
        priced = sum(one.predicted_bytes for one in parts)
        whole = _tensors(expected)
        parts.append(MemoryPart("all else at the peak", whole - priced, peaks[rank] - held))
        parts.append(MemoryPart(f"peak of rank {rank}", whole, peaks[rank]))
    return tuple(parts)


def _states(job: Job, expected: DeviceMemory, held: Mapping[str, int]) -> list[MemoryPart]:
    """Between two steps. ZeRO-1 and 2 hold a shard of the weights then, which is the optimizer's own copy of them."""
    if job.strategy.zero in (1, 2):
        return [MemoryPart("optimizer and its weights", expected.optimizer, sum(held.values()))]
    return [MemoryPart(name, getattr(expected, name), held[name]) for name in ("weights", "optimizer")]


def _tensors(memory: DeviceMemory) -> float:
    """Memory of the framework besides tensors is not measured."""
    return memory.total - memory.allowance
