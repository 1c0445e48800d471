"""Lab: tensor and sequence parallelism of an MLP by hand, in 50 lines (`by_hand.py`), against the engine's.

Both get the same weights and hidden states; outputs, gradients and what is sent must be the same.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.mesh import process_group
from shardwise.labs import by_hand
from shardwise.labs.ranks import EngineRun, RankResult, kind_of, lab_engine, lab_job, run_engine
from shardwise.labs.registry import LabFinding, LabReport, LabSetup, Relation
from shardwise.launch.pool import WorkerPlace
from shardwise.measure.dryrun.run import compared_bytes
from shardwise.measure.dryrun.world import CollectiveLog
from shardwise.measure.reference import sample_weight
from shardwise.report.console import table
from shardwise.report.page import Line, Piece
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes
from shardwise.training.memory import tensors_counted

RANKS, BATCH, SEQ, HIDDEN = 4, 2, 64, 64
LAYERS = 2
_ROUNDING = 1e-5
_DRAWING = """\
tensor parallelism: every rank has all tokens            sequence parallelism: every rank has its part of them
  hidden ──────────┬───────────────── identity             hidden/n ──── all-gather ───┐
                   ▼   backward: all-reduce                              ▼   backward: reduce-scatter
  [gate|up] rows of rank r   no communication              [gate|up] rows of rank r   no communication
                   ▼                                                     ▼
  down columns of rank r     partial sums                  down columns of rank r     partial sums
                   ▼                                                     ▼
               all-reduce ── backward: identity                   reduce-scatter ── backward: all-gather
"""


@dataclass(frozen=True)
class ComputedMlp:
    """The results of one way to compute an MLP, on a rank."""

    output: Tensor
    of_hidden: Tensor
    of_weights: Mapping[str, Tensor]
    sent: Mapping[str, int]  # bytes by kind of collective


@dataclass(frozen=True)
class ComparedMlp:
    """The largest differences, relative to the largest element, and what was sent."""

    output: float
    of_hidden: float
    of_weights: float
    by_hand: Mapping[str, int]
    engine: Mapping[str, int]


def run(setup: LabSetup) -> LabReport:
    jobs = {sequence: _job(RANKS, sequence) for sequence in (False, True)}
    compared: dict[bool, list[ComparedMlp]] = {}
    steps: dict[bool, list[RankResult]] = {}
    for sequence, job in jobs.items():
        setup.on_progress("an MLP by hand and by the engine" + (", sequence parallel" if sequence else ""))
        compared[sequence] = setup.pool.run(_compare, RANKS, job, sequence)
        steps[sequence] = run_engine(setup.pool, EngineRun(job, steps=1))
    (alone,) = run_engine(setup.pool, EngineRun(_job(1, False), steps=1))
    findings = [finding for sequence in jobs for finding in _findings(sequence, compared[sequence])]
    for sequence, job in jobs.items():
        findings += _of_model(sequence, job, steps[sequence], alone)
    findings.append(_less_memory(steps))
    return LabReport((Line(_DRAWING, fixed=True), _table(compared)), tuple(findings))


def _job(ranks: int, sequence: bool) -> Job:
    strategy = {"tp": ranks, "dp": 1, "sequence_parallel": sequence, "microbatch": BATCH}
    return lab_job(strategy, batch=BATCH, seq=SEQ, layers=LAYERS, hidden=HIDDEN)


# -- on the ranks ----------------------------------------------------------------------------------------


def _compare(place: WorkerPlace, job: Job, sequence: bool) -> ComparedMlp:
    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        engine = lab_engine(EngineRun(job))
        layers: Any = engine.stages[0].layers
        mlp = next(iter(layers.values())).mlp
        random = torch.Generator().manual_seed(1)
        whole, of_output = (torch.randn(BATCH, SEQ, HIDDEN, generator=random) for _ in range(2))
        hidden, gradient = (
            tensor.chunk(RANKS, 1)[place.rank].contiguous() if sequence else tensor for tensor in (whole, of_output)
        )
        prefix = next(held.name for held in engine.parameters if ".mlp.up." in held.name).removesuffix("up.weight")
        weights = {}
        for matrix, split in (("gate", 0), ("up", 0), ("down", 1)):
            shape = (job.model.ffn, job.model.hidden)[:: -1 if split else 1]
            full = sample_weight(f"{prefix}{matrix}.weight", shape, 0, job.model)
            weights[matrix] = full.chunk(RANKS, split)[place.rank].clone().requires_grad_()
        ours = _counted(mlp, hidden, gradient, {matrix: getattr(mlp, matrix).weight for matrix in weights})
        hand = _counted(lambda part: _mlp_by_hand(part, weights, sequence), hidden, gradient, weights)
    return ComparedMlp(
        _difference(hand.output, ours.output),
        _difference(hand.of_hidden, ours.of_hidden),
        max(_difference(hand.of_weights[matrix], ours.of_weights[matrix]) for matrix in weights),
        hand.sent,
        ours.sent,
    )


def _mlp_by_hand(hidden: Tensor, weights: Mapping[str, Tensor], sequence: bool) -> Tensor:
    columns = torch.cat([weights["gate"], weights["up"]])
    gate, up = by_hand.ColumnMatmul.apply(hidden, columns, sequence).chunk(2, -1)  # type: ignore[no-untyped-call]
    result: Tensor = by_hand.RowMatmul.apply(F.silu(gate) * up, weights["down"], sequence)  # type: ignore[no-untyped-call]
    return result


def _counted(call: Any, hidden: Tensor, of_output: Tensor, weights: Mapping[str, Tensor]) -> ComputedMlp:
    hidden = hidden.clone().requires_grad_()
    log = CollectiveLog()
    with tensors_counted() as memory:
        memory.observers.append(log)
        with log.naming():
            output = call(hidden)
            output.backward(of_output)
    gc.unfreeze()
    sent: Counter[str] = Counter()
    for message in log.sent:
        sent[kind_of(message)] += message.size_bytes
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert hidden.grad is not None
    return ComputedMlp(output.detach(), hidden.grad, gradients, dict(sent))


def _difference(ours: Tensor, other: Tensor) -> float:
    return float((ours - other).abs().max() / other.abs().max())


# -- theory beside measurement ---------------------------------------------------------------------------


def _title(sequence: bool) -> str:
    return "sequence parallel" if sequence else "tensor parallel"


def _findings(sequence: bool, ranks: Sequence[ComparedMlp]) -> Iterator[LabFinding]:
    name = _title(sequence)
    same = sum(max(rank.output, rank.of_hidden, rank.of_weights) <= _ROUNDING for rank in ranks)
    yield LabFinding(
        f"{name}: ranks whose output and gradients are the engine's", RANKS, same, 0,
        f"same: largest difference below {_ROUNDING:g} of the largest element, in output, input and weight gradients",
    )  # fmt: skip
    states = 4 * BATCH * SEQ * HIDDEN
    theory = {"all_gather": 3 * states, "reduce_scatter": 2 * states} if sequence else {"all_reduce": 2 * states}
    for kind, size in theory.items():
        for written in ("by hand", "the engine"):
            sent = ranks[0].by_hand if written == "by hand" else ranks[0].engine
            yield LabFinding(
                f"{name}, {written}: {kind.replace('_', '-')}", size, sent.get(kind, 0), 0,
                "bytes of one MLP: an all-reduce in each pass (Shoeybi et al. 2019, section 3); with sequence "
                "parallelism a gather and a scatter in each, and the inputs gathered again for the weight gradients "
                "(Korthikanti et al. 2022, section 4.2.2)", unit="bytes",
            )  # fmt: skip


def _of_model(sequence: bool, job: Job, ranks: Sequence[RankResult], alone: RankResult) -> Iterator[LabFinding]:
    name = _title(sequence)
    yield LabFinding(
        f"{name}: loss of the whole model", alone.losses[0], ranks[0].losses[0], _ROUNDING, "loss: that of one process"
    )
    for line in compared_bytes(job, 0, ranks[0].sent):
        if not line.negligible:
            yield LabFinding(
                f"{name}: {line.what.replace('_', '-')} of a step", line.planned, line.traced, 0.02,
                "bytes of a step: attention and MLP of all layers, embedding and head, as the planner prices them",
                unit="bytes",
            )  # fmt: skip


def _less_memory(steps: Mapping[bool, Sequence[RankResult]]) -> LabFinding:
    peaks = {sequence: max(rank.peak_bytes for rank in ranks) for sequence, ranks in steps.items()}
    return LabFinding(
        "sequence parallel: peak memory", peaks[False], peaks[True], 0,
        "memory: what stands between the regions is divided, so sequence parallelism holds less", Relation.AT_MOST,
        "bytes",
    )  # fmt: skip


def _table(compared: Mapping[bool, Sequence[ComparedMlp]]) -> Piece:
    rows = []
    for sequence, ranks in compared.items():
        worst = [max(getattr(rank, name) for rank in ranks) for name in ("output", "of_hidden", "of_weights")]
        sent = ", ".join(f"{kind.replace('_', '-')} {readable_bytes(size)}" for kind, size in ranks[0].by_hand.items())
        rows.append((_title(sequence), sent, *(f"{difference:.0e}" for difference in worst)))
    names = ("one MLP on 4 ranks", "sent by hand", "output differs", "input gradient", "weight gradients")
    return table("By hand against the engine, largest relative differences", names, rows, numbers_from=2)
