"""Lab: data parallelism with whole copies (DDP) against ZeRO-1, 2 and 3: memory and bytes beside the formulas.

Memory is what tensors hold, bytes are what the engine's collectives carry; neither depends on the machine. Prefetch is
shown on two virtual nodes with a slow link and layers that take a fixed time, where a gather is worth hiding.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.collectives import CollectiveKind
from shardwise.cost.analysis import analyze
from shardwise.cost.memory.device import DeviceMemory
from shardwise.labs.ranks import EngineRun, Pace, RankResult, described, lab_job, least_step, run_engine, slow_nodes
from shardwise.labs.registry import LabFinding, LabReport, LabSetup, Relation
from shardwise.measure.dryrun.run import compared_bytes
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece
from shardwise.spec.emulation import Emulation
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.units import readable_bytes, readable_seconds

RANKS, LAYERS, MICROBATCHES = 4, 4, 2  # of one microbatch gradients would be reduced before they are all there
MODEL = {"layers": LAYERS, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 512}
BYTES_TOLERANCE = 0.02
CLEARLY_LESS = 0.95
_NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
# What each divides by the ranks N, Φ parameters in fp32: 4 weight, 4 gradient, 8 AdamW's moments. ZeRO-1 and 2 update
# a part of the weights, 4/N, that lies beside the whole ones which they compute with.
_FORMULAS = ("16Φ", "8Φ + 12Φ/N", "4Φ + 16Φ/N", "16Φ/N")
_OWN = {"weights": "weights that it updates", "gradients": "summed gradients", "optimizer": "moments"}
_SENT = ("2Φ", "2Φ", "(m + 1)Φ", "3mΦ")  # of m microbatches, each of which ZeRO-2 reduces and ZeRO-3 gathers too
SLOW = Emulation(nodes=2, ranks_per_node=1, rate=25e6, delay=1e-3)
PACE = Pace(layer_forward=0.03, layer_backward=0.06)


@dataclass(frozen=True)
class ZeroStage:
    """One way to keep states, as planned and as measured on every rank."""

    zero: int
    job: Job
    planned: DeviceMemory
    ranks: Sequence[RankResult]

    @property
    def name(self) -> str:
        return _NAMES[self.zero]

    @property
    def planned_bytes(self) -> float:
        """Of tensors, without the allowance for the framework."""
        return self.planned.total - self.planned.allowance

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)


def run(setup: LabSetup) -> LabReport:
    stages = []
    for zero, name in enumerate(_NAMES):
        setup.on_progress(f"{name} on {RANKS} processes")
        job = lab_job({"dp": RANKS, "zero": zero, "microbatch": 1}, batch=RANKS * MICROBATCHES, seq=32, **MODEL)
        request = EngineRun(job, steps=2 if setup.short else 4)
        stages.append(ZeroStage(zero, job, analyze(job).memory, run_engine(setup.pool, request)))
    findings = [finding for stage in stages for finding in _findings(stage, stages[max(0, stage.zero - 1)])]
    ahead, told = _prefetch(setup)
    return LabReport((*_pieces(stages), *told), (*findings, *ahead))


def _findings(stage: ZeroStage, before: ZeroStage) -> Iterator[LabFinding]:
    """``before`` divides one thing less; that of DDP is itself."""
    size = 4 * parameter_count(stage.job.model)
    for part in _OWN:
        whole = (2 if part == "optimizer" else 1) * size
        shards = RANKS if stage.zero else 1
        yield LabFinding(
            f"{stage.name}: {_OWN[part]} of a rank", whole / shards, stage.ranks[0].held[part], 0.001,
            "own states: with ZeRO each rank updates 1/N of the weights, from 1/N of the summed gradients, with 1/N of "
            "the moments (Rajbhandari et al. 2020, section 5)", unit="bytes",
        )  # fmt: skip
    for line in compared_bytes(stage.job, 0, stage.ranks[0].sent):
        if not line.negligible:
            yield LabFinding(
                f"{stage.name}: {line.what.replace('_', '-')} in a step", line.planned, line.traced, BYTES_TOLERANCE,
                "bytes: gradients are summed and weights gathered once (ZeRO-3: gathered for each pass); "
                "ZeRO, section 7", unit="bytes",
            )  # fmt: skip
    yield LabFinding(
        f"{stage.name}: peak of a rank", stage.planned_bytes, stage.peak_bytes, BYTES_TOLERANCE,
        "peak: states, activations and gathered layers as `analyze` adds them up; gloo's sums on a CPU come on top",
        Relation.AT_LEAST, "bytes",
    )  # fmt: skip
    states = _states(stage.zero, size)
    planned = stage.planned.weights + stage.planned.gradients + stage.planned.optimizer
    yield LabFinding(
        f"{stage.name}: states planned", states, planned, 0.001,
        "states: the formula of each stage (Rajbhandari et al. 2020, section 5), with whole gradients while "
        "microbatches add to them", unit="bytes",
    )  # fmt: skip
    if stage is before:
        return
    yield LabFinding(
        f"{stage.name}: peak over {before.name}'s", CLEARLY_LESS, stage.peak_bytes / before.peak_bytes, 0,
        "less: each stage divides one thing more, and holds clearly less for it, whatever a step needs besides",
        Relation.AT_MOST,
    )  # fmt: skip
    yield LabFinding(
        f"{stage.name}: loss of the last step", before.ranks[0].losses[-1], stage.ranks[0].losses[-1], 1e-5,
        "loss: where states are kept changes nothing that is computed",
    )  # fmt: skip


def _states(zero: int, size: int) -> float:
    """Weights, gradients and moments of a rank by `_FORMULAS`; ``size`` is 4Φ."""
    whole, divided = ((4, 0), (2, 3), (1, 4), (0, 4))[zero]
    return size * (whole + divided / RANKS)


def _pieces(stages: Sequence[ZeroStage]) -> Iterator[Piece]:
    parts = ("weights", "gradients", "optimizer", "gathered")
    rows = [
        (
            stage.name,
            formula,
            sent,
            *(readable_bytes(getattr(stage.planned, part)) for part in parts),
            readable_bytes(stage.planned_bytes),
            readable_bytes(stage.peak_bytes),
        )
        for stage, formula, sent in zip(stages, _FORMULAS, _SENT)
    ]
    names = ("", "states", "sent", *parts, "peak planned", "peak measured")
    yield table(f"Memory of each of {RANKS} ranks", names, rows, numbers_from=3, optional=("gathered", "sent"))
    most = max(stage.peak_bytes for stage in stages)
    drawn = [(stage.name, bar(stage.peak_bytes / most, 40), readable_seconds(_step_seconds(stage))) for stage in stages]
    yield table("The peak drawn, and a step on these shared cores", ("", "", "median step"), drawn, numbers_from=2)


def _step_seconds(stage: ZeroStage) -> float:
    return float(statistics.median(max(each) for each in zip(*(rank.step_seconds for rank in stage.ranks))))


# -- prefetch --------------------------------------------------------------------------------------------


def _prefetch(setup: LabSetup) -> tuple[list[LabFinding], list[Piece]]:
    """ZeRO-3 over a slow link, with and without gathering the next layer while the current one computes."""
    with slow_nodes(SLOW) as pool:
        if isinstance(pool, str):
            return [], [Line(f"Prefetch needs virtual nodes with a slow link, left out: {pool}")]
        setup.on_progress("ZeRO-3 over a slow link, with and without prefetch")
        job = lab_job({"dp": 2, "zero": 3, "microbatch": 1}, batch=2, seq=32, cluster=described(SLOW), **MODEL)
        request = EngineRun(job, steps=2 if setup.short else 6, counts=False, pace=PACE)
        rounds = 1 if setup.short else 3  # alternating, so that other load on the machine affects both
        tried = [(units, run_engine(pool, replace(request, prefetch=units))) for _ in range(rounds) for units in (0, 1)]
        seconds = [min(least_step(ranks) for units, ranks in tried if units == ahead) for ahead in (0, 1)]
    gathers = [
        traffic for traffic in analyze(job).dimension_traffics("dp") if traffic.kind is CollectiveKind.ALL_GATHER
    ]
    hidden = sum(gather.count * float(gather.cost.seconds) * (1 - gather.unhideable) for gather in gathers)
    saved = seconds[0] - seconds[1]
    rows = [
        ("without prefetch", readable_seconds(seconds[0])),
        ("one layer ahead", readable_seconds(seconds[1])),
        ("saved", readable_seconds(saved)),
        ("gathers that computation can hide, priced", readable_seconds(hidden)),
    ]
    told = table(f"ZeRO-3 on 2 nodes, {SLOW}: every layer computes {PACE.layer_forward:g} s", ("", "step"), rows)
    finding = LabFinding(
        "ZeRO-3: what prefetch saves of a step", hidden, saved, 0.5,
        "prefetch: gathers of all layers but the first run while the layer before computes", Relation.AT_LEAST,
        "seconds", timed=True,
    )  # fmt: skip
    return [finding], [told]
