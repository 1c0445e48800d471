"""The predicted step of a job: compute by operators, communication as priced, what hides under what, the pipeline.

From the passes of the pipeline's ranks to the step there is one rule for numbers (a job) and columns (a table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.collectives.arrays import select
from shardwise.cost.compute.flops import flops_per_token
from shardwise.cost.memory.states import sharding_of
from shardwise.cost.step.stage_time import StageSeconds, optimizer_seconds, stage_seconds
from shardwise.cost.traffic.execution import executed, step_traffic
from shardwise.cost.traffic.overlap import ComputeWindows, OverlappedTransfer
from shardwise.cost.traffic.traffic import Traffic, with_exposed_seconds
from shardwise.layout.stages import RankContents, rank_kinds
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.spec.job import Job


@dataclass(frozen=True)
class Passes:
    """Seconds of one microbatch on one kind of pipeline rank."""

    forward: Any
    input_gradient: Any
    weight_gradient: Any

    @property
    def total(self) -> Any:
        return self.forward + self.input_gradient + self.weight_gradient


def passes_with_exposed(
    compute: Passes, transfers: Sequence[OverlappedTransfer], hidden: Sequence[Any], microbatches: Any
) -> Passes:
    """Computation, and what the layers' communication adds to it: exposed seconds, and compute units it takes.

    Of the forward traffic, what recompute sends again falls into the backward pass.
    """
    in_forward = in_backward = 0.0
    for transfer, under in zip(transfers, hidden):
        added = transfer.seconds - under + transfer.units_taken * under
        if transfer.in_pass == "backward":
            in_backward = in_backward + added
            continue
        again = added * transfer.repeated
        in_forward, in_backward = in_forward + (added - again), in_backward + again
    return Passes(
        compute.forward + in_forward / microbatches,
        compute.input_gradient + in_backward / microbatches,
        compute.weight_gradient,
    )


def slowest_and_others(ranks: Sequence[Passes], counts: Sequence[int]) -> tuple[Passes, Passes]:
    """The slowest rank's passes, and the mean of all other ranks'."""
    slowest = ranks[0]
    for rank in ranks[1:]:
        slower = rank.total > slowest.total
        slowest = Passes(
            select(slower, rank.forward, slowest.forward),
            select(slower, rank.input_gradient, slowest.input_gradient),
            select(slower, rank.weight_gradient, slowest.weight_gradient),
        )
    others = sum(counts) - 1

    def mean(name: str) -> Any:
        total = sum(count * getattr(rank, name) for rank, count in zip(ranks, counts))
        return (total - getattr(slowest, name)) / others if others else 0.0

    return slowest, Passes(mean("forward"), mean("input_gradient"), mean("weight_gradient"))


def pipeline_bubble(
    schedule: str, pp: int, microbatches: Any, chunks: int, others: Passes, message_seconds: Any
) -> Any:
    """Idle seconds that the schedule adds to the slowest rank's work, over the other ranks' stages."""
    if pp == 1:
        return 0.0
    return idle_seconds(
        schedule,
        pp,
        microbatches,
        chunks,
        others.forward / chunks,
        others.input_gradient / chunks,
        others.weight_gradient / chunks,
        message_seconds,
    )


_PER_STEP = ("dp", "offload")


@dataclass(frozen=True)
class RankPrediction:
    """One kind of pipeline rank: what it computes and sends."""

    contents: RankContents
    compute: StageSeconds
    traffics: tuple[Traffic, ...]
    microbatches: int

    def exposed(self, dimension: str) -> float:
        """Seconds of a dimension that the step waits for; hidden transfers slow what they hide under."""
        return sum(traffic.added_seconds for traffic in self.traffics if traffic.dimension == dimension)

    @cached_property
    def passes(self) -> Passes:
        """Seconds of one microbatch, exposed communication of its layers included."""
        layers = [traffic for traffic in self.traffics if traffic.in_layer]
        return passes_with_exposed(
            Passes(self.compute.forward, self.compute.input_gradient, self.compute.weight_gradient),
            [traffic.transfer for traffic in layers],
            [traffic.under_compute_seconds for traffic in layers],
            self.microbatches,
        )

    @property
    def forward(self) -> float:
        return float(self.passes.forward)

    @property
    def input_gradient(self) -> float:
        return float(self.passes.input_gradient)

    @property
    def weight_gradient(self) -> float:
        return float(self.passes.weight_gradient)

    @property
    def once_seconds(self) -> float:
        """What is sent once after the last microbatch: gradients that both ends or all tensor ranks hold."""
        return sum(traffic.exposed_seconds for traffic in self.traffics if traffic.once)

    @property
    def microbatch_seconds(self) -> float:
        return float(self.passes.total)

    @property
    def message_seconds(self) -> float:
        """One message to a neighbouring stage."""
        messages = [t for t in self.traffics if t.dimension == "pp" and t.fixed_exposed_seconds is not None]
        return max((float(traffic.cost.seconds) for traffic in messages), default=0.0)


@dataclass(frozen=True)
class Prediction:
    """A predicted step and its parts."""

    job: Job
    ranks: tuple[RankPrediction, ...]  # one of every kind
    counts: tuple[int, ...]  # pipeline ranks of each kind

    @property
    def slowest(self) -> RankPrediction:
        return max(self.ranks, key=lambda rank: rank.microbatch_seconds)

    @property
    def pipeline_seconds(self) -> float:
        """All microbatches through the slowest stage, plus the schedule's idle time over the other stages."""
        return self.job.microbatches * self.slowest.microbatch_seconds + self.bubble_seconds

    @cached_property
    def bubble_seconds(self) -> float:
        return self.bubble_with(self.slowest.message_seconds)

    def bubble_with(self, message_seconds: float) -> float:
        """The schedule's idle seconds if one message took so long."""
        strategy = self.job.strategy
        _, others = slowest_and_others([rank.passes for rank in self.ranks], self.counts)
        chunks, m = strategy.chunks_per_rank, self.job.microbatches
        return float(pipeline_bubble(strategy.schedule, strategy.pp, m, chunks, others, message_seconds))

    @cached_property
    def last(self) -> RankPrediction:
        """The rank that takes longest for what comes once a step."""
        return max(self.ranks, key=self._once_a_step)

    @property
    def tail_seconds(self) -> float:
        """What follows or precedes the microbatches: exposed reductions and gathers, optimizer, step overhead."""
        return self._once_a_step(self.last)

    def _once_a_step(self, rank: RankPrediction) -> float:
        update = float(optimizer_seconds(self.job, rank.contents, sharding_of(self.job.strategy)))
        return sum(rank.exposed(name) for name in _PER_STEP) + rank.once_seconds + update

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.tail_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, causal attention counted once, recomputed FLOPs not counted."""
        device = self.job.cluster.device
        peak = self.job.cluster.devices * device.peak_flops(self.job.training.recipe.compute)
        flops = flops_per_token(self.job.model, self.job.training.seq) * self.job.tokens_per_step
        return flops / (self.step_seconds * peak)


def predict(job: Job) -> Prediction:
    """The step of ``job`` as its stack and its cluster are described."""
    kinds = rank_kinds(job, range(job.strategy.pp))
    ranks = tuple(rank_prediction(job, contents) for contents in kinds)
    return Prediction(job, ranks, tuple(len(members) for members in kinds.values()))


def rank_prediction(job: Job, contents: RankContents) -> RankPrediction:
    """What a pipeline rank with these contents computes and sends."""
    compute, m = stage_seconds(job, contents), job.microbatches
    windows = ComputeWindows(
        m * compute.forward,
        m * compute.backward,
        m * compute.attention.forward,
        m * compute.attention.backward,
    )
    traffics = with_exposed_seconds([executed(job, t) for t in step_traffic(job, contents)], windows)
    return RankPrediction(contents, compute, tuple(traffics), m)
