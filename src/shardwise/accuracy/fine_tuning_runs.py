"""Published fine-tuning runs as jobs: one row of their table, and what it reports; or the column that forbids it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from shardwise.accuracy import vocabulary
from shardwise.accuracy.fine_tuning_sources import MODELS, NODES, SOURCES, TARGETS
from shardwise.accuracy.runs import PublishedRun
from shardwise.accuracy.table import Source, TableRow
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import stack_from

# Columns by which such a table is told from one of pre-training runs.
COLUMNS = (
    *("row_id", "source", "model", "method", "rank", "target_modules", "base_precision", "optimizer", "gpu", "gpus"),
    *("zero_or_fsdp", "offload", "micro_batch", "seq", "packing", "mean_length", "gradient_checkpointing", "kernels"),
    *("rep_samples_s", "rep_step_s", "rep_peak_mem_gib", "rep_mem_kind", "fits"),
)
_BASES = (  # what a cell of the base's format means; GPTQ's codes have fp16 scales per 128, nearly as many bytes
    ("computed", "^fp8|^fp32"),
    ("nf4-double", r"nf4-dq|nf4 nested|gptq"),
    ("nf4", r"nf4|^fp4"),
    ("int8", "int8"),
    ("bf16", "bf16|fp16"),
)


def run_from_row(row: TableRow) -> PublishedRun:
    """The run that one row describes; of a `SpecError` the last part of the field is the column that forbids it."""
    source = next((one for one in SOURCES if one.covers(row)), None)
    if source is None:
        raise SpecError("source", f"{shown(row.text('source'))} has no recipe", "add it to fine_tuning_sources.py")
    row = source.filled(row)
    try:
        job = _job(row, source)
        seconds, words = _seconds(row, source, job)
        return PublishedRun(row, source, job, seconds, words, _memory_bytes(row), row.text("rep_mem_kind"))
    except SpecError as error:
        raise error.under(f"row {row.text('row_id')}") from None


def ran_out(run: PublishedRun) -> bool | None:
    """Whether the source says that the run had no room; None where it says nothing of it."""
    fits = run.row.text("fits").lower()
    return None if not fits and run.reported_memory_bytes is None else fits.startswith("oom")


def _job(row: TableRow, source: Source) -> Job:
    variants = [variant for variant in source.variants if variant.applies(row)]
    stack = stack_from(next((one.version for one in reversed(variants) if one.version), source.stack))
    strategy, training = _strategy(row, source), _training(row)
    for variant in variants:
        stack, strategy, training = (
            variant.on(stack),
            {**strategy, **variant.strategy},
            {**training, **variant.training},
        )
    in_16_bit = stack.masters == "none" and not row.text("base_precision").lower().startswith("fp32")
    if in_16_bit and training["optimizer"] == "adamw":
        training["optimizer"] = "adamw-bf16-moments"  # torch's AdamW has moments in the format of what it updates
    model = replace(_model(row), **{name: value for variant in variants for name, value in variant.model.items()})
    fields = {"model": model, "cluster": _cluster(row), "stack": stack}
    job = Job.from_dict({**fields, "strategy": {"overlap": stack.overlap, **strategy}, "training": training})
    return job.with_strategy(accumulate=job.usual_accumulation(job.strategy)) if job.microbatches > 1 else job


def _model(row: TableRow) -> Model:
    text = f"{row.text('model')} {row.text('params_b')}"
    shape = next((shape for pattern, shape in MODELS if re.search(pattern, text, re.IGNORECASE)), None)
    if shape is None:
        raise SpecError(
            "model", f"the shape of {shown(row.text('model'))} is not known", "add it to fine_tuning_sources.py"
        )
    if isinstance(shape, str):
        return replace(presets.load("model", Model, shape), max_seq=max(8192, row.whole("seq")))
    return Model.from_dict({"name": row.text("model"), "max_seq": max(8192, row.whole("seq")), **shape})


def _cluster(row: TableRow) -> Cluster:
    text, devices = row.text("gpu"), row.whole("gpus")
    for pattern, cluster, device, lanes in NODES:
        if re.search(pattern, text, re.IGNORECASE):
            node = cluster_from(cluster)
            node = replace(node, device=presets.load("device", Device, device)) if device else node
            inner, *outer = node.levels
            if lanes < 1 and inner.link:
                slot = replace(inner.link, bandwidth=lanes * inner.link.bandwidth)
                node = replace(node, host_link=slot, levels=(replace(inner, link=slot), *outer))
            return vocabulary.cut(node, devices, min(devices, node.levels[0].width))
    return vocabulary.machine(vocabulary.machine_name(text, "gpu"), devices, min(devices, 8))


def _strategy(row: TableRow, source: Source) -> dict[str, Any]:
    sharding, devices = row.text("zero_or_fsdp").lower(), row.whole("gpus")
    zero = vocabulary.zero(sharding) if "no_shard" not in sharding else 0
    checkpointing = row.text("gradient_checkpointing").lower()
    dp = row.whole("dp", 0, minimum=0) or devices
    tp = min(4, devices // dp) if "=" in row.text("tp") else row.whole("tp", 1)
    fields: dict[str, Any] = {
        "tp": tp, "cp": max(1, devices // dp // tp), "microbatch": row.whole("micro_batch"),
        "zero": (zero if zero is not None else source.zero) * (devices > 1),
        "recompute": "full" if checkpointing.startswith("yes") else "none",
    }  # fmt: skip
    leaves = row.text("offload").lower()
    if "params" in leaves or leaves.startswith("cpu"):
        fields["offload"] = {"weights": 1.0, "gradients": 1.0, "optimizer": 1.0}
    if "activations" in leaves:
        fields["offload"] = {**fields.get("offload", {}), "activations": 1.0}
    return fields


def _training(row: TableRow) -> dict[str, Any]:
    method, kept, mixed = (row.text(name).lower() for name in ("method", "base_precision", "trainable_precision"))
    full, half = method == "full", "fp16" in f"{kept} {mixed}" or "float16" in mixed.split()
    micro = row.whole("micro_batch")
    copies = row.whole("dp", 0, minimum=0) or row.whole("gpus")
    fields: dict[str, Any] = {
        "global_batch": row.whole("global_batch", 0, minimum=0) or copies * micro * row.whole("grad_accum", 1),
        "seq": _tokens(row),
        "precision": "fp8" if kept.startswith("fp8") else ("fp16" if half else "bf16"),
        "optimizer": "adam8bit" if "8bit" in row.text("optimizer").lower() else "adamw",
    }
    if full:
        return fields
    if "lora" not in method:
        raise SpecError("method", f"{shown(method)} is not priced", "use full or LoRA")
    base = next((name for name, pattern in _BASES if re.search(pattern, kept)), "computed")
    rank = re.match(r"\d+", row.text("rank"))
    named = row.text("target_modules")
    targets = next((names for pattern, names in TARGETS if re.search(pattern, named, re.IGNORECASE)), None)
    if targets is None:
        raise SpecError("target_modules", f"{shown(named)} names no layers", "add it to fine_tuning_sources.py")
    fields["adapters"] = {
        "rank": int(rank[0]) if rank else 8, "targets": list(targets), "dropout": row.number("dropout") or 0.0
    }  # fmt: skip
    if "fully trained" in named:
        fields["trained"] = ["embedding", "head"]
    return fields | {"base_precision": base}


def _tokens(row: TableRow) -> int:
    """Tokens of a sequence: padded or unpadded ones by their mean where it is printed, else as long as the longest."""
    mean = row.number("mean_length")
    longest = row.whole("seq")
    return longest if mean is None or _is_filled(row) else round(mean)


def _is_filled(row: TableRow) -> bool:
    """Whether every sequence has the same length."""
    packing = row.text("packing").lower()
    return packing.startswith(("yes", "unknown")) or "of this length" in packing or "full length" in packing


def _seconds(row: TableRow, source: Source, job: Job) -> tuple[float | None, str]:
    """The time of an optimizer step, where the tokens of a step are known."""
    if not source.times(row) or not (_is_filled(row) or row.number("mean_length")):
        return None, ""
    if samples := row.number("rep_samples_s"):
        return job.sequences / samples, "samples/s"
    if seconds := row.number("rep_step_s"):
        return seconds, "step time"
    if tokens := row.number("rep_tok_s_gpu"):
        return job.tokens_per_step / job.cluster.devices / tokens, "tokens/s"
    minutes, steps = row.number("rep_minutes_total"), row.number("rep_steps")
    return (60 * minutes / steps, "time of all steps") if minutes and steps else (None, "")


def _memory_bytes(row: TableRow) -> float | None:
    """The peak, where the sequence that sets it is known, and gradients and states are on the device when they are due.

    Not priced are updates within the backward pass, which free each gradient at once, and states in pages.
    """
    updates = row.text("kernels") + row.text("optimizer")
    unlike = "optim_in_bwd" in updates or "Paged" in updates
    if not _is_filled(row):
        unlike |= row.number("mean_length") is not None or "pads to longest" in row.text("notes")
    size = row.number("rep_peak_mem_gib")
    if not size or unlike or "bound" in row.text("rep_mem_kind") or row.text("fits").upper().startswith("OOM"):
        return None
    return size * 2**30
