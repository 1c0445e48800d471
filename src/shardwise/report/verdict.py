"""The verdict on a job in words: how long its step takes, whether it fits, what bounds it, what to change."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.cost.analysis import Analysis
from shardwise.cost.memory.room import margin_words, probability_words
from shardwise.cost.step.parts import COMMUNICATION
from shardwise.cost.step.verdict import EXPOSED_LIMIT, Bottleneck, SendingLess, StepCause
from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.describe import change_words
from shardwise.report.console import table
from shardwise.report.part_names import DIMENSIONS
from shardwise.report.tables import FittedTable
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_seconds, readable_share

_PARTS = {
    "memory-bound": "memory-bound operators",
    "fixed": "kernel launches and the fixed cost of a step",
    "optimizer": "the optimizer",
}


def verdict_table(found: Assessment) -> FittedTable:
    """What a reader wants first: a name and a few words a line."""
    rows = [*verdict_rows(found), advice_row(found), floor_row(found.analysis)]
    return table("", ("", ""), rows, numbers_from=2)


def verdict_rows(found: Assessment) -> Iterator[tuple[str, str]]:
    """The verdict without advice, which takes most of the time of an analysis."""
    analysis = found.analysis
    yield from _step_rows(found)
    yield "Memory", memory_words(analysis)
    yield "Bound by", ("" if found.bottleneck.kind == "time" else "memory: ") + _bound_words(analysis, found.bottleneck)
    if analysis.fits:
        share = analysis.exposed_share
        over = f", above {EXPOSED_LIMIT:.0%}" if share > EXPOSED_LIMIT else ""
        yield "Exposed communication", f"{share:.0%} of the predicted step{over}"


def advice_row(found: Assessment) -> tuple[str, str]:
    """What to change: for a shorter step, or for one that fits."""
    if found.analysis.fits:
        return "What helps most", _change_words(found)
    return "What would fit", f"{found.what_would_fit}"


def prediction_table(found: Assessment) -> FittedTable:
    """A prediction alone: step, throughput, memory, floor."""
    rows = (*_step_rows(found), ("Memory", memory_words(found.analysis)), floor_row(found.analysis))
    return table("", ("", ""), rows, numbers_from=2)


def _step_rows(found: Assessment) -> Iterator[tuple[str, str]]:
    analysis, peak = found.analysis, found.analysis.job.training.recipe.compute
    low, high = readable_seconds(found.predicted_seconds_low), readable_seconds(found.predicted_seconds_high)
    yield "Predicted step", f"{readable_seconds(analysis.predicted_seconds)}; 80% of published runs: {low} - {high}"
    mfu = f"MFU {readable_share(analysis.mfu)} of the {peak} peak"
    yield "Throughput", f"{analysis.tokens_per_second:,.0f} tokens/s, {mfu}"


def floor_row(analysis: Analysis) -> tuple[str, str]:
    return "Floor", f"{readable_seconds(analysis.floor_seconds)}: all matmuls at peak, communication as priced"


def memory_words(analysis: Analysis) -> str:
    """Whether the fullest device fits, and by how much."""
    memory, room = analysis.memory, analysis.room
    free = room.usable_bytes - memory.total
    needed = f"{readable_bytes(memory.total)} of {readable_bytes(room.usable_bytes)}"
    likely = f"with {probability_words(analysis.fit_probability)} probability"
    if analysis.fit == "fits":
        return f"fits {likely}: {needed}, {readable_bytes(free)} free"
    if analysis.fit == "tight":
        return f"tight, fits {likely}: {needed}, {readable_bytes(free)} free; {margin_words(analysis.job)}"
    missing = f"{readable_bytes(-free)} too much" if free < 0 else "too little host memory"
    return f"DOES NOT FIT: {needed}, {missing}"


def bottleneck_sentence(analysis: Analysis, found: Bottleneck) -> str:
    """One sentence that names what bounds the job."""
    return f"{'Bound by ' if found.kind == 'time' else 'Does not fit: '}{_bound_words(analysis, found)}."


def _bound_words(analysis: Analysis, found: Bottleneck) -> str:
    if found.kind != "time":
        return _memory_bound_words(analysis, found)
    first, *others = found.causes
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


def _memory_bound_words(analysis: Analysis, found: Bottleneck) -> str:
    memory, room = analysis.memory, analysis.room
    if found.kind == "host memory":
        nodes = analysis.job.cluster.node_devices
        needed, there = readable_bytes(analysis.host_bytes), readable_bytes(room.host_bytes * nodes)
        return f"offload needs {needed} of host memory per node, which has {there}"
    rank = f" on pipeline rank {memory.pipeline_rank}" if analysis.job.strategy.pp > 1 else ""
    needed, usable = readable_bytes(memory.total), readable_bytes(room.usable_bytes)
    part = readable_bytes(getattr(memory, found.largest_part))
    return f"a device{rank} needs {needed} of {usable}; the largest part is {found.largest_part} ({part})"


def _change_words(found: Assessment) -> str:
    change, analysis = found.best_change, found.analysis
    if change is None:
        return "no single change of the strategy makes the step 1% shorter and fits"
    step = f"{readable_seconds(change.predicted_seconds)} instead of {readable_seconds(analysis.predicted_seconds)}"
    return (
        f"{change_words(analysis.job.strategy, change.job.strategy)} (step {step}, {found.change_gain:.0%} less; "
        f"exposed {change.exposed_share:.0%}; {readable_bytes(change.memory.total)})"
    )


def sending_less_words(job: Job, found: SendingLess) -> str:
    """That a step mostly waits for gradients, and what would send less of them."""
    options = ", ".join(_faster_words(job, *one) for one in found.speedups.items())
    waits = f"{found.waiting_share:.0%} of the step waits for data-parallel ranks"
    return f"{waits}; options that also change the training: {options}"


def _faster_words(job: Job, other: Job, speedup: float) -> str:
    strategy = other.strategy
    compressed = strategy.compression.is_used
    setting = (
        f"compression={strategy.compression.method}" if compressed else f"synchronise={strategy.synchronise.method}"
    )
    return f"{'zero=0 and ' if job.strategy.zero else ''}strategy.{setting}: {speedup:.1f} times faster"
