"""The request and the result of a dry run, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.cost.memory.device import DeviceMemory, device_memories, memory_of_rank
from shardwise.cost.memory.room import room_of
from shardwise.layout.groups import rank_at
from shardwise.layout.views import seen_by
from shardwise.spec.clusters import mixed_kinds
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

# -- the request -------------------------------------------------------------------------------------


def require_equal_stages(job: Job) -> None:
    """Raises SpecError for unlike stages, where what a rank sends depends on the degrees of the next stage."""
    if job.strategy.has_unlike_stages:
        problem = "a dry run traces a rank among stages of equal degrees"
        raise SpecError("strategy.stage_tp" if job.strategy.stage_tp else "strategy.stage_dp", problem,
                        "`shardwise analyze` prices these, `shardwise verify` runs them")  # fmt: skip


def resized(job: Job, world: int) -> Job:
    """The same job on ``world`` ranks: data parallelism fills what the other dimensions leave."""
    strategy = job.strategy
    others = strategy.world // strategy.data_parallel
    if world % others:
        low = world // others * others
        raise SpecError(
            "⟨world⟩",
            f"{world} is not a multiple of tp {strategy.tp} × cp {strategy.cp} × pp {strategy.pp} = {others}",
            f"use {low} or {low + others}" if low else f"use {others}",
        )
    cluster = job.cluster.with_devices(world)
    return replace(job, cluster=cluster, strategy=replace(strategy, dp=world // others))


def fullest_rank(job: Job) -> int:
    """The first rank of the stage with the highest planned memory; among unlike replicas, of the fullest one."""
    strategy = job.strategy
    if strategy.dp_shares is None and mixed_kinds(job.cluster) is None:
        fullest = max(device_memories(job), key=lambda memory: memory.total)
        return rank_at(strategy, {"pp": fullest.pipeline_rank})
    first: dict[tuple[int, Job], int] = {}  # the first of ranks that are alike
    for stage in range(strategy.pp):
        for replica in range(strategy.data_parallel):
            rank = rank_at(strategy, {"pp": stage, "dp": replica})
            first.setdefault((stage, seen_by(job, rank)), rank)
    return first[max(first, key=lambda alike: memory_of_rank(alike[1], alike[0]).total)]


def check_rank(job: Job, rank: int) -> int:
    if not 0 <= rank < job.strategy.world:
        raise SpecError("⟨rank⟩", f"{rank} is not one of the job's {job.strategy.world} ranks", "count from 0")
    return rank


# -- the result --------------------------------------------------------------------------------------

RECEIVE = "receive"  # the other half of a message; beside the kinds of `CollectiveKind`
TOLERANCE = 0.02
PARTS = tuple(part for part in DeviceMemory.PARTS if part != "allowance")  # tensors only
Bytes = dict[str, float]  # by part


@dataclass(frozen=True)
class TracedCollective:
    """Collectives of one kind and name over the same number of ranks."""

    dimension: str
    kind: str  # one of `CollectiveKind`, or `RECEIVE`
    name: str  # the engine's own, with its dimension
    ranks: int
    peer: int | None = None  # the other rank of messages
    what: str = ""  # the name without its dimension


@dataclass(frozen=True)
class Calls:
    """How often a kind of collective is called in a step, and its total bytes, as the cost model counts them."""

    line: TracedCollective
    count: float
    bytes: float


@dataclass(frozen=True)
class Holder:
    """Several tensors of equal size that an operator allocated at one place of the step."""

    part: str
    operator: str
    made_in: str
    bytes: int  # of each
    number: int


@dataclass(frozen=True)
class Compared:
    """A quantity as planned and as traced; ``negligible`` if it is too small to matter."""

    what: str
    planned: float
    traced: float
    negligible: bool = False
    unit: Literal["bytes", "FLOPs"] = "bytes"

    @property
    def difference(self) -> float:
        """Traced over planned, less one."""
        if self.planned == self.traced:
            return 0.0
        return self.traced / self.planned - 1 if self.planned else float("inf")

    @property
    def defect(self) -> bool:
        """Whether engine and planner disagree: one of them is wrong."""
        return not self.negligible and abs(self.difference) > TOLERANCE


@dataclass(frozen=True)
class DryRun:
    """One step of one rank, as traced and as planned."""

    job: Job
    rank: int
    coordinates: Mapping[str, int]
    peak: Bytes
    peak_place: str  # where in the step the peak is
    planned_peak: Bytes
    calls: tuple[Calls, ...]
    flops: Mapping[str, float]
    planned_flops: Mapping[str, float]
    compared: tuple[Compared, ...]
    holders: tuple[Holder, ...]  # the tensors at the peak, in the largest trace
    traced: str  # what was traced, from which the rest is extrapolated
    seconds: float

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak.values())

    @property
    def planned_peak_bytes(self) -> float:
        """Without the allowance for the framework."""
        return sum(self.planned_peak.values())

    @property
    def needed_bytes(self) -> float:
        """What was traced, with the allowance for the framework."""
        return self.peak_bytes + self.job.cluster.device.framework_memory

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= room_of(self.job).usable_bytes

    @property
    def defects(self) -> tuple[Compared, ...]:
        return tuple(line for line in self.compared if line.defect)
