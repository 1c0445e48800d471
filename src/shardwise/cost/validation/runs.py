"""Published training runs as jobs: one row of the table, completed from its source's recipe."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.cost.flops import flops_per_token
from shardwise.cost.validation.sources import SET_ASIDE, Source, source_of
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack, stack_from

CLUSTERS = {
    "A100-SXM-80GB": "dgx-a100",
    "H100-SXM-80GB": "dgx-h100",
    "H100-96GB-HBM2e-500W": "grand-teton-h100",
    "B200-SXM": "dgx-b200",
    "GB200-NVL72": "gb200-nvl72",
}
COLUMNS = ("row_id", "source", "layers", "hidden", "heads", "ffn", "seq", "gpu", "gpus", "tp", "pp", "dp", "gbs")


@dataclass(frozen=True)
class Run:
    """One published run: the job as completed, and what was reported of it."""

    row_id: str
    model_name: str
    device: str
    source: Source
    job: Job
    reported_seconds: float
    reported_from: str
    reported_memory_bytes: float | None
    memory_kind: str
    set_aside: str  # why the row is scored apart, empty if it is not


def read_runs(path: Path | str) -> Iterator[Run]:
    """Every row of a table in the layout of validation/training_runs.csv."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError("table", f"{shown(str(path))} cannot be read ({error})", "check the file") from None
    for column in COLUMNS:
        if rows and column not in rows[0]:
            raise SpecError("table", f"column {column!r} is missing", f"a table of runs has {', '.join(COLUMNS)}, ...")
    return map(run_from_row, rows)


def run_from_row(row: Mapping[str, str]) -> Run:
    """The run that one row describes."""
    source = source_of(row["source"])
    if source is None:
        source = Source(row["source"], "shardwise", "no recipe known: this project's own defaults")
    try:
        job = _job(row, source)
        seconds, origin = _reported_seconds(row, source, job)
    except SpecError as error:
        raise error.under(f"row {row['row_id']}") from None
    memory = _number(row, "rep_mem_gib", None)
    unit = 1e9 if "GB" in row.get("rep_mem_kind", "") and "GiB" not in row["rep_mem_kind"] else 2**30
    return Run(
        row["row_id"],
        row.get("model", ""),
        row["gpu"],
        source,
        job,
        seconds,
        origin,
        None if memory is None else memory * unit,
        row.get("rep_mem_kind", ""),
        SET_ASIDE.get(row["row_id"], ""),
    )


def _number(row: Mapping[str, str], column: str, default: Any = 0.0) -> Any:
    text = (row.get(column) or "").strip()
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise SpecError(column, f"{shown(text)} is not a number", "write a number or leave it empty") from None


def _whole(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    value = _number(row, column, default)
    if value is None or value != int(value):
        raise SpecError(column, f"{shown(row.get(column))} is not a whole number", "write one")
    return int(value)


def _model(row: Mapping[str, str], source: Source) -> Model:
    gated = row.get("gated_mlp") == "1"
    fields: dict[str, Any] = {
        "name": row.get("model") or row["row_id"],
        "layers": _whole(row, "layers"),
        "hidden": _whole(row, "hidden"),
        "heads": _whole(row, "heads"),
        "kv_heads": _whole(row, "kv_heads", _whole(row, "heads")),
        "head_dim": _whole(row, "head_dim", _whole(row, "hidden") // _whole(row, "heads")),
        "ffn": _whole(row, "ffn"),
        "vocab": _whole(row, "vocab", source.vocab or 32_000),
        "max_seq": _whole(row, "seq"),
        "activation": "swiglu" if gated else "gelu",
        "norm": "rmsnorm" if gated else "layernorm",
        "positions": "rope" if gated or source.stack != "megatron-2022" else "learned",
        "tied_embeddings": "tied embeddings" in row.get("notes", "") and "untied" not in row.get("notes", ""),
    }
    if not gated and source.stack == "megatron-2022":
        fields |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "tied_embeddings": True}
    if _number(row, "n_experts"):
        width = _whole(row, "moe_ffn")
        fields["moe"] = {
            "experts": _whole(row, "n_experts"),
            "top_k": _whole(row, "topk"),
            "ffn": width,
            "shared_ffn": _whole(row, "n_shared", 0) * width,
            "dense_layers": _whole(row, "n_dense_layers", 0),
        }
    if "mla" in row.get("arch", ""):
        # DeepSeek-V2 and V3 have the same latent attention (arXiv 2405.04434, 2412.19437).
        fields["mla"] = {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    return Model.from_dict(fields)


def _cluster(row: Mapping[str, str]) -> Cluster:
    name = CLUSTERS.get(row["gpu"])
    if name is None:
        raise SpecError("gpu", f"{shown(row['gpu'])} is unknown", "use one of " + ", ".join(CLUSTERS))
    return cluster_from(name).with_devices(_whole(row, "gpus"))


def _precision(row: Mapping[str, str], stack: Stack) -> str:
    text = row.get("precision", "").lower()
    if "nvfp4" in text:
        return "nvfp4"
    if "mxfp8" in text or "fp8-mx" in text:
        return "mxfp8"
    if "fp8" in text or "float8" in text:
        return "fp8"
    if "fp32 grad" in text or stack.name == "megatron-core":
        return "bf16-fp32-grads"
    return "fp16" if text.startswith("fp16") else "bf16"


_SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved 1f1b": "interleaved",
    "1f1b-i": "interleaved",
    "zb-1p": "zb-1p",
    "zb-2p": "zb-2p",
}


def _strategy(row: Mapping[str, str], source: Source, stack: Stack) -> dict[str, Any]:
    tp, pp, dp = _whole(row, "tp"), _whole(row, "pp"), _whole(row, "dp")
    schedule = _SCHEDULES.get(re.sub(r" if.*", "", row.get("schedule", "").lower()), "1f1b")
    microbatch = _microbatch(row, source, dp, pp)
    fields: dict[str, Any] = {
        "tp": tp, "pp": pp, "dp": dp, "cp": _whole(row, "cp", 1), "ep": _whole(row, "ep", 1), "expert_tp": 1,
        "sequence_parallel": row.get("sp") == "1" or not source.printed_sequence_parallel,
        "microbatch": microbatch, "context_method": source.context_method, "dispatch": stack.dispatch,
        "overlap": stack.overlap, "zero": _zero(row), **_recompute(row),
    }  # fmt: skip
    if row.get("n_experts", "") == "":
        del fields["expert_tp"]
    for pattern, changes in source.strategy_changes:
        if re.search(pattern, row["row_id"]):
            fields |= changes
    if pp > 1:
        chunks = _chunks(row, source, pp)
        fields["schedule"] = "interleaved" if chunks > 1 else ("1f1b" if schedule == "interleaved" else schedule)
        fields["interleave"] = chunks
        layers, stages = _whole(row, "layers"), pp * chunks
        if source.ends_lighter:
            each = (layers + 2) // stages
            fields["stage_layers"] = [each - (stage in (0, stages - 1)) for stage in range(stages)]
        elif layers % stages:
            fields["stage_layers"] = "balanced"
    return fields


def _microbatch(row: Mapping[str, str], source: Source, dp: int, pp: int) -> int:
    printed = _number(row, "mbs", None)
    if printed is not None:
        return int(printed)
    if source.microbatch == "one" or (source.microbatch == "local batch" and pp > 1):
        return 1
    return max(1, _whole(row, "gbs") // dp)


def _chunks(row: Mapping[str, str], source: Source, pp: int) -> int:
    if source.layer_per_chunk:
        return max(1, _whole(row, "layers") // pp)
    return _whole(row, "vpp", 1)


def _zero(row: Mapping[str, str]) -> int:
    text = row.get("zero", "")
    return 3 if "3" in text else 1 if text.startswith("1") else 0


def _recompute(row: Mapping[str, str]) -> dict[str, Any]:
    text = row.get("recompute", "")
    if text.startswith("full-block"):
        return {"recompute": "full", "recompute_layers": int(re.findall(r"\d+", text)[0])}
    if text.startswith("full"):
        return {"recompute": "full"}
    if "attention" in text:
        return {"recompute": "selective", "recompute_operators": ["attention"]}
    if "per-op" in text or "SAC" in text:
        return {"recompute": "selective", "recompute_operators": ["alternate-products"]}
    return {}


def _stack(row: Mapping[str, str], source: Source) -> Stack:
    stack = stack_from(source.stack)
    for part, changes in source.stack_changes:
        if re.search(part, row["row_id"]):
            stack = replace(stack, **changes)
    return stack


def _job(row: Mapping[str, str], source: Source) -> Job:
    stack = _stack(row, source)
    training = {
        "global_batch": _whole(row, "gbs"),
        "seq": _whole(row, "seq"),
        "precision": _precision(row, stack),
        "attention": "unfused" if stack.attention == "unfused" else "flash",
        "dropout": stack.name == "megatron-2022",
    }
    return Job.from_dict(
        {
            "model": _model(row, source),
            "cluster": _cluster(row),
            "strategy": _strategy(row, source, stack),
            "training": training,
            "stack": stack,
        }
    )


def _reported_seconds(row: Mapping[str, str], source: Source, job: Job) -> tuple[float, str]:
    """The step time, as printed or from what is printed, and which."""
    if _number(row, "rep_iter_s"):
        return _number(row, "rep_iter_s"), "iteration time"
    devices, sequences = job.cluster.devices, job.sequences
    if _number(row, "rep_tok_s_gpu"):
        return job.tokens_per_step / devices / _number(row, "rep_tok_s_gpu"), "tokens/s"
    if _number(row, "rep_samples_s_gpu"):
        return sequences / devices / _number(row, "rep_samples_s_gpu"), "samples/s"
    flops = flops_per_token(job.model, job.training.seq, source.convention) * job.tokens_per_step / devices
    if _number(row, "rep_tflops_gpu"):
        return flops / (_number(row, "rep_tflops_gpu") * 1e12), f"TFLOP/s, {source.convention}"
    if _number(row, "rep_mfu_pct") and source.peak:
        return flops / (_number(row, "rep_mfu_pct") / 100 * source.peak), f"MFU, {source.convention}"
    if _number(row, "derived_iter_s"):
        return _number(row, "derived_iter_s"), "derived"
    raise SpecError("rep_iter_s", "the row reports no time", "give an iteration time, tokens/s, TFLOP/s or MFU")
