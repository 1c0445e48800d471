"""What a row reports: seconds per step, as printed or from what is printed, and bytes per device."""

from __future__ import annotations

from shardwise.cost.flops import flops_per_token, head_forward_flops, layer_forward_flops
from shardwise.cost.validation.sources import Source
from shardwise.cost.validation.table import Row
from shardwise.cost.validation.words import counted
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

TIME_COLUMNS = (
    "rep_iter_s",
    "derived_iter_s",
    "rep_tok_s_gpu",
    "rep_samples_s_gpu",
    "rep_tflops_gpu",
    "rep_mfu_pct",
)


def reported_seconds(row: Row, source: Source, job: Job) -> tuple[float, str]:
    """The step time and where it comes from; the first of ``TIME_COLUMNS`` that says something."""
    devices = job.cluster.devices
    for column in TIME_COLUMNS:
        value = row.number(column)
        if not value:
            continue
        if column == "rep_iter_s":
            return value, "iteration time"
        if column == "derived_iter_s":
            return value, "derived time"
        if column == "rep_tok_s_gpu":
            return job.tokens_per_step / devices / value, "tokens/s"
        if column == "rep_samples_s_gpu":
            return job.sequences / devices / value, "samples/s"
        flops, words = _counted_flops(row, source, job)
        if column == "rep_tflops_gpu":
            return flops / devices / (value * 1e12), f"TFLOP/s, {words}"
        peak = counted(row.text("flops_convention")).peak or source.peak or job.cluster.device.peak_flops("bf16")
        return flops / devices / (value / 100 * peak), f"MFU, {words}"
    raise SpecError("rep_iter_s", "the row reports no time", "give an iteration time, tokens/s, TFLOP/s or MFU")


def _counted_flops(row: Row, source: Source, job: Job) -> tuple[float, str]:
    """FLOPs of a step by the row's own convention, else by its source's; and that convention in words."""
    own = counted(row.text("flops_convention"))
    convention = own.convention or source.convention
    per_token = flops_per_token(job.model, job.training.seq, convention)
    recomputed = own.recomputed or (own.convention is None and source.counts_recomputed)
    if recomputed and job.strategy.recompute == "full":
        per_token += per_token / 3 - head_forward_flops(job.model)
    elif recomputed and "attention" in job.recomputed_operators:
        layer = layer_forward_flops(job.model, job.training.seq, moe=False, halve_causal=convention == "causal")
        per_token += job.model.layers * layer.attention
    return per_token * job.tokens_per_step, convention + (" with recompute" if recomputed else "")


def reported_memory(row: Row, source: Source) -> tuple[float | None, str]:
    """Bytes per device if the row has them, and what they count; a column of GB holds 10⁹ where its kind says so."""
    value, kind = row.number("rep_mem_gib"), row.text("rep_mem_kind")
    decimal = "GB" in kind and "GiB" not in kind and source.memory == "as printed"
    return (value * (1e9 if decimal else 2**30) if value else None), kind


def counts_reserved(kind: str, source: Source) -> bool:
    """Whether a figure is what the allocator reserved; what stands in brackets is said of another one."""
    return source.memory != "as printed" or "reserved" in kind.partition("(")[0].lower()
