"""Lab: routing tokens to experts on 4 processes, balanced and skewed: who computes, who waits, what is sent.

The router is replaced by one that sends tokens where the lab wants them; exchange, experts and gradients are the
engine's own. Tokens, bytes, FLOPs and memory are counted, which do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.cost.compute.operators import OperatorRole, layer_operators
from shardwise.cost.step.stage_time import layer_shape
from shardwise.engine.engine import Engine
from shardwise.labs.ranks import EngineRun, RankResult, lab_job, run_engine
from shardwise.labs.registry import LabFinding, LabReport, LabSetup, Relation
from shardwise.measure.dryrun.run import compared_bytes, planned_flops
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_seconds

RANKS, EXPERTS, TOP_K = 4, 8, 2
LAYERS, SEQ = 2, 64
# The rank whose experts each token of a sequence goes to, in turn, by the busiest rank's load over the mean.
PATTERNS = {1: (0, 1, 2, 3), 2: (0, 0, 1, 2), 4: (0, 0, 0, 0)}


_WHY_BYTES = (
    "bytes: a rank sends each of its tokens once to each of its experts, and returns what its own experts were sent: "
    "the busiest returns skew times the mean, so it sends (1 + skew)/2 of the plan; gradients are summed as always"
)


class ChosenRouter(nn.Module):
    """Picks experts by a pattern of ranks; scores and weights are those of the router that it replaces."""

    bias: Tensor | None = None

    def __init__(self, router: nn.Module, pattern: Sequence[int]) -> None:
        super().__init__()
        self.router, self.pattern = router, tuple(pattern)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, _, scores = self.router(hidden)
        ranks = torch.tensor(self.pattern).repeat(-(-hidden.shape[0] // len(self.pattern)))[: hidden.shape[0]]
        each = EXPERTS // RANKS
        indices = torch.stack([each * ranks + number for number in range(TOP_K)], -1)
        return indices, scores.gather(1, indices), scores


def route(engine: Engine, pattern: Sequence[int]) -> None:
    for mixture in engine.mixtures:
        replaced: Any = ChosenRouter(mixture.router, pattern)
        mixture.router = replaced


@dataclass(frozen=True)
class Routed:
    """One pattern on all ranks."""

    skew: int  # load of the busiest rank over the mean
    ranks: Sequence[RankResult]

    @property
    def loads(self) -> list[float]:
        """Tokens that each rank's experts got, in all layers, from all ranks."""
        per_expert = [sum(loads) for loads in zip(*(layer for rank in self.ranks for layer in rank.loads))]
        each = EXPERTS // RANKS
        return [sum(per_expert[number * each : (number + 1) * each]) for number in range(RANKS)]


def run(setup: LabSetup) -> LabReport:
    strategy = {"dp": RANKS, "ep": RANKS, "microbatch": 1}
    mixture = {"experts": EXPERTS, "top_k": TOP_K, "ffn": 256}
    job = lab_job(strategy, batch=RANKS, seq=SEQ, layers=LAYERS, moe=mixture)
    runs = []
    for skew, pattern in PATTERNS.items():
        setup.on_progress(f"the busiest rank with {skew} times the mean")
        request = EngineRun(job, steps=1 if setup.short else 3, prepare=partial(route, pattern=pattern))
        runs.append(Routed(skew, run_engine(setup.pool, request)))
    findings = [finding for each in runs for finding in _findings(job, each)]
    return LabReport(tuple(_pieces(runs)), (*findings, _memory(runs)))


def _findings(job: Job, routed: Routed) -> Iterator[LabFinding]:
    name = f"skew {routed.skew}"
    tokens = RANKS * SEQ * TOP_K * LAYERS
    yield LabFinding(
        f"{name}: tokens at the busiest rank", routed.skew * tokens / RANKS, max(routed.loads), 0,
        "tokens: every token goes to its k experts, none is dropped",
    )  # fmt: skip
    for line in compared_bytes(job, 0, routed.ranks[0].sent):
        if not line.negligible:
            exchanged = line.what.startswith("ep")
            planned = line.planned * (1 + routed.skew) / 2 if exchanged else line.planned
            yield LabFinding(
                f"{name}: {line.what.replace('_', '-')} of rank 0, in a step", planned, line.traced, 0.02, _WHY_BYTES,
                unit="bytes",
            )  # fmt: skip
    products = planned_flops(job, 0, 0)["products"] + (routed.skew - 1) * _expert_flops(job)
    yield LabFinding(
        f"{name}: FLOPs of matmuls of the busiest rank", products, max(rank.flops["products"] for rank in routed.ranks),
        0.02, "FLOPs: experts compute on what they get, so the busiest rank does skew times the mean, and others wait",
    )  # fmt: skip


def _expert_flops(job: Job) -> float:
    """FLOPs of a rank's routed experts in a step with a balanced load."""
    each = (
        operator
        for operator in layer_operators(job.model, layer_shape(job), job.model.kinds[-1])
        if operator.role is OperatorRole.EXPERTS
    )
    return 3 * LAYERS * job.microbatches * sum(float(operator.flops) for operator in each)


def _memory(runs: Sequence[Routed]) -> LabFinding:
    """More tokens mean more activations, on that rank alone."""
    balanced, skewed = (max(rank.peak_bytes for rank in each.ranks) for each in (runs[0], runs[-1]))
    return LabFinding(
        "skew 4: peak of the busiest rank over the balanced one", 1.05, skewed / balanced, 0,
        "memory: a rank keeps the activations of the tokens that it got; a plan for the mean would run out",
        Relation.AT_LEAST,
    )  # fmt: skip


def _pieces(runs: Sequence[Routed]) -> Iterator[Piece]:
    yield Line(f"{EXPERTS} experts on {RANKS} ranks, {TOP_K} for each of {RANKS * SEQ} tokens in {LAYERS} layers.\n")
    for routed in runs:
        most, mean = max(routed.loads), sum(routed.loads) / RANKS
        rows = [
            (f"rank {rank}", bar(load / most, 30), f"{load:,.0f}", readable_bytes(routed.ranks[rank].peak_bytes))
            for rank, load in enumerate(routed.loads)
        ]
        title = f"The busiest rank has {most / mean:g} times the mean"
        yield table(title, ("", "", "tokens", "peak"), rows, numbers_from=2)
    times = [
        (f"skew {routed.skew}", readable_seconds(max(rank.step_seconds[-1] for rank in routed.ranks)))
        for routed in runs
    ]
    yield table("A step on these shared cores", ("", "slowest rank"), times)
