"""The step of a pipeline across kinds of nodes: every stage as its own kind runs it, all of them simulated together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shardwise.cost.compute.flops import flops_per_token
from shardwise.cost.memory.device import DeviceMemory, memory_of_rank
from shardwise.cost.step.prediction import Prediction, RankPrediction, rank_prediction
from shardwise.cost.step.simulation import seconds_of_stages
from shardwise.cost.traffic.pipeline import message_traffic
from shardwise.cost.traffic.traffic import Role, sent_forward
from shardwise.layout.stages import placement, rank_contents, stages_of_rank
from shardwise.pipeline import stage_times
from shardwise.pipeline.steady import simulated_pipeline
from shardwise.spec.clusters import MixedCluster
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class Arrangement:
    """One strategy over all kinds: pipeline ranks go over the kinds in the order ``kinds``, other dimensions inside.

    ``job`` has the strategy of the whole pipeline; its cluster is not used.
    """

    mixed: MixedCluster
    kinds: tuple[int, ...]
    job: Job

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
        """The rank with the last stage: folded schedules end where they began."""
        return 0 if self.strategy.schedule_record.ends_meet else self.strategy.pp - 1

    def on(self, kind: int) -> Job:
        """The whole pipeline as if all devices were of one kind, for the memory of a rank."""
        return self.job.unchecked(cluster=self.mixed.kinds[kind])

    def joined(self, kind: int) -> Job:
        """The stages of one kind and as many beyond the network between kinds, for the time of a rank."""
        strategy = self.strategy.unchecked(pp=2 * self._ranks(kind))
        return self.job.unchecked(cluster=self.mixed.joined[kind], strategy=strategy)

    def alone(self, kind: int) -> Job:
        """The stages of one kind alone with their layers, for messages inside the kind."""
        ranks, counts = self.ranks_of(kind), self.strategy.stage_layers
        if isinstance(counts, tuple):
            own = sorted(stage for rank in ranks for stage in stages_of_rank(self.job, rank))
            counts = tuple(counts[stage] for stage in own)
        return self.on(kind).unchecked(strategy=self.strategy.unchecked(pp=len(ranks), stage_layers=counts))

    def with_strategy(self, **changes: object) -> Arrangement:
        return replace(self, job=self.job.unchecked(strategy=self.strategy.unchecked(**changes)))


@dataclass(frozen=True)
class KindPart:
    """One kind's part of a step: its strategy, its pipeline ranks, its fullest device."""

    kind: int
    cluster: Cluster
    strategy: Strategy
    ranks: range
    layers: tuple[int, ...]  # of each of its ranks
    memory: DeviceMemory
    idle_share: float  # of the pipeline's time


@dataclass(frozen=True)
class MixedStep:
    """A simulated step; ``ranks`` are all pipeline ranks, each priced on its kind."""

    arrangement: Arrangement
    ranks: tuple[RankPrediction, ...]
    pipeline_seconds: float

    @cached_property
    def tail_seconds(self) -> float:
        """What follows the microbatches on the slowest rank: reductions inside its kind, optimizer (`Prediction`)."""
        return max(
            Prediction(self.arrangement.joined(kind), tuple(self._of(kind)), (1,)).tail_seconds
            for kind in self.arrangement.kinds
        )

    def _of(self, kind: int) -> list[RankPrediction]:
        return [self.ranks[rank] for rank in self.arrangement.ranks_of(kind)]

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.tail_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.arrangement.job.tokens_per_step / self.step_seconds

    @property
    def seconds_per_token(self) -> float:
        return 1 / self.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model FLOPs against the peak of all devices of all kinds."""
        job = self.arrangement.job
        compute = job.training.recipe.compute
        peak = sum(kind.devices * kind.device.peak_flops(compute) for kind in self.arrangement.mixed.kinds)
        return flops_per_token(job.model, job.training.seq) * self.tokens_per_second / peak

    @cached_property
    def parts(self) -> tuple[KindPart, ...]:
        """What each kind does, in the order of the pipeline."""
        return tuple(self._part(kind) for kind in self.arrangement.kinds)

    def _part(self, kind: int) -> KindPart:
        own, ranks = self.arrangement, self.arrangement.ranks_of(kind)
        counts = stage_layer_counts(own.job.model, own.strategy)
        layers = tuple(sum(counts[stage] for stage in stages_of_rank(own.job, rank)) for rank in ranks)
        cluster, strategy = own.mixed.kinds[kind], own.alone(kind).strategy
        busy = sum(rank.microbatches * rank.microbatch_seconds for rank in self._of(kind)) / len(ranks)
        idle = max(0.0, 1 - busy / self.pipeline_seconds)
        return KindPart(kind, cluster, strategy, ranks, layers, self.memory(kind), idle)

    def memory(self, kind: int) -> DeviceMemory:
        """The fullest device of a kind."""
        job = self.arrangement.on(kind)
        memories = (memory_of_rank(job, rank) for rank in self.arrangement.ranks_of(kind))
        return max(memories, key=lambda memory: memory.total)


def mixed_step(arrangement: Arrangement) -> MixedStep:
    """Simulates an arrangement whose strategy specifies the layers of every stage."""
    job, strategy = arrangement.job, arrangement.strategy
    ranks = _rank_predictions(arrangement)
    passes = [(0.0, 0.0, 0.0)] * strategy.stages
    for number, (kind, rank) in enumerate(zip(arrangement.kind_of_rank, ranks)):
        stages = stages_of_rank(job, number)
        for stage, own in zip(stages, seconds_of_stages(arrangement.on(kind), rank, stages)):
            passes[stage] = own
    seconds, _ = simulated_pipeline(
        strategy.schedule,
        strategy.pp,
        job.microbatches,
        strategy.chunks_per_rank,
        stage_times(*zip(*passes)),
        message_seconds(arrangement),
    )
    return MixedStep(arrangement, ranks, seconds)


def _rank_predictions(arrangement: Arrangement) -> tuple[RankPrediction, ...]:
    known: dict[object, RankPrediction] = {}
    ranks = []
    for number, kind in enumerate(arrangement.kind_of_rank):
        contents = rank_contents(arrangement.on(kind), number)
        key = (kind, replace(contents, rank=0))
        if key not in known:
            known[key] = rank_prediction(arrangement.joined(kind), contents)
        ranks.append(known[key])
    return tuple(ranks)


def message_seconds(arrangement: Arrangement) -> list[float]:
    """One message across every stage boundary: inside a kind over its network, else over the one between kinds."""
    job, kinds = arrangement.job, arrangement.kind_of_rank
    inside = {kind: _message(arrangement.alone(kind)) for kind in arrangement.kinds}
    between = max(_message(arrangement.joined(kind)) for kind in arrangement.kinds)
    along = [kinds[rank] for rank in placement(job)]
    return [inside[sender] if sender == receiver else between for sender, receiver in pairwise(along)]


def _message(job: Job) -> float:
    message = message_traffic(job, sent_forward(Role.ACTIVATIONS))
    return 0.0 if message is None else float(message.cost.seconds)
