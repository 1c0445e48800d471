"""The verdict on a job in words: the step time, whether it fits, what bounds it, what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.cost.analysis import Analysis
from shardwise.cost.memory.room import Fit, margin_words, probability_words
from shardwise.cost.step.simulation import COMMUNICATION
from shardwise.cost.step.verdict import EXPOSED_LIMIT, Bottleneck, SendingLess, StepCause
from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.candidate import change_words
from shardwise.report.console import table
from shardwise.report.tables import FittedTable
from shardwise.spec.clusters import device_words
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_seconds, readable_share

# -- the verdict on a job in one sentence, with the figures of its error bar -------------------------


@dataclass(frozen=True)
class JobVerdict:
    """A predicted step with its error bar, and the memory of the fullest device."""

    sentence: str
    basis: str  # where the error bar comes from
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    floor_seconds: float  # what no software can beat
    memory_bytes: float
    usable_bytes: float
    fit: Fit
    fit_probability: float


def verdict_of(assessment: Assessment) -> JobVerdict:
    analysis = assessment.analysis
    return JobVerdict(
        sentence=verdict_sentence(assessment),
        basis=assessment.error_bar.basis,
        predicted_seconds=analysis.predicted_seconds,
        low_seconds=assessment.predicted_seconds_low,
        high_seconds=assessment.predicted_seconds_high,
        floor_seconds=analysis.floor_seconds,
        memory_bytes=analysis.memory.total,
        usable_bytes=analysis.room.usable_bytes,
        fit=analysis.fit,
        fit_probability=analysis.fit_probability,
    )


def verdict_sentence(assessment: Assessment) -> str:
    """ "llama3-70b on 64 × h100-sxm: 30.1 s a step, 28.3 s to 32.1 s, fits with 95%"."""
    analysis = assessment.analysis
    ends = (assessment.predicted_seconds_low, assessment.predicted_seconds_high)
    low, high = map(readable_seconds, ends)
    step = f"{readable_seconds(analysis.predicted_seconds)} a step, {low} to {high}"
    return f"{subject_words(analysis.job)}: {step}, {fit_words(assessment)}"


def subject_words(job: Job) -> str:
    return f"{job.model.name} on {device_words(job.cluster)}"


def fit_words(assessment: Assessment) -> str:
    analysis = assessment.analysis
    if analysis.fits:
        likely = f"fits with {probability_words(analysis.fit_probability)}"
        return likely if analysis.fit == "fits" else f"tight: {likely}"
    return f"does not fit ({readable_bytes(analysis.memory.total)} of {readable_bytes(analysis.room.usable_bytes)})"


# -- the same as rows of a table ---------------------------------------------------------------------

_PARTS = {
    "memory-bound": "memory-bound operators",
    "fixed": "kernel launches and the fixed cost of a step",
    "optimizer": "the optimizer",
}


def verdict_table(assessment: Assessment) -> FittedTable:
    """What a reader wants first, a line each."""
    rows = [*verdict_rows(assessment), advice_row(assessment), floor_row(assessment.analysis)]
    return table("", ("", ""), rows, numbers_from=2)


def verdict_rows(assessment: Assessment) -> Iterator[tuple[str, str]]:
    """The verdict without advice, whose search takes most of the time of an analysis."""
    analysis = assessment.analysis
    yield "Memory", memory_words(analysis)
    yield from _step_rows(assessment)
    yield (
        "Bound by",
        ("" if assessment.bottleneck.kind == "time" else "memory: ") + _bound_words(analysis, assessment.bottleneck),
    )
    if analysis.fits:
        share = analysis.exposed_share
        over = f", above {EXPOSED_LIMIT:.0%}" if share > EXPOSED_LIMIT else ""
        yield "Exposed communication", f"{share:.0%} of the predicted step{over}"


def advice_row(assessment: Assessment) -> tuple[str, str]:
    if assessment.analysis.fits:
        return "What helps most", _change_words(assessment)
    return "What would fit", f"{assessment.what_would_fit}"


def prediction_table(assessment: Assessment) -> FittedTable:
    rows = (("Memory", memory_words(assessment.analysis)), *_step_rows(assessment), floor_row(assessment.analysis))
    return table("", ("", ""), rows, numbers_from=2)


def _step_rows(assessment: Assessment) -> Iterator[tuple[str, str]]:
    analysis, peak = assessment.analysis, assessment.analysis.job.training.recipe.compute
    low, high = readable_seconds(assessment.predicted_seconds_low), readable_seconds(assessment.predicted_seconds_high)
    yield "Predicted step", f"{readable_seconds(analysis.predicted_seconds)}; 80% of published runs: {low} - {high}"
    mfu = f"MFU {readable_share(analysis.mfu)} of the {peak} peak"
    yield "Throughput", f"{analysis.tokens_per_second:,.0f} tokens/s, {mfu}"


def floor_row(analysis: Analysis) -> tuple[str, str]:
    return "Floor", f"{readable_seconds(analysis.floor_seconds)}: all matmuls at peak, communication as priced"


def memory_words(analysis: Analysis) -> str:
    memory, room = analysis.memory, analysis.room
    free = room.usable_bytes - memory.total
    needed = f"{readable_bytes(memory.total)} of {readable_bytes(room.usable_bytes)}"
    likely = f"with {probability_words(analysis.fit_probability)} probability"
    if analysis.fit == "fits":
        return f"fits {likely}: {needed}, {readable_bytes(free)} free"
    too_much = f"{readable_bytes(-free)} too much"
    if analysis.fit == "tight":
        left = f"{readable_bytes(free)} free" if free >= 0 else f"predicted {too_much}"
        return f"tight, fits {likely}: {needed}, {left}; {margin_words(analysis.job)}"
    missing = too_much if free < 0 else "too little host memory"
    return f"DOES NOT FIT: {needed}, {missing}"


def bottleneck_sentence(analysis: Analysis, bottleneck: Bottleneck) -> str:
    return f"{'Bound by ' if bottleneck.kind == 'time' else 'Does not fit: '}{_bound_words(analysis, bottleneck)}."


def _bound_words(analysis: Analysis, bottleneck: Bottleneck) -> str:
    if bottleneck.kind != "time":
        return _memory_bound_words(analysis, bottleneck)
    first, *others = bottleneck.causes
    longest = f"{readable_seconds(first.seconds)} or {first.share:.0%} of the predicted step"
    following = (f"next is {_cause_words(analysis.job, other)} with {other.share:.0%}" for other in others)
    return "; ".join((f"{_cause_words(analysis.job, first)}: {longest}", *following))


def _cause_words(job: Job, cause: StepCause) -> str:
    if cause.part == "bubble":
        return f"the pipeline bubble ({job.strategy.pp} stages, {job.microbatches} microbatches)"
    if cause.part not in COMMUNICATION:
        return _PARTS.get(cause.part, cause.part)
    communication = f"{DIMENSIONS[cause.part].replace(' ', '-')} communication"
    if cause.collective is None:
        return communication
    over = f" over {cause.level_name}" if cause.level_name is not None else ""
    return f"{communication}{over} ({cause.collective.what})"


def _memory_bound_words(analysis: Analysis, bottleneck: Bottleneck) -> str:
    memory, room = analysis.memory, analysis.room
    if bottleneck.kind == "host memory":
        nodes = analysis.job.cluster.node_devices
        needed, there = readable_bytes(analysis.host_bytes), readable_bytes(room.host_bytes * nodes)
        return f"offload needs {needed} of host memory per node, which has {there}"
    rank = f" on pipeline rank {memory.pipeline_rank}" if analysis.job.strategy.pp > 1 else ""
    needed, usable = readable_bytes(memory.total), readable_bytes(room.usable_bytes)
    part = readable_bytes(getattr(memory, bottleneck.largest_part))
    return f"a device{rank} needs {needed} of {usable}; the largest part is {bottleneck.largest_part} ({part})"


def _change_words(assessment: Assessment) -> str:
    change, analysis = assessment.best_change, assessment.analysis
    if change is None:
        return "no single change of the strategy makes the step 1% shorter and fits"
    step = f"{readable_seconds(change.predicted_seconds)} instead of {readable_seconds(analysis.predicted_seconds)}"
    return (
        f"{change_words(analysis.job.strategy, change.job.strategy)} (step {step}, {assessment.change_gain:.0%} less; "
        f"exposed {change.exposed_share:.0%}; {readable_bytes(change.memory.total)})"
    )


def sending_less_words(job: Job, advice: SendingLess) -> str:
    """A note that the step mostly waits for gradients, with options that send less."""
    options = ", ".join(_faster_words(job, *option) for option in advice.speedups.items())
    waits = f"{advice.waiting_share:.0%} of the step waits for data-parallel ranks"
    return f"{waits}; options that also change the training: {options}"


def _faster_words(job: Job, other: Job, speedup: float) -> str:
    strategy = other.strategy
    compressed = strategy.compression.is_used
    setting = (
        f"compression={strategy.compression.method}" if compressed else f"synchronise={strategy.synchronise.method}"
    )
    return f"{'zero=0 and ' if job.strategy.zero else ''}strategy.{setting}: {speedup:.1f} times faster"


# -- how tables name the parallel dimensions, the parts of a step and those of a device's memory -----


DIMENSIONS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "offload": "offload",
}
MEMORY_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "recomputed": "recomputed layer",
    "gathered": "gathered layers",
    "communication": "communication buffers",
    "temporary": "logits, temporary",
    "allowance": "framework (allowance)",
}
STEP_WORDS = {
    "products": "matmuls",
    "attention": "attention",
    "memory-bound": "memory-bound operators",
    "launches": "kernel launches",
    "recompute": "recomputed operators",
    **{name: f"exposed {name} communication" for name in COMMUNICATION},
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "fixed cost of a step",
    "stragglers": "waiting for the slowest",
}
PLAN_WORDS = {
    "compute": "compute",
    "recompute": "recompute",
    **{name: f"{words}, exposed" for name, words in DIMENSIONS.items()},
    "bubble": "pipeline bubble and messages",
    "optimizer": "optimizer and step overhead",
    "stragglers": "waiting for the slowest",
}
MEASURED_WORDS = {
    "pp": "pp messages",
    "late ranks": "waits for late ranks",
    "host": "host, the rest",
    "checkpoint": "checkpoint stall",
    "data": "data wait",
}
