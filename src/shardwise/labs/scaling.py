"""Lab: strong and weak scaling of data parallelism on 1, 2 and 4 processes, over a slow link where there is one.

Layers take a fixed time (they sleep until it is over), so that ranks on shared cores do not slow each other down. What
is missing from ideal scaling is then Amdahl's serial part: summing the gradients, and what else a step does once. It is
measured in a step of one sequence per rank whose layers do not sleep, and is at least the price of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.collectives import CollectiveKind, build_schedule, simulated_seconds
from shardwise.labs.ranks import EngineRun, Pace, RankResult, described, lab_job, least_step, run_engine, slow_nodes
from shardwise.labs.registry import LabFinding, LabReport, LabSetup, Relation
from shardwise.launch.pool import Pool
from shardwise.layout.network import network
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece
from shardwise.spec.emulation import Emulation
from shardwise.spec.hardware import Cluster
from shardwise.spec.parameters import parameter_count
from shardwise.spec.units import readable_seconds, readable_share

SIZES = (1, 2, 4)
BATCH = 4  # sequences: of all ranks in strong scaling, of each in weak scaling
MODEL = {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 384, "vocab": 256}
PACE = Pace(layer_forward=0.02, layer_backward=0.04)
RATE, DELAY = 25e6, 1e-3
TOLERANCE = 0.25


@dataclass(frozen=True)
class ScaledRun:
    """A step on some ranks."""

    ranks: int
    layers_seconds: float
    measured_seconds: float  # the whole step
    beside_seconds: float  # what a step takes beside its layers
    summed_seconds: float  # price of summing the gradients
    loss: float

    @property
    def predicted_seconds(self) -> float:
        return self.layers_seconds + self.beside_seconds


def run(setup: LabSetup) -> LabReport:
    with slow_nodes(Emulation(nodes=max(SIZES), ranks_per_node=1, rate=RATE, delay=DELAY)) as pool_or_reason:
        slow = None if isinstance(pool_or_reason, str) else pool_or_reason
        note = f"No slow link here, so that sums cost next to nothing: {pool_or_reason}" if slow is None else ""
        runs = {kind: _runs(setup, kind, slow or setup.pool, slow is not None) for kind in ("strong", "weak")}
    findings = [finding for kind, each in runs.items() for finding in _findings(kind, each)]
    pieces = (*_pieces(runs), *([Line(note)] if note else []))
    return LabReport(pieces, tuple(findings))


def _runs(setup: LabSetup, kind: str, pool: Pool, slow: bool) -> list[ScaledRun]:
    runs: list[ScaledRun] = []
    for ranks in SIZES:
        setup.on_progress(f"{kind} scaling, {ranks} of {max(SIZES)} processes")
        sequences = BATCH if kind == "strong" else BATCH * ranks
        cluster = None
        if slow and ranks > 1:
            cluster = described(Emulation(nodes=ranks, ranks_per_node=1, rate=RATE, delay=DELAY))
        whole = _steps(setup, pool, ranks, sequences, cluster, PACE)
        beside = _steps(setup, pool, ranks, ranks, cluster, Pace())  # one sequence each: layers take little of it
        layers = MODEL["layers"] * (PACE.layer_forward + PACE.layer_backward) * sequences / ranks
        summed = _sum_seconds(cluster) if cluster is not None else 0.0
        runs.append(ScaledRun(ranks, layers, least_step(whole), least_step(beside), summed, whole[0].losses[-1]))
    return runs


def _steps(
    setup: LabSetup, pool: Pool, ranks: int, sequences: int, cluster: Cluster | None, pace: Pace
) -> list[RankResult]:
    strategy = {"dp": ranks, "microbatch": 1, "bucket": "1GB", "collective": "ring" if ranks > 1 else "auto"}
    job = lab_job(strategy, batch=sequences, seq=16, cluster=cluster, **MODEL)
    return run_engine(pool, EngineRun(job, steps=2 if setup.short else 5, counts=False, pace=pace))


def _sum_seconds(cluster: Cluster) -> float:
    """An all-reduce of all gradients by a ring, as the engine is told to do it."""
    model = lab_job({"dp": 1}, batch=1, seq=16, **MODEL).model
    topology, size = network(cluster), 4.0 * parameter_count(model)
    schedule = build_schedule(CollectiveKind.ALL_REDUCE, topology, "ring", size)
    return simulated_seconds(schedule, topology, size)


def efficiency(kind: str, first: float, ranks: int, seconds: float) -> float:
    """T1/(N·TN) for a fixed batch (Amdahl 1967), T1/TN for one that grows with N (Gustafson 1988)."""
    return first / seconds / (ranks if kind == "strong" else 1)


def _findings(kind: str, runs: Sequence[ScaledRun]) -> Iterator[LabFinding]:
    first = runs[0]
    for other in runs[1:]:
        if kind == "strong":
            yield LabFinding(
                f"strong, {other.ranks} ranks: loss", first.loss, other.loss, 1e-5,
                "loss: the same batch on more ranks is the same step",
            )  # fmt: skip
        yield LabFinding(
            f"{kind}, {other.ranks} ranks: step", other.predicted_seconds, other.measured_seconds, TOLERANCE,
            "step: the layers' time for each of a rank's sequences, and a step of one sequence without it",
            unit="seconds", timed=True,
        )  # fmt: skip
        yield LabFinding(
            f"{kind}, {other.ranks} ranks: beside the layers", other.summed_seconds, other.beside_seconds, 0,
            "beside the layers: at least the ring all-reduce of the gradients on this link", Relation.AT_LEAST,
            unit="seconds", timed=True,
        )  # fmt: skip
        yield LabFinding(
            f"{kind}, {other.ranks} ranks: efficiency",
            efficiency(kind, first.measured_seconds, other.ranks, other.predicted_seconds),
            efficiency(kind, first.measured_seconds, other.ranks, other.measured_seconds), TOLERANCE,
            "efficiency: strong T1/(N·TN), Amdahl 1967; weak T1/TN, Gustafson 1988", unit="share", timed=True,
        )  # fmt: skip


def _pieces(runs: Mapping[str, Sequence[ScaledRun]]) -> Iterator[Piece]:
    for kind, each in runs.items():
        first = each[0].measured_seconds
        rows = []
        for scaled in each:
            reached = efficiency(kind, first, scaled.ranks, scaled.measured_seconds)
            predicted = efficiency(kind, first, scaled.ranks, scaled.predicted_seconds)
            rows.append(
                (
                    str(scaled.ranks), bar(reached, 24), readable_share(predicted), readable_share(reached),
                    readable_seconds(scaled.predicted_seconds), readable_seconds(scaled.measured_seconds),
                )
            )  # fmt: skip
        title = (
            "Strong scaling: the batch stays" if kind == "strong" else "Weak scaling: the batch grows with the ranks"
        )
        names = ("ranks", "efficiency", "predicted", "measured", "step predicted", "measured")
        yield table(title, names, rows, numbers_from=2)
