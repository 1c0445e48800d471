"""A run against its prediction: every part of the step and of memory, and likely causes of the largest differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwise.cost.memory.device import DeviceMemory, memory_of_rank
from shardwise.engine.labels import DIMENSIONS
from shardwise.layout.mesh import mesh_divisions
from shardwise.layout.ranks import coordinate
from shardwise.measure.compare.exchanges import SentBytes, mismatch, sent_bytes
from shardwise.measure.compare.step_parts import BUBBLE, LATE, Measured, Predicted, measured, predicted
from shardwise.measure.compare.stragglers import SlowLink, links_of, rank_slowness, same_work, slow_link, straggler
from shardwise.run.checkpoint.folder import RunFolder, run_folder
from shardwise.run.metrics.lines import read_lines, summarise
from shardwise.run.profile import read_records
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job

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
        raise SpecError(str(folder.profile), problem, "profile it again: --profile steps=10:12")
    return ProfiledRun(folder, job, measured(records, pipelined=job.strategy.pp > 1))


# -- likely causes of a part of a step differing from its price --------------------------------------

PARTS = ("compute", *DIMENSIONS, "offload", BUBBLE, LATE, "optimizer", "data", "checkpoint", "host")
WORTH = 0.02  # of the step: a smaller difference is not explained


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
    """What is known about a part that differs."""

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
    """A profiled run beside its prediction."""

    job: Job
    found: Measured
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
