"""A strategy on several kinds of nodes, and its step: each rank priced on its own kind, all simulated together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.cost.memory.device import DeviceMemory, memory_of_rank
from shardwise.cost.step.prediction import RankPrediction, predict
from shardwise.cost.step.simulation import rank_predictions
from shardwise.layout.stages import stages_of_rank
from shardwise.layout.views import held_by, replicas_by_kind
from shardwise.planner.candidate import Candidate, candidate
from shardwise.spec.clusters import MixedCluster
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.kinds import across_kinds
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class Arrangement:
    """A strategy over all kinds: the pipeline runs across them, every other dimension inside one kind."""

    mixed: MixedCluster
    kinds: tuple[int, ...]
    """The kinds in the order of the pipeline ranks."""
    job: Job
    """Has the strategy of the whole pipeline; its cluster is not used."""

    @property
    def strategy(self) -> Strategy:
        return self.job.strategy

    def ranks_of(self, kind: int) -> range:
        first = sum(self._ranks(other) for other in self.kinds[: self.kinds.index(kind)])
        return range(first, first + self._ranks(kind))

    def _ranks(self, kind: int) -> int:
        return self.mixed.kinds[kind].devices * self.strategy.pp // self.strategy.world

    @cached_property
    def kind_of_rank(self) -> tuple[int, ...]:
        return tuple(kind for kind in self.kinds for _ in self.ranks_of(kind))

    @property
    def head_rank(self) -> int:
        """The rank with the last stage; folded schedules end on the first rank."""
        return 0 if self.strategy.schedule_record.ends_meet else self.strategy.pp - 1

    def on(self, kind: int) -> Job:
        """The whole pipeline as if all devices were of ``kind``, for the memory of a rank."""
        return self.job.unchecked(cluster=self.mixed.kinds[kind])

    def timing_job(self, kind: int) -> Job:
        """The stages of ``kind``, and as many beyond the network between kinds, for the time of a rank."""
        strategy = self.strategy.unchecked(pp=2 * self._ranks(kind))
        return self.job.unchecked(cluster=self.mixed.joined[kind], strategy=strategy)

    @property
    def ordered(self) -> MixedCluster:
        """The kinds in the order of the ranks."""
        return replace(self.mixed, kinds=tuple(self.mixed.kinds[kind] for kind in self.kinds))

    def whole_job(self) -> Job:
        """The job to run, checked, as a job file holds it."""
        return replace(self.unchecked_job(), strategy=replace(self.strategy))

    def unchecked_job(self) -> Job:
        """The same job without checks, to be priced only."""
        return self.job.unchecked(cluster=self.ordered.as_one)

    def with_strategy(self, **changes: object) -> Arrangement:
        return replace(self, job=self.job.unchecked(strategy=self.strategy.unchecked(**changes)))


@dataclass(frozen=True)
class KindPart:
    """One kind's part of a step."""

    kind: int
    cluster: Cluster
    strategy: Strategy
    ranks: range
    """Its pipeline ranks."""
    layers: tuple[int, ...]
    """Of each of its ranks."""
    memory: DeviceMemory
    """Of its fullest device."""
    idle_share: float
    """Of the pipeline's time."""
    batch_share: float = 1.0
    """Of the sequences that it sees."""


@dataclass(frozen=True)
class MixedStep:
    """A strategy on several kinds of nodes, priced as the job that runs it."""

    arrangement: Arrangement
    price: Candidate

    @property
    def job(self) -> Job:
        """The job to run, checked."""
        return self.arrangement.whole_job()

    @property
    def ranks(self) -> tuple[RankPrediction, ...]:
        """All pipeline ranks, each priced on its kind; if replicas are of different kinds, those of the slowest."""
        return tuple(rank_predictions(self.price.prediction))

    @property
    def step_seconds(self) -> float:
        return self.price.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.price.tokens_per_second

    @property
    def seconds_per_token(self) -> float:
        return self.price.seconds_per_token

    @property
    def mfu(self) -> float:
        """Model FLOPs against the peak of all devices of all kinds."""
        return self.price.mfu

    @cached_property
    def parts(self) -> tuple[KindPart, ...]:
        """What each kind does, in the order of the ranks."""
        return tuple(self._part(place) for place in range(len(self.arrangement.kinds)))

    def _part(self, place: int) -> KindPart:
        job, across = self.price.job, across_kinds(self.arrangement.ordered, self.price.job.strategy)
        members, counts = across.members(place), stage_layer_counts(job.model, job.strategy)
        ranks = range(members[0], members[-1] + 1) if across.dimension == "pp" else range(job.strategy.pp)
        layers = tuple(sum(counts[stage] for stage in stages_of_rank(job, rank)) for rank in ranks)
        kind, share = self.arrangement.kinds[place], 1.0
        if across.dimension == "dp":
            share = sum(len(job.rows_of(member)) for member in members) / job.sequences
        own = sorted(stage for rank in ranks for stage in stages_of_rank(job, rank))
        changes: dict[str, object] = {"pp": len(ranks), "stage_layers": tuple(counts[stage] for stage in own)}
        if across.dimension == "dp":
            changes |= {"dp": len(members), "dp_shares": None}
        return KindPart(
            kind, self.arrangement.mixed.kinds[kind], job.of_stage(ranks[0]).strategy.unchecked(**changes), ranks,
            layers, self.memory(kind), self._idle(place, ranks), share,
        )  # fmt: skip

    def memory(self, kind: int) -> DeviceMemory:
        """The fullest device of a kind."""
        job, place = self.price.job, self.arrangement.kinds.index(kind)
        across = across_kinds(self.arrangement.ordered, job.strategy)
        if across.dimension == "pp":
            memories = [memory_of_rank(job, rank) for rank in across.members(place)]
        else:
            memories = [memory_of_rank(held_by(job, rank)[place], rank) for rank in range(job.strategy.pp)]
        return max(memories, key=lambda memory: memory.total)

    def _idle(self, place: int, ranks: range) -> float:
        """The share of the pipeline's time in which devices of a kind wait."""
        replicas = replicas_by_kind(self.price.job)
        of_ranks = predict(replicas[place]).ranks if replicas else [self.ranks[rank] for rank in ranks]
        busy = sum(rank.microbatches * rank.microbatch_seconds for rank in of_ranks) / len(of_ranks)
        return max(0.0, 1 - busy / self.price.pipeline_seconds)


def mixed_step(arrangement: Arrangement) -> MixedStep:
    """Simulates an arrangement whose strategy specifies the layers of every stage."""
    return MixedStep(arrangement, candidate(arrangement.unchecked_job()))
