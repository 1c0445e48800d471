"""Lab: ring attention on 4 processes at growing length: bytes, arithmetic and memory beside the formulas.

Every rank keeps a quarter of the sequence and passes keys and values around. What is sent and what is kept grow with
the length, arithmetic with its square; the zig-zag cut gives every rank the same arithmetic under a causal mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.cost.analysis import analyze
from shardwise.engine.context.sequence import cut_sequence
from shardwise.labs.ranks import EngineRun, RankResult, lab_job, run_engine
from shardwise.labs.registry import LabFinding, LabReport, LabSetup
from shardwise.measure.dryrun.run import compared_bytes, planned_flops
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes

RANKS, HEADS, LAYERS = 4, 4, 1
LENGTHS, SHORT_LENGTHS = (256, 512, 1024, 2048), (256, 512)
MODEL = {"layers": LAYERS, "hidden": 64, "heads": HEADS, "kv_heads": 2, "ffn": 128, "vocab": 128}
MEMORY_TOLERANCE = 0.1


@dataclass(frozen=True)
class RingRun:
    """One length on four ranks, and on one."""

    job: Job
    ranks: Sequence[RankResult]
    alone: RankResult

    @property
    def seq(self) -> int:
        return self.job.training.seq

    @property
    def scores_bytes(self) -> float:
        """The matrix of scores that a device would store without a fused kernel: heads · seq² · 4."""
        return 4.0 * HEADS * self.seq**2 * LAYERS

    @property
    def planned_bytes(self) -> float:
        memory = analyze(self.job).memory
        return memory.total - memory.allowance

    @property
    def flops(self) -> list[float]:
        return [sum(rank.flops.values()) for rank in self.ranks]


def run(setup: LabSetup) -> LabReport:
    runs = []
    for seq in SHORT_LENGTHS if setup.short else LENGTHS:
        setup.on_progress(f"ring attention over {seq:,} tokens")
        strategies = ({"dp": 1, "cp": ranks, "context_method": "ring"} for ranks in (RANKS, 1))
        job, alone = (lab_job(strategy, batch=1, seq=seq, **MODEL) for strategy in strategies)
        (single,) = run_engine(setup.pool, EngineRun(alone, steps=1))
        runs.append(RingRun(job, run_engine(setup.pool, EngineRun(job, steps=1)), single))
    findings = [finding for each in runs for finding in _findings(each)]
    return LabReport(tuple(_pieces(runs)), (*findings, *_growth(runs)))


def _findings(ring: RingRun) -> Iterator[LabFinding]:
    name = f"{ring.seq:,} tokens"
    yield LabFinding(
        f"{name}: loss", ring.alone.losses[0], ring.ranks[0].losses[0], 1e-5,
        "loss: attention over a ring is exact, partial softmaxes are merged by their log-sums (Liu et al. 2023)",
    )  # fmt: skip
    for line in compared_bytes(ring.job, 0, ring.ranks[0].sent):
        if line.what.startswith("cp send"):
            yield LabFinding(
                f"{name}: keys and values that a rank passes on", line.planned, line.traced, 0,
                "sent: n−1 times the keys and values of seq/n tokens, and twice that in the backward pass, with their "
                "gradients", unit="bytes",
            )  # fmt: skip
    planned = sum(planned_flops(ring.job, 0, 0).values())
    yield LabFinding(
        f"{name}: FLOPs of a rank",
        planned,
        ring.flops[0],
        0.02,
        "FLOPs: a quarter of the causal half square, and matmuls",
    )
    yield LabFinding(
        f"{name}: FLOPs of the busiest rank over the least busy", 1.0, max(ring.flops) / min(ring.flops), 0.001,
        "balance: each rank has an early and a late piece of the sequence (zig-zag), so all attend to equally much",
    )  # fmt: skip
    yield LabFinding(
        f"{name}: peak of a rank", ring.planned_bytes, max(each.peak_bytes for each in ring.ranks), MEMORY_TOLERANCE,
        "peak: seq/n tokens of activations, and two blocks of keys and values on their way", unit="bytes",
    )  # fmt: skip


def _growth(runs: Sequence[RingRun]) -> Iterator[LabFinding]:
    """Sent bytes grow like the length, from the shortest sequence to the longest."""
    first, last = runs[0], runs[-1]

    def passed(ring: RingRun) -> float:
        return sum(
            line.traced for line in compared_bytes(ring.job, 0, ring.ranks[0].sent) if line.what.startswith("cp s")
        )

    yield LabFinding(
        f"bytes from {first.seq:,} to {last.seq:,} tokens grow by", last.seq / first.seq,
        passed(last) / passed(first), 0,
        "growth: linear in the length, where a matrix of scores grows with its square",
    )  # fmt: skip


def _pieces(runs: Sequence[RingRun]) -> Iterator[Piece]:
    yield Line(_cut_drawing() + "\n", fixed=True)
    most = max(ring.scores_bytes for ring in runs)
    rows = [
        (
            f"{ring.seq:,}",
            bar(ring.scores_bytes / most, 20),
            readable_bytes(ring.planned_bytes),
            readable_bytes(max(each.peak_bytes for each in ring.ranks)),
            readable_bytes(ring.alone.peak_bytes),
            readable_bytes(ring.scores_bytes),
        )
        for ring in runs
    ]
    names = ("tokens", "all scores", "rank planned", "rank measured", "one process", "heads·seq²·4")
    title = "Peak memory: a ring of four, one process, and a stored matrix of scores"
    yield table(title, names, rows, numbers_from=2)


def _cut_drawing() -> str:
    """Which pieces of the sequence each rank has, according to the engine."""
    import torch

    pieces = torch.arange(2 * RANKS)[None]
    lines = [f"a sequence in {2 * RANKS} pieces, cut in zig-zag:"]
    for rank in range(RANKS):
        own = set(cut_sequence(pieces, rank, RANKS, "ring")[0].tolist())
        cells = "".join(f"[{piece}]" if piece in own else " · " for piece in range(2 * RANKS))
        sees = sum(piece + 0.5 for piece in own)
        lines.append(f"  rank {rank}  {cells}   attends to {sees:g} pieces")
    return "\n".join(lines)
