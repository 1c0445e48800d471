"""Rows as other people may write them: names, words, blanks, and what the reported time comes from."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from shardwise.accuracy import vocabulary
from shardwise.accuracy.runs import PublishedRun, read_runs, run_from_row
from shardwise.accuracy.scores import score, summary
from shardwise.accuracy.table import TableRow
from shardwise.accuracy.vocabulary import cut, machine_name
from shardwise.cost.compute.flops import flops_per_token
from shardwise.cost.memory.device import memory_of_rank, peak_memory
from shardwise.cost.memory.room import allocated_bytes
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError

VALIDATION = Path(__file__).parents[2] / "validation"
with (VALIDATION / "training_runs.csv").open(newline="") as file:
    ROWS = {row["row_id"]: row for row in csv.DictReader(file)}
BRIDGE = "mbridge_26.04_DGX-GB200_Llama3-70B_64_MXFP8_2"
EXPERTS = "mbridge_26.04_DGX-GB200_Qwen3-30B-A3B_8_MXFP8_1"


def run_like(row_id: str, **cells: object) -> PublishedRun:
    return run_from_row(TableRow({**ROWS[row_id], **{column: str(cell) for column, cell in cells.items()}}))


# -- the reported time -----------------------------------------------------------------------------------

ALL_TIMES: dict[str, object] = {"rep_iter_s": 1.5, "derived_iter_s": 2, "rep_tok_s_gpu": 4096, "rep_samples_s_gpu": 1,
                                "rep_tflops_gpu": 100, "rep_mfu_pct": 40}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "origin"),
    [("rep_iter_s", "iteration time"), ("derived_iter_s", "derived time"), ("rep_tok_s_gpu", "tokens/s"),
     ("rep_samples_s_gpu", "samples/s"), ("rep_tflops_gpu", "TFLOP/s, full-attention"),
     ("rep_mfu_pct", "MFU, full-attention")],
)  # fmt: skip
def test_the_first_time_that_a_row_has_is_taken(first: str, origin: str) -> None:
    earlier = list(ALL_TIMES)[: list(ALL_TIMES).index(first)]
    run = run_like("kor22_t5_22B_full", **{**ALL_TIMES, **dict.fromkeys(earlier, "")})
    job = run.job
    flops = flops_per_token(job.model, 2048, "full-attention") * job.tokens_per_step / 8
    seconds = {"rep_iter_s": 1.5, "derived_iter_s": 2, "rep_tok_s_gpu": 4 * 2048 / 8 / 4096, "rep_samples_s_gpu": 0.5,
               "rep_tflops_gpu": flops / 100e12, "rep_mfu_pct": flops / (0.4 * 312e12)}[first]  # fmt: skip
    assert run.reported_from == origin
    assert run.reported_seconds == pytest.approx(seconds)


NO_TIME = dict.fromkeys(ALL_TIMES, "")


def test_a_row_of_memory_alone_has_no_error_of_time() -> None:
    one = score(run_like("simumax_llama3_70b_l12_tp1_pp2_dp4_mbc4_cef", **NO_TIME, rep_mem_gib=20))
    assert one.reported_seconds is None and one.time_error is None
    assert one.memory_error == pytest.approx(one.predicted_memory_bytes / (20 * 2**30) - 1)
    assert summary([one]).time_mape is None and summary([one]).memory_mape == abs(one.memory_error or 0)
    with pytest.raises(SpecError, match="no time and no memory"):
        run_like("kor22_t5_22B_full", **NO_TIME)


def test_memory_is_not_scored_where_the_microbatch_is_assumed() -> None:
    one = score(run_like("kor22_t5_22B_full", rep_mem_gib=40, assumed_fields="seq,mbs"))
    assert one.reported_memory_bytes is None and one.memory_error is None


@pytest.mark.parametrize(
    ("notes", "layers"),
    [
        ("layout Et*3|(tt|)*6mL; expert TP 1", [3, 2, 2, 2, 2, 2, 2, 0]),
        ("layout Et|tt|t*2,L", [1, 2, 2]),
        ("no such word", None),
    ],
)
def test_layouts_of_megatron(notes: str, layers: list[int] | None) -> None:
    assert vocabulary.stage_layers(notes) == layers


def test_a_v_shape_has_its_two_chunks_by_itself() -> None:
    strategy = run_like("kor22_t5_175B_full", schedule="V-half", vpp=2).job.strategy
    assert (strategy.schedule, strategy.chunks_per_rank, strategy.interleave) == ("v-half", 2, 1)
    assert run_like("kor22_t5_175B_full", schedule="interleaved 1F1B", vpp=3).job.strategy.interleave == 3


def test_a_figure_of_the_last_rank_is_compared_with_that_rank() -> None:
    """Of a pipeline that fills its first stage most."""
    row = "kor22_t5_175B_full"
    fullest = score(run_like(row, rep_mem_gib=40, rep_mem_kind="max allocated")).predicted_memory_bytes
    last = score(run_like(row, rep_mem_gib=40, rep_mem_kind="max allocated, last rank"))
    job = run_like(row).job
    assert last.predicted_memory_bytes == allocated_bytes(job, memory_of_rank(job, 7)) < fullest


@pytest.mark.parametrize(
    ("text", "convention", "recomputed", "peak"),
    [
        ("MFU=72Blsh^2(1+s/6h+v/12hL)/t/312e12; HFU=72Blsh^2(1+s/3h+v/12hL)", "full-attention", False, 312e12),
        ("96BLsh^2(1+s/6h+V/16hL)", "full-attention", True, None),
        ("model FLOPs, causal attention halved", "causal", False, None),
        ("full attention, with recompute", "full-attention", True, None),
        ("hardware FLOPs", None, True, None),
        ("nanotron MFU, 989 TF peak", None, False, 989e12),
        ("6ND", "6nd", False, None),
        ("as above", None, False, None),
        ("model FLOPs (Megatron num_floating_point_operations)", None, False, None),
        ("", None, False, None),
    ],
)
def test_the_rows_own_way_of_counting(text: str, convention: str | None, recomputed: bool, peak: float | None) -> None:
    assert vocabulary.counted(text) == vocabulary.Counted(convention, recomputed, peak)


def test_a_counted_recomputed_pass_makes_the_step_longer() -> None:
    """Narayanan et al. 2021, eq. 3: 96·B·s·L·h²(1 + s/6h + V/16Lh) with full recompute."""
    blank = {"rep_iter_s": "", "rep_tflops_gpu": 100}
    run = run_like("kor22_t5_175B_full", **blank, flops_convention="96BLsh^2")
    batch, s, layers, h, v = 64, 2048, 96, 12288, 51200
    flops = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert run.reported_seconds == pytest.approx(flops / 64 / 100e12, rel=1e-3)
    assert run.reported_from == "TFLOP/s, full-attention with recompute"


# -- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "recipe"),
    [("BF16", "bf16"), ("bfloat16 mixed", "bf16"), ("bf16, fp32 grad", "bf16-fp32-grads"), ("FP16 mixed", "fp16"),
     ("float16", "fp16"), ("FP8", "fp8"), ("FP8-CS", "fp8"), ("fp8_sc", "fp8"),
     ("float8 rowwise + compile", "fp8-rowwise"), ("FP8-MX", "mxfp8"), ("fp8_mx", "mxfp8"),
     ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"), ("fp4", "nvfp4"),
     ("FP32", "fp32"), ("TF32", "fp32"), ("", "bf16"), ("mixed", "bf16")],
)  # fmt: skip
def test_precision(text: str, recipe: str) -> None:
    assert vocabulary.precision(text, fp32_gradients=False) == recipe


@pytest.mark.parametrize(
    ("text", "precision", "fields"),
    [
        ("none", "bf16", {"recompute": "none"}),
        ("None in recipe (Aug-2026 recipe)", "FP8", {"recompute": "none"}),
        ("Full", "bf16", {"recompute": "full"}),
        ("full (uniform, 1 layer)", "bf16", {"recompute": "full"}),
        ("full-block 5 layers (FP8) / none (BF16, CP2)", "FP8-CS", {"recompute": "full", "recompute_layers": 5}),
        ("full-block 5 layers (FP8) / none (BF16, CP2)", "BF16", {"recompute": "none"}),
        ("selective", "bf16", {"recompute": "selective", "recompute_operators": ["attention"]}),
        ("selective (core_attn)", "bf16", {"recompute": "selective", "recompute_operators": ["attention"]}),
        ("mla_up_proj, mlp", "fp8", {"recompute": "selective", "recompute_operators": ["up-projection"]}),
        ("layernorm, moe_act", "fp8", {"recompute": "selective", "recompute_operators": ["activation", "norm"]}),
        ("selective (layernorm, moe)", "bf16", {"recompute": "selective", "recompute_operators": ["norm", "experts"]}),
        ("per-op SAC", "bf16", {"recompute": "selective", "recompute_operators": ["alternate-products"]}),
        ("", "bf16", None),
        ("unknown (selective/none)", "bf16", None),
        ("see perf_recipes", "bf16", None),
    ],
)
def test_recompute(text: str, precision: str, fields: dict[str, Any] | None) -> None:
    assert vocabulary.recompute(text, precision) == fields


_BUT_THE_PRODUCTS_OF_ATTENTION = ["attention", "norm", "activation", "mlp-up"]


@pytest.mark.parametrize(
    ("text", "operators", "leaves"),
    [
        ("minimal (keep dot outputs)", ["attention", "norm", "activation"], False),
        ("minimal_with_context", ["norm", "activation"], False),
        ("save_dot_except_mlpwi", _BUT_THE_PRODUCTS_OF_ATTENTION, False),
        ("save_dot_with_context_except_mlp", ["norm", "activation", "mlp-up"], False),
        ("custom: host offload of decoder_layer_input, out_proj, q/k/v proj; rest remat",
         _BUT_THE_PRODUCTS_OF_ATTENTION, True),
        ("custom: host offload of decoder_layer_input, q/k/v proj; rest remat", None, True),
        ("custom: host offload of decoder_layer_input; rest remat", None, True),
        ("custom: host offload of context, mlpwo; rest remat", None, False),
        ("custom: keep decoder_layer_input, remat q/k/v", None, False),
        ("qkv_proj offloaded to host, rest remat", None, False),
        ("save_qkv_proj", None, False),
    ],
)  # fmt: skip
def test_policies_of_maxtext(text: str, operators: list[str] | None, leaves: bool) -> None:
    """What is kept, on the device or on the host, and what is made again: some operators, or None for all of them."""
    fields = vocabulary.recompute(text, "bf16")
    assert fields is not None and fields["recompute"] == ("selective" if operators else "full")
    assert fields.get("recompute_operators") == operators
    assert fields.get("offload") == ({"activations": 1.0} if leaves else None)


def test_routed_experts_that_are_made_again_count_as_whole_layers() -> None:
    text = "custom: host offload of decoder_layer_input, out_proj, q/k/v proj; rest remat"
    assert vocabulary.recompute(text, "bf16", experts=True) == {"recompute": "full", "offload": {"activations": 1.0}}


@pytest.mark.parametrize(
    ("text", "name"),
    [("1F1B", "1f1b"), ("1F1B-I", "interleaved"), ("1F1B interleaved", "interleaved"), ("Interleaved", "interleaved"),
     ("interleaved 1F1B if PP>1 (v not given)", "interleaved"), ("ZB-H1", "zb-h1"), ("ZBH2", "zb-h2"),
     ("zb_2p", "zb-2p"), ("ZB-V", "zbv"), ("V-Half", "v-half"), ("DualPipe", "dualpipe"), ("GPipe", "gpipe"),
     ("none", None), ("", None)],
)  # fmt: skip
def test_schedule(text: str, name: str | None) -> None:
    assert vocabulary.schedule(text) == name


@pytest.mark.parametrize(
    ("text", "stage"),
    [("0", 0), ("1", 1), ("1.0", 1), ("1 (distributed optimizer)", 1), ("distributed optimizer", 1), ("ZeRO-2", 2),
     ("3 (Megatron-FSDP)", 3), ("FSDP2 (ZeRO-3)", 3), ("FSDP", 3), ("zero3", 3), ("DDP", 0), ("none", 0), ("", None)],
)  # fmt: skip
def test_zero(text: str, stage: int | None) -> None:
    assert vocabulary.zero(text) == stage


@pytest.mark.parametrize(
    ("text", "method"),
    [("truncated; CP=all-to-all; x", "ulysses"), ("CP = a2a", "ulysses"), ("CP=allgather", "all-gather"),
     ("CP=p2p", "ring"), ("local batch 1; ring-attention CP", "ring"), ("printed TPxCP=32", None), ("", None)],
)  # fmt: skip
def test_context_method(text: str, method: str | None) -> None:
    assert vocabulary.context_method(text) == method


@pytest.mark.parametrize(
    ("text", "cluster"),
    [("A100-SXM-80GB", "dgx-a100"), ("NVIDIA A100 80GB SXM4", "dgx-a100"), ("a100-sxm-40gb", "dgx-a100-40gb"),
     ("H100", "dgx-h100"), ("H100 SXM5 80GB HBM3", "dgx-h100"), ("H100-96GB-HBM2e-500W", "grand-teton-h100"),
     ("H100-500W", "grand-teton-h100"), ("H100-PCIe", "h100-pcie-server"), ("H200-SXM-141GB", "dgx-h200"),
     ("H800-SXM", "hgx-h800"), ("A800", "hgx-a800"), ("B200-SXM", "dgx-b200"), ("DGX-B200", "dgx-b200"),
     ("P6-B200: 4 node(s) x 8 B200", "p6-b200"), ("B300", "dgx-b300"), ("GB200-NVL72 (per GPU)", "gb200-nvl72"),
     ("gb300", "gb300-nvl72"), ("MI300X", "mi300x-node"), ("V100", "dgx-v100"), ("MI325X", "mi325x-node"),
     ("MI350X", "mi350x-node"), ("MI355X", "mi355x-node"), ("Gaudi2", "gaudi2-node"), ("TPUv5p", "tpu-v5p"),
     ("TPU-v4", "tpu-v4"), ("TPU-v5e", "tpu-v5e"), ("TPU-v6e (Trillium)", "tpu-v6e"), ("Ironwood", "tpu7x")],
)  # fmt: skip
def test_machines(text: str, cluster: str) -> None:
    assert machine_name(text, "gpu") == cluster


@pytest.mark.parametrize("text", ["H900", "GH200", "H20", "", "TPUv3"])
def test_an_unknown_machine_is_named_with_those_that_are_known(text: str) -> None:
    with pytest.raises(SpecError, match=r"is unknown; known are .*H100-SXM-80GB.*GB300"):
        machine_name(text, "gpu")


@pytest.mark.parametrize(
    ("name", "devices", "node", "widths"),
    [("dgx-h100", 64, 8, [8, 8]), ("dgx-h100", 4, 8, [4, 1]), ("dgx-h100", 16, 4, [4, 4]),
     ("gb200-nvl72", 8, 4, [8, 1]), ("gb200-nvl72", 72, 72, [72, 1]), ("gb200-nvl72", 256, 72, [64, 4]),
     ("gb300-nvl72", 144, 4, [72, 2])],
)  # fmt: skip
def test_a_job_takes_whole_nodes_and_the_same_share_of_every_rack(
    name: str, devices: int, node: int, widths: list[int]
) -> None:
    assert [level.width for level in cut(cluster_from(name), devices, node).levels] == widths


# -- rows of other sources ---------------------------------------------------------------------------------


def test_blank_cells_take_what_follows_from_the_others() -> None:
    full = run_like("simumax_llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef")
    blank = dict.fromkeys(("dp", "mbs", "ep", "vpp", "head_dim", "gpus_per_node", "zero", "schedule", "sp"), "")
    assert run_like(full.row_id, **blank).job == full.job
    assert run_like(full.row_id, gbs="", dp=1, mbs=1, microbatches=4).job == full.job


def test_stages_of_which_the_ends_are_one_layer_lighter() -> None:
    zero_bubble = run_like("zb_6.2B_1F1B_24", layers=62, pp=32, gpus=32)
    assert zero_bubble.job.strategy.stage_layers == (1, *[2] * 30, 1)
    llama = run_like(BRIDGE, model="Llama3.1-405B", layers=126, pp=8, vpp=8, gpus=128)
    assert llama.job.strategy.stage_layers == (1, *[2] * 62, 1)


@pytest.mark.parametrize(
    ("row_id", "cells", "expected"),
    [
        (BRIDGE, {"precision": "NVFP4"}, {"overlap.tp": False}),
        (BRIDGE, {"precision": "BF16"}, {"overlap.tp": True}),
        (EXPERTS, {}, {"overlap.ep": False}),
        (EXPERTS, {"locator": "26.06 container"}, {"overlap.ep": True}),
        (EXPERTS, {"locator": "26.09 container", "gpu": "GB300"}, {"overlap.ep": True}),
        (EXPERTS, {"locator": "26.06 container", "precision": "BF16"}, {"overlap.ep": False}),
        (EXPERTS, {"model": "DeepSeek-V3", "locator": "26.02"}, {"recompute_operators": ("up-projection",)}),
        (EXPERTS, {"model": "DeepSeek-V3"}, {"recompute": "none"}),
        (EXPERTS, {"model": "DeepSeek-V3", "recompute": "none"}, {"recompute": "none"}),
        (BRIDGE, {"tp": 1, "pp": 1, "vpp": 1, "dp": 64, "zero": "3 (Megatron-FSDP)", "precision": "FP8-CS"},
         {"offload.activations": 0.5}),
        (BRIDGE, {"tp": 1, "pp": 1, "vpp": 1, "dp": 64, "zero": "3 (Megatron-FSDP)", "precision": "FP8", "gpu": "B300",
                  "gpus_per_node": 8}, {"offload.activations": 0.0}),
    ],
)  # fmt: skip
def test_settings_of_the_bridge_recipes(row_id: str, cells: dict[str, Any], expected: dict[str, Any]) -> None:
    strategy: Any = run_like(row_id, **cells).job.strategy
    for path, value in expected.items():
        found = strategy
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value


@pytest.mark.parametrize(
    ("source", "stack"),
    [("korthikanti et al.", "megatron-core@2022"), ("arXiv 2401.10241", "megatron-core@2022"),
     ("nvidia-nemo/megatron-bridge docs", "megatron-bridge"), ("NVIDIA/NeMo docs", "megatron-core@2024"),
     ("TorchTitan paper", "torchtitan@2024"), ("SimuMax docs/a100", "simumax"), ("MegatronTutorial", "megatron-core"),
     ("a blog", "pytorch"), ("", "pytorch")],
)  # fmt: skip
def test_a_source_that_is_written_otherwise_or_unknown(source: str, stack: str) -> None:
    run = run_like("kor22_t5_22B_full", source=source)
    assert run.job.stack.name == stack
    assert score(run).predicted_seconds > 0


@pytest.mark.parametrize(
    ("text", "link", "ports"),
    [("roce-200", "roce-200", None), ("4 x roce-100", "roce-100", 4), ("2x infiniband-ndr", "infiniband-ndr", 2)],
)
def test_a_row_may_name_its_network(text: str, link: str, ports: int | None) -> None:
    outer = run_like("kor22_t5_22B_full", network=text, gpus=16, dp=2, gbs=8).job.cluster.levels[-1]
    assert outer.link is not None
    assert (outer.link.name, outer.ports, outer.size) == (link, ports, 2)
    assert outer.bandwidth_per_direction == outer.link.bandwidth


def test_a_row_may_name_its_machine_and_its_stack() -> None:
    run = run_like("kor22_t5_22B_full", source="a blog", network="marenostrum5-acc", stack="pytorch-compiled")
    assert (run.job.cluster.device.name, run.job.stack.name) == ("h100-sxm-64gb", "pytorch-compiled")


@pytest.mark.parametrize(
    ("column", "text", "problem"),
    [
        ("network", "4 lanes", "is not a network"),
        ("network", "roce-123", "unknown link"),
        ("stack", "pytorc", "unknown stack"),
    ],
)
def test_an_unknown_network_or_stack_is_refused(column: str, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=rf"{column}.*{problem}"):
        run_like("kor22_t5_22B_full", **{column: text})


def test_a_microbatch_that_is_assumed_fits() -> None:
    """Without recompute and SP the four sequences of this run do not fit (Korthikanti et al. 2022, Figure 1)."""
    cells = {"recompute": "none", "sp": 0}
    printed, assumed = (run_like("kor22_t5_22B_full", **cells, assumed_fields=names).job for names in ("", "mbs"))
    usable = printed.cluster.device.usable_memory
    assert printed.strategy.microbatch == 4 and peak_memory(printed).total > usable
    assert assumed.strategy.microbatch in (1, 2) and peak_memory(assumed).total <= usable
    assert assumed.sequences == printed.sequences


def test_what_a_table_assumes_gives_way_to_the_recipe() -> None:
    with (VALIDATION / "training_runs_3.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["row_id"] == "pax_H100_GPT3-5B_TEBF16")
    recipe = run_from_row(TableRow(row)).job.strategy
    printed = run_from_row(TableRow({**row, "assumed_fields": ""})).job.strategy
    assert (recipe.recompute, printed.recompute) == ("selective", "none")


def test_no_constant_is_fitted_on_the_third_table() -> None:
    fitted = {run.source.fitted for run in read_runs(VALIDATION / "training_runs_3.csv")}
    assert fitted == {False}
    assert {run.source.fitted for run in read_runs(VALIDATION / "training_runs.csv")} == {True}


def test_an_unknown_source_with_mfu_is_read_over_the_devices_peak() -> None:
    run = run_like("kor22_t5_22B_full", source="a blog", rep_iter_s="", rep_mfu_pct=40, flops_convention="")
    flops = flops_per_token(run.job.model, 2048) * run.job.tokens_per_step
    assert run.reported_from == "MFU, causal"
    assert run.reported_seconds == pytest.approx(flops / 8 / (0.4 * 312e12))
