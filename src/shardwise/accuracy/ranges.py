"""The range of predictions over the plausible values of what a source does not print.

An alternative is a row with other cells, as if the source had printed them, so it runs through the same reading as any
other. What breaks a rule, or does not fit in the device's memory, cannot have been the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.accuracy import vocabulary
from shardwise.accuracy.runs import PublishedRun, run_from_row
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.spec.errors import SpecError
from shardwise.spec.rules import divisors
from shardwise.spec.schedules import schedule_record

Cells = dict[str, str]
_MOST_COMBINATIONS = 300
_LONGEST_USUAL_SEQUENCE = 8192


@dataclass(frozen=True)
class Field:
    """A field that a source may leave out: its plausible values in words, why these, and their cells for a run.

    ``names`` are those by which a table lists it, its column first.
    """

    names: tuple[str, ...]
    values: str
    reason: str
    cells: Callable[[PublishedRun], list[Cells]]


@dataclass(frozen=True)
class Range:
    """Least and most predicted seconds over ``fields``, from ``combinations`` that could have run."""

    fields: tuple[str, ...]
    low: float
    high: float
    combinations: int


def _each(column: str, *values: object) -> list[Cells]:
    return [{column: str(value)} for value in values]


def _microbatch(run: PublishedRun) -> list[Cells]:
    share = run.job.sequences // run.job.strategy.data_parallel
    return [{"mbs": str(size), "microbatches": ""} for size in divisors(share)]


def _chunks(run: PublishedRun) -> list[Cells]:
    """All that a rank's layers divide into; a schedule that is printed says whether there is one chunk or several."""
    pp, layers = run.job.strategy.pp, run.job.model.layers
    if pp == 1:
        return []
    slots = next((count // pp for count in (layers, layers + 2) if count % pp == 0), 1)
    printed = None if "schedule" in run.row.assumed else vocabulary.schedule(run.row.text("schedule"))
    if printed and schedule_record(printed).chooses_chunks:
        return _each("vpp", *(count for count in divisors(slots) if count > 1))
    return _each("vpp", *divisors(slots)) if printed is None else []


def _precision(run: PublishedRun) -> list[Cells]:
    """The width of the matmuls is printed; what gradients accumulate in, and what FP8 scales by, may not be."""
    name = run.job.training.precision
    if name in ("fp16", "bf16", "bf16-fp32-grads"):
        return _each("precision", "bf16, bf16 grad", "bf16, fp32 grad")  # fp16 costs what bf16 does
    return _each("precision", "fp8", "mxfp8") if name in ("fp8", "mxfp8") else []


def _sequence(run: PublishedRun) -> list[Cells]:
    seq = run.job.training.seq
    return [] if seq > _LONGEST_USUAL_SEQUENCE else _each("seq", seq // 2, seq, 2 * seq)


FIELDS = (
    Field(
        ("sp", "sequence-parallel"),
        "on, off",
        "one flag beside tensor parallelism, on in every framework's advice",
        lambda run: _each("sp", 0, 1) if run.job.strategy.tp > 1 else [],
    ),
    Field(
        ("recompute", "checkpointing"),
        "none, selective, full",
        "the three modes that every framework has",
        lambda run: _each("recompute", "none", "selective", "full"),
    ),
    Field(
        ("mbs", "microbatch", "micro-batch", "microbatches"),
        "every divisor of a rank's share of the batch",
        "the global batch stays whole; memory bounds it",
        _microbatch,
    ),
    Field(
        ("vpp", "interleave", "schedule"),
        "every divisor of a rank's layers",
        "chunks have equal layers; one if the schedule is printed as plain, several if as interleaved",
        _chunks,
    ),
    Field(
        ("precision",),
        "16-bit or fp32 gradients; FP8 scaled per tensor or per block",
        "frameworks differ in these; the width of the matmuls is always printed",
        _precision,
    ),
    Field(
        ("seq", "sequence", "seq_len"),
        "half, as taken, double",
        "powers of two; above 8192 a length is what a table is about, so printed",
        _sequence,
    ),
    Field(
        ("zero",),
        "0, 1",
        "a flag beside data parallelism; ZeRO-3 is always printed",
        lambda run: _each("zero", 0, 1) if run.job.strategy.data_parallel > 1 and run.job.strategy.zero < 2 else [],
    ),
    Field(
        ("vocab", "vocabulary"),
        "32k, 50k",
        "SentencePiece's and GPT-2's usual sizes; also where the cell is empty",
        lambda run: _each("vocab", 32_000, 50_304),
    ),
    Field(
        ("cp",),
        "ring, all-gather, all-to-all",
        "the three ways that frameworks have",
        lambda run: _each("notes", "CP=ring", "CP=all-gather", "CP=all-to-all") if run.job.strategy.cp > 1 else [],
    ),
)


def predicted_range(run: PublishedRun) -> Range | None:
    """The range of a run's step time, None if its source prints everything or no time.

    A value that changes what the report means (tokens of a step) is compared with the report as it would then be,
    and the outcome scaled to the report as it is.
    """
    reported = run.reported_seconds
    if reported is None or "layers" not in run.row.cells:  # fine-tuning runs name their model
        return None
    fields = [field for field in FIELDS if _is_open(run, field)]
    if not fields and not run.row.assumed:
        return None
    ratios = [
        predict(other.job).step_seconds / other.reported_seconds
        for other in _alternatives(run, fields)
        if other.reported_seconds and peak_memory(other.job).total <= other.job.cluster.device.usable_memory
    ]
    count = len(ratios)
    ratios = ratios or [predict(run.job).step_seconds / reported]
    names = tuple(field.names[0] for field in fields)
    return Range(names, min(ratios) * reported, max(ratios) * reported, count)


def _is_open(run: PublishedRun, field: Field) -> bool:
    if field.names[0] == "vocab" and run.row.number("vocab") is None:
        return True
    return not set(field.names).isdisjoint(run.row.assumed)


def _alternatives(run: PublishedRun, fields: Sequence[Field]) -> Iterator[PublishedRun]:
    """The run itself, and every combination that breaks no rule."""
    yield run
    choices = [cells for field in fields if (cells := field.cells(run))]
    for combination in itertools.product(*_bounded(choices)):
        together = {column: text for cells in combination for column, text in cells.items()}
        try:
            yield run_from_row(run.row.printed(together))
        except SpecError:
            continue


def _bounded(choices: list[list[Cells]]) -> list[list[Cells]]:
    """The choices with the longest thinned, their ends kept, until their product is small enough to price."""
    choices = [list(own) for own in choices]
    while math.prod(map(len, choices)) > _MOST_COMBINATIONS:
        longest = max(choices, key=len)
        if len(longest) <= 2:
            break
        del longest[len(longest) // 2]
    return choices
