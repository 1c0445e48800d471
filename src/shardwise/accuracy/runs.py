"""Published training runs as jobs: one row of the table, completed from its source's recipe, and what it reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.accuracy import vocabulary
from shardwise.accuracy.sources import EARLY_MEGATRON, SET_ASIDE, source_of
from shardwise.accuracy.table import Source, TableRow, read_table, release
from shardwise.accuracy.vocabulary import Ports, counted, machine, machine_name
from shardwise.cost.compute.flops import flops_per_token, head_forward_flops, layer_forward_flops
from shardwise.cost.memory.device import peak_memory
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.schedules import PLAIN, schedule_record
from shardwise.spec.stack import Stack, stack_from

TIME_COLUMNS = (
    "rep_iter_s",
    "derived_iter_s",
    "rep_tok_s_gpu",
    "rep_samples_s_gpu",
    "rep_tflops_gpu",
    "rep_mfu_pct",
)
MEMORY_COLUMN = "rep_mem_gib"
_DROPPING = (EARLY_MEGATRON, "deepspeed@2021")  # they run Megatron-LM's GPT of their time, whose dropout is 0.1


def reported_seconds(row: TableRow, source: Source, job: Job) -> tuple[float | None, str]:
    """The step time and where it comes from; the first of ``TIME_COLUMNS`` that is filled in.

    A row may report memory alone.
    """
    devices = job.cluster.devices
    for column in TIME_COLUMNS if source.times(row) else ():
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
    if row.number(MEMORY_COLUMN):
        return None, ""
    raise SpecError(
        "rep_iter_s",
        "the row reports no time and no memory",
        "give an iteration time, tokens/s, TFLOP/s, MFU or peak memory",
    )


def _counted_flops(row: TableRow, source: Source, job: Job) -> tuple[float, str]:
    """FLOPs of a step by the row's own convention, else by its source's; and that convention in words."""
    own = counted(row.text("flops_convention"))
    convention = own.convention or source.convention
    per_token = flops_per_token(job.model, job.training.seq, convention, job.training.tuning)
    recomputed = own.recomputed or (own.convention is None and source.counts_recomputed)
    if recomputed and job.strategy.recompute == "full":
        per_token += per_token / 3 - head_forward_flops(job.model)
    elif recomputed and "attention" in job.recomputed_operators:
        per_token += sum(
            count
            * layer_forward_flops(job.model, job.training.seq, kind, halve_causal=convention == "causal").attention
            for kind, count in job.model.layers_of_kinds
        )
    return per_token * job.tokens_per_step, convention + (" with recompute" if recomputed else "")


def reported_memory(row: TableRow, source: Source) -> tuple[float | None, str]:
    """Bytes per device if the row has them, and what they count; a column of GB holds 10⁹ where its kind says so.

    Activations grow with the microbatch: where that is assumed, the figure says nothing of a prediction.
    """
    value, kind = row.number(MEMORY_COLUMN), row.text("rep_mem_kind")
    if "mbs" in row.assumed:
        return None, kind
    decimal = "GB" in kind and "GiB" not in kind and source.memory == "as printed"
    return (value * (1e9 if decimal else 2**30) if value else None), kind


def reported_rank(kind: str, source: Source, stages: int) -> int | None:
    """The pipeline rank whose memory a figure is, None for the fullest."""
    if source.memory.endswith("first rank"):
        return 0
    return stages - 1 if "last rank" in kind else None


def counts_reserved(kind: str, source: Source) -> bool:
    """Whether a figure is what the allocator reserved; text in brackets is about another figure."""
    return source.memory.startswith("reserved") or "reserved" in kind.partition("(")[0].lower()


# Columns that change a prediction wherever they are filled in: a table without one would be misread. Two more may be
# there: `stack`, a preset; and `network`, a cluster of the catalogue, or a link: "roce-200", "4 x roce-100" in a node.
COLUMNS = (
    *("row_id", "source", "arch", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated_mlp", "vocab"),
    *("seq", "n_experts", "topk", "moe_ffn", "n_shared", "n_dense_layers", "gpu", "gpus"),
    *("tp", "sp", "pp", "vpp", "cp", "ep", "dp", "zero", "mbs", "gbs", "precision", "recompute", "schedule"),
)


@dataclass(frozen=True)
class PublishedRun:
    """One published run: the job as completed, and what was reported of it: time, memory, or both."""

    row: TableRow
    source: Source
    job: Job
    reported_seconds: float | None
    reported_from: str
    reported_memory_bytes: float | None
    memory_kind: str

    @property
    def row_id(self) -> str:
        return self.row.text("row_id")

    @property
    def model_name(self) -> str:
        return self.row.text("model")

    @property
    def device(self) -> str:
        return self.row.text("gpu")

    @property
    def set_aside(self) -> str:
        """Why the row is scored apart, empty if it is not."""
        return SET_ASIDE.get(self.row_id, "")


def read_runs(path: Path | str) -> Iterator[PublishedRun]:
    """Every row of a table in the layout of validation/training_runs.csv."""
    return map(run_from_row, run_rows(path))


def run_rows(path: Path | str) -> list[TableRow]:
    """The rows of such a table, not yet read as runs."""
    rows = read_table(path, COLUMNS, "runs")
    reports = (*TIME_COLUMNS, MEMORY_COLUMN)
    if not any(column in rows[0].cells for column in reports):
        raise SpecError("table", "no column reports a time or memory", f"give one of {', '.join(reports)}")
    return rows


def run_from_row(row: TableRow) -> PublishedRun:
    """The run that one row describes."""
    source = source_of(row)
    row = source.filled(row)
    try:
        job = _with_room(_job(row, source), row)
        return PublishedRun(row, source, job, *reported_seconds(row, source, job), *reported_memory(row, source))
    except SpecError as error:
        raise error.under(f"row {row.text('row_id')}") from None


def measured_run(name: str, job: Job, step_seconds: float | None, memory_bytes: float | None) -> PublishedRun:
    """A run of one's own: its job is known, and nothing of it assumed; memory is that of its tensors."""
    known = {"model": job.model.name, "vocab": str(job.model.vocab), "gpu": job.cluster.device.name}
    cells = {"row_id": name, "source": "measured", **known}
    source = Source("measured", "", job.stack.name, "the job of the run")
    return PublishedRun(TableRow(cells), source, job, step_seconds, "measured steps", memory_bytes, "allocated")


def _job(row: TableRow, source: Source) -> Job:
    stack = _named_stack(row, source)
    variants = [variant for variant in source.variants if variant.applies(row)]
    for variant in variants:
        stack = variant.on(stack)
    precision = vocabulary.precision(row.text("precision"), fp32_gradients=source.fp32_gradients)
    training: dict[str, Any] = {
        "global_batch": _global_batch(row),
        "seq": row.whole("seq"),
        "precision": precision,
        "attention": "unfused" if stack.attention == "unfused" else "flash",
        "dropout": stack.version in _DROPPING,
    }
    for variant in variants:
        training |= variant.training
    model, cluster = _model(row, source), _cluster(row, source)
    running = stack.running(precision, cluster.device.name, moe=model.moe is not None)
    return Job.from_dict(
        {
            "model": model,
            "cluster": cluster,
            "strategy": _strategy(row, source, running),
            "training": training,
            "stack": stack,
        }
    )


def _with_room(job: Job, row: TableRow) -> Job:
    """With half the microbatch, as often as it takes, where it is assumed and would not have fitted: the run did."""
    strategy, usable = job.strategy, job.cluster.device.usable_memory
    if "mbs" not in row.assumed or strategy.microbatch % 2 or peak_memory(job).total <= usable:
        return job
    return _with_room(job.with_strategy(microbatch=strategy.microbatch // 2), row)


def _named_stack(row: TableRow, source: Source) -> Stack:
    """What the row names, else what its source runs, in the version that the row is of."""
    versions = [variant.version for variant in source.variants if variant.version and variant.applies(row)]
    known = versions[-1] if versions else presets.at_release("stack", source.stack, release(row))
    named = row.text("stack")
    try:
        return stack_from(known if known.partition("@")[0] == named else named or known)
    except SpecError as error:
        raise error.under("stack") from None


def _cluster(row: TableRow, source: Source) -> Cluster:
    """The usual machine of the row's device, or on the network that the row names."""
    name, devices = machine_name(row.text("gpu"), "gpu"), row.whole("gpus")
    node_devices = row.whole("gpus_per_node", devices)
    network = vocabulary.network(row.text("network"))
    name = network if isinstance(network, str) else source.machines.get(name, name)
    cluster = machine(name, devices, node_devices, vocabulary.slices(row.text("locator")))
    return replace(cluster, levels=network.on(cluster.levels)) if isinstance(network, Ports) else cluster


def _model(row: TableRow, source: Source) -> Model:
    gated, notes = bool(row.flag("gated_mlp")), row.text("notes").lower()
    early = source.stack == EARLY_MEGATRON and not gated  # GPT-3's block: learned positions, biases, one embedding
    hidden, heads = row.whole("hidden"), row.whole("heads")
    fields: dict[str, Any] = {
        "name": row.text("model") or row.text("row_id"),
        "layers": row.whole("layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.whole("kv_heads", heads),
        "head_dim": row.whole("head_dim", max(1, hidden // heads)),
        "ffn": row.whole("ffn"),
        "vocab": row.whole("vocab", source.vocab),
        "max_seq": row.whole("seq"),
        "activation": "swiglu" if gated else "gelu",
        "norm": "rmsnorm" if gated else "layernorm",
        "positions": "learned" if early else "rope",
        "tied_embeddings": early or ("tied embeddings" in notes and "untied" not in notes),
    }
    if early:
        fields |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
    if row.number("n_experts"):
        width = row.whole("moe_ffn")
        fields["moe"] = {
            "experts": row.whole("n_experts"),
            "top_k": row.whole("topk"),
            "ffn": width,
            "shared_ffn": int((row.number("n_shared") or 0) * width),
            "dense_layers": row.whole("n_dense_layers", 0, minimum=0),
        }
    if "mla" in row.text("arch").lower():
        fields["mla"] = vocabulary.latent_attention(row.text("notes"))
    for variant in source.variants:
        fields |= variant.model if variant.applies(row) else {}
    return Model.from_dict(fields)


def _strategy(row: TableRow, source: Source, stack: Stack) -> dict[str, Any]:
    tp, pp = row.whole("tp"), row.whole("pp")
    method = vocabulary.context_method(row.text("notes")) or source.context_method
    printed_zero = vocabulary.zero(row.text("zero"))
    fields: dict[str, Any] = {
        "tp": tp, "pp": pp, "dp": row.whole("dp", 0) or None, "cp": row.whole("cp", 1), "ep": row.whole("ep", 1),
        "sequence_parallel": _sequence_parallel(row), "microbatch": _microbatch(row, source),
        "context_method": method, "dispatch": stack.dispatch, "overlap": stack.overlap,
        "zero": source.zero if printed_zero is None else printed_zero,
    }  # fmt: skip
    group = vocabulary.shard_group(row.text("zero"))
    if group and group < _data_parallel(row):
        fields["shard_group"] = group
    if row.number("n_experts"):
        fields["expert_tp"] = vocabulary.expert_tp(row.text("notes"), tp, row.whole("ep", 1))
    if pp > 1:
        fields |= _pipeline(row, source, pp)
    recipe: dict[str, Any] = {}
    for variant in source.variants:
        recipe |= variant.strategy if variant.applies(row) else {}
    cells = row.text("recompute"), row.text("precision")
    printed = vocabulary.recompute(*cells, experts=bool(row.number("n_experts"))) or {}
    # What the table's author assumed gives way to the recipe.
    return fields | (printed | recipe if "recompute" in row.assumed else recipe | printed)


def _sequence_parallel(row: TableRow) -> bool:
    """As printed; if it is not, on with tensor parallelism, as every framework recommends."""
    printed = None if "sp" in row.assumed else row.flag("sp")
    return row.whole("tp") > 1 if printed is None else printed


def _data_parallel(row: TableRow) -> int:
    others = row.whole("tp") * row.whole("pp") * row.whole("cp", 1)
    return row.whole("dp", max(1, row.whole("gpus") // others))


def _global_batch(row: TableRow) -> int:
    if row.number("gbs") is None and row.number("mbs") and row.number("microbatches"):
        return _data_parallel(row) * row.whole("mbs") * row.whole("microbatches")
    return row.whole("gbs")


def _microbatch(row: TableRow, source: Source) -> int:
    share = max(1, _global_batch(row) // _data_parallel(row))
    if row.number("mbs") is not None:
        return row.whole("mbs")
    if row.number("microbatches"):
        return max(1, share // row.whole("microbatches"))
    return share if source.microbatch == "local batch" and row.whole("pp") == 1 else 1


def _pipeline(row: TableRow, source: Source, pp: int) -> dict[str, Any]:
    """Schedule, chunks per rank and layers per stage of a pipeline."""
    layers, schedule = row.whole("layers"), vocabulary.schedule(row.text("schedule")) or PLAIN
    chunks = row.whole("vpp", max(1, layers // pp) if source.layer_per_chunk else 1)
    if chunks == schedule_record(schedule).chunks_per_rank(pp, 1):  # a V shape has two by itself
        chunks = 1
    if chunks > 1:
        schedule = "interleaved"
    elif schedule_record(schedule).chooses_chunks:
        schedule = PLAIN
    fields: dict[str, Any] = {"schedule": schedule, "interleave": chunks}
    stages = pp * schedule_record(schedule).chunks_per_rank(pp, chunks)
    layout = vocabulary.stage_layers(row.text("notes"))
    if layout and len(layout) == stages:
        return fields | {"stage_layers": layout}
    if source.stages_by_cost:
        from shardwise.interop.frameworks.nanotron import layers_by_cost

        sizes = (row.whole(name) for name in ("layers", "hidden", "ffn", "vocab"))
        return fields | {"stage_layers": layers_by_cost(stages, *sizes)}
    if layers % stages == 0:
        return fields
    each, spare = divmod(layers + 2, stages)
    if spare == 0:
        # 22 of 24, 126 of 128: embedding and loss take the place of one layer each (Zero Bubble's Table 3, Llama 3.1).
        return fields | {"stage_layers": [each - (stage in (0, stages - 1)) for stage in range(stages)]}
    return fields | {"stage_layers": "balanced"}
