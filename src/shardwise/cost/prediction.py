"""The predicted step of a job: compute by operators, communication as priced, what hides under what, the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.cost.communication import step_traffic
from shardwise.cost.flops import flops_per_token
from shardwise.cost.stage_time import StageSeconds, optimizer_seconds, stage_seconds
from shardwise.cost.stages import RankContents, fully_recomputed_share, rank_kinds
from shardwise.cost.traffic import IN_LAYER, ComputeWindows, Traffic, with_exposed_seconds
from shardwise.pipeline import bubble_seconds as idle_seconds
from shardwise.spec.job import Job

# Async TP cuts products into pieces that run less well: TorchTitan prints a gain of 10% with it, as if this share of
# the communication stayed exposed (torchtitan benchmarks/asyncTP_llama3_h100_2025-06).
_DECOMPOSED_EXPOSED = 0.85
_PER_STEP = ("dp", "offload")


@dataclass(frozen=True)
class RankPrediction:
    """One kind of pipeline rank: what it computes and sends."""

    contents: RankContents
    compute: StageSeconds
    traffics: tuple[Traffic, ...]
    microbatches: int
    communication_share: float
    recomputed_share: float

    def exposed(self, dimension: str) -> float:
        """Seconds of a dimension that the step waits for; hidden transfers slow what they hide under."""
        own = [traffic for traffic in self.traffics if traffic.dimension == dimension]
        hidden = sum(traffic.hidden_seconds for traffic in own if traffic.window != "none")
        return sum(traffic.exposed_seconds for traffic in own) + self.communication_share * hidden

    def _exposed_part(self, phase: str) -> float:
        """Exposed seconds of one microbatch in the forward or backward pass."""
        total = 0.0
        for traffic in self.traffics:
            if traffic.dimension not in IN_LAYER:
                continue
            slowed = self.communication_share * traffic.hidden_seconds if traffic.window != "none" else 0.0
            # Of the forward traffic, what recompute sends again falls into the backward pass.
            in_forward = 1 / (1 + self.recomputed_share) if traffic.in_pass == "forward" else 0.0
            share = in_forward if phase == "forward" else 1 - in_forward
            total += share * (traffic.exposed_seconds + slowed)
        return total / self.microbatches

    @property
    def forward(self) -> float:
        return self.compute.forward + self._exposed_part("forward")

    @property
    def input_gradient(self) -> float:
        return self.compute.input_gradient + self._exposed_part("backward")

    @property
    def weight_gradient(self) -> float:
        return self.compute.weight_gradient

    @property
    def between_ends(self) -> float:
        """Pipeline traffic that no schedule places: gradients of an embedding that both ends hold."""
        own = (t for t in self.traffics if t.dimension == "pp" and t.fixed_exposed_seconds is None)
        return sum(traffic.exposed_seconds for traffic in own)

    @property
    def microbatch_seconds(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


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

    @property
    def bubble_seconds(self) -> float:
        strategy = self.job.strategy
        if strategy.pp == 1:
            return 0.0
        slowest, chunks, others = self.slowest, strategy.chunks_per_rank, strategy.pp - 1

        def of_others(name: str) -> float:
            total = sum(count * getattr(rank, name) for rank, count in zip(self.ranks, self.counts))
            return float(total - getattr(slowest, name)) / others / chunks

        messages = [t for t in slowest.traffics if t.dimension == "pp" and t.fixed_exposed_seconds is not None]
        message = max((float(traffic.cost.seconds) for traffic in messages), default=0.0)
        return float(
            idle_seconds(
                strategy.schedule,
                strategy.pp,
                self.job.microbatches,
                chunks,
                of_others("forward"),
                of_others("input_gradient"),
                of_others("weight_gradient"),
                message,
            )
        )

    @property
    def tail_seconds(self) -> float:
        """What follows or precedes the microbatches: exposed reductions and gathers, optimizer, step overhead."""
        return max(
            sum(rank.exposed(name) for name in _PER_STEP)
            + rank.between_ends
            + optimizer_seconds(self.job, rank.contents)
            for rank in self.ranks
        )

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
    ranks = tuple(_rank_prediction(job, contents) for contents in kinds)
    return Prediction(job, ranks, tuple(kinds.values()))


def _rank_prediction(job: Job, contents: RankContents) -> RankPrediction:
    compute, m = stage_seconds(job, contents), job.microbatches
    windows = ComputeWindows(
        m * compute.forward,
        m * compute.backward,
        m * compute.attention.forward,
        m * compute.attention.backward,
    )
    traffics = with_exposed_seconds([_as_run(job, t) for t in step_traffic(job, contents)], windows)
    share = job.cluster.device.communication_share
    return RankPrediction(contents, compute, tuple(traffics), m, share, fully_recomputed_share(job, contents))


def _as_run(job: Job, traffic: Traffic) -> Traffic:
    """The traffic as the job's stack overlaps it."""
    if traffic.dimension != "tp" or not job.strategy.overlap.tp or traffic.window == "none":
        return traffic
    if job.stack.tp_overlap == "buffers":
        return replace(traffic, unhideable=job.cluster.device.efficiency.overlapped_tp_exposed)
    return replace(traffic, unhideable=max(traffic.unhideable, _DECOMPOSED_EXPOSED))
