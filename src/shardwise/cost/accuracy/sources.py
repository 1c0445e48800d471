"""What each published source does not print, filled in from its public recipe, with the reason.

Chosen per source, never by the error it gives. `docs/accuracy.md` lists this table. What Megatron-Bridge's performance
recipes set beyond the printed degrees is read from scripts/performance/configs/*/*_workload_base_configs.py and
*_llm_pretrain.py of NVIDIA-NeMo/Megatron-Bridge: settings only, never the performance they are printed with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.cost.accuracy.table import TableRow
from shardwise.spec.stack import Stack


@dataclass(frozen=True)
class Variant:
    """Rows whose cells match ``cells`` (column → pattern) and whose container is ``since`` or newer."""

    rows: str  # in words
    reason: str
    cells: Mapping[str, str]
    since: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    stack: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, row: TableRow) -> bool:
        if self.since > _container(row):
            return False
        return all(re.search(pattern, row.text(column), re.IGNORECASE) for column, pattern in self.cells.items())

    def on(self, stack: Stack) -> Stack:
        """The stack with what this variant sets; overlap is changed dimension by dimension."""
        changes = dict(self.stack)
        if "overlap" in changes:
            changes["overlap"] = replace(stack.overlap, **changes["overlap"])
        return replace(stack, **changes)


def _container(row: TableRow) -> str:
    """The release that a row names, like "26.06"; one that names none is older than any."""
    found = re.search(r"(?<![\d.])2\d\.[01]\d(?!\d)", f"{row.text('locator')} {row.text('row_id')}")
    return found[0] if found else ""


_LLAMA3_8B = r"Llama.?3.*\b8B"
_QWEN3_235B = r"Qwen.?3.*235B"
_DEEPSEEK_V3 = r"DeepSeek.?V3"
_GPT_OSS = r"GPT.?OSS"

# cpu_offloading_num_layers of the FSDP recipes: model, its pattern, its layers; then device, precision and layers.
_OFFLOADED = (
    ("Llama3-70B", r"Llama.?3.*70B", 80, (("GB200", "FP8", 40), ("GB200", "BF16", 20), ("GB300", "FP8", 20),
                                          ("GB300", "BF16", 30), ("B200", "FP8", 5))),
    ("Llama3.1-405B", r"Llama.?3.*405B", 126, (("GB200", "FP8", 92), ("GB300", "FP8", 10), ("GB300", "BF16", 40))),
)  # fmt: skip


def _offloads() -> tuple[Variant, ...]:
    return tuple(
        Variant(
            f"{name}, {precision} under FSDP on {gpu}",
            f"activations of {offloaded} of {layers} layers offloaded",
            {"model": pattern, "gpu": rf"\b{gpu}", "precision": rf"^{precision}(?!.?mx)", "zero": r"^3|fsdp"},
            strategy={"offload": {"activations": offloaded / layers}},
        )
        for name, pattern, layers, recipes in _OFFLOADED
        for gpu, precision, offloaded in recipes
    )


def _selective(rows: str, operators: list[str], cells: dict[str, str]) -> Variant:
    """``recompute_modules``; the part of them that is not an operator here (a dense MLP) is left out."""
    strategy = {"recompute": "selective", "recompute_operators": operators}
    return Variant(rows, f"recompute of {' and '.join(operators)}", cells, strategy=strategy)


def _captured(rows: str, cells: dict[str, str], since: str = "") -> Variant:
    """``cuda_graph_impl`` "local" with scope "full_iteration"."""
    return Variant(rows, "full-iteration CUDA graph", cells, since, stack={"cuda_graphs": "full"})


# Later ones win over earlier ones.
MEGATRON_BRIDGE = (
    Variant("NVFP4", "TP overlap off", {"precision": "fp4"}, stack={"overlap": {"tp": False}}),
    Variant(
        "MXFP8 with experts on GB200, GB300, B300 from container 26.06 on",
        "overlapped all-to-all, full-iteration CUDA graph, fused expert MLP",
        {"precision": "mx", "n_experts": r"^[1-9]", "gpu": "GB200|GB300|B300"},
        since="26.06",
        stack={"cuda_graphs": "full", "fused_moe_mlp": True, "fused_permute": True, "overlap": {"ep": True}},
    ),
    _captured("Llama3-8B, not NVFP4, on B200, B300, GB300",
              {"model": _LLAMA3_8B, "precision": "^(?!.*fp4)", "gpu": r"\bB[23]00|GB300"}),
    _captured("Llama3-8B, BF16 and MXFP8 on GB200", {"model": _LLAMA3_8B, "precision": "bf16|mx", "gpu": "GB200"}),
    _captured("Llama3-8B, FP8 on GB200 from container 26.02 on",
              {"model": _LLAMA3_8B, "precision": "^fp8", "gpu": "GB200"}, since="26.02"),
    _captured("Llama3-70B, BF16 on B200", {"model": r"Llama.?3.*70B", "precision": "^bf16", "gpu": r"\bB200"}),
    Variant(
        "Qwen3-235B on B200, B300",
        "plain all-to-all",
        {"model": _QWEN3_235B, "gpu": r"\bB[23]00"},
        stack={"dispatch": "all-to-all"},
    ),
    Variant(
        "Qwen3-235B on H100",
        "plain all-to-all, overlapped; TP overlap off",
        {"model": _QWEN3_235B, "gpu": "H100"},
        stack={"dispatch": "all-to-all", "overlap": {"ep": True, "tp": False}},
    ),
    Variant("DeepSeek-V3", "one multi-token-prediction layer", {"model": _DEEPSEEK_V3}, model={"mtp_layers": 1}),
    _selective("DeepSeek-V3", ["up-projection"], {"model": _DEEPSEEK_V3}),
    _selective("GPT-OSS on B200, GB200, H100", ["norm", "activation"], {"model": _GPT_OSS, "gpu": "B200|H100"}),
    Variant(
        "GPT-OSS",
        "every second layer sees 128 keys",
        {"model": _GPT_OSS},
        model={"sliding_window": 128, "sliding_window_every": 2},
    ),
    *_offloads(),
)  # fmt: skip


Microbatch = Literal["one", "local batch"]


@dataclass(frozen=True)
class Source:
    """Defaults of one source for fields its tables leave out."""

    name: str
    pattern: str  # in the row's source column
    stack: str
    reason: str
    convention: str = "causal"  # how its TFLOP/s or MFU count a token, unless the row says
    counts_recomputed: bool = False
    peak: float | None = None  # FLOP/s behind its MFU; None: the device's 16-bit peak
    zero: int = 1
    # Without a pipeline a rank's whole share of the batch, or one sequence; with one always one sequence.
    microbatch: Microbatch = "one"
    layer_per_chunk: bool = False  # pipelines interleave down to one layer per chunk
    vocab: int = 32_000
    context_method: str = "ring"
    machines: Mapping[str, str] = field(default_factory=dict)  # clusters in place of a device's usual one
    stages_by_cost: bool = False  # a pipeline stage ends with the layer that passes its share of the matmuls
    memory: Literal["as printed", "reserved, first rank"] = "as printed"  # what a figure of memory counts
    variants: tuple[Variant, ...] = ()


_TORCHTITAN = (
    Variant("rows marked eager", "no torch.compile", {"precision": "eager"}, stack={"elementwise": "eager"}),
    Variant("rows of async TP", "TP overlap on", {"locator": "async.?TP"}, stack={"overlap": {"tp": True}}),
)

SOURCES = (
    Source(
        "Korthikanti et al. 2022", "korthikanti|2205.05198", "megatron-2022",
        "paper: fp16, scores stored, Adam not sharded, gradients reduced after the backward pass; SP is printed",
        convention="full-attention", peak=312e12, zero=0, vocab=51_200,
    ),
    Source(
        "Narayanan et al. 2021", "narayanan|2104.04473", "megatron-2022",
        "paper: fp16, scores stored, Adam not sharded, no SP; its TFLOP/s count one recomputed forward pass (eq. 3)",
        convention="full-attention", counts_recomputed=True, peak=312e12, zero=0, vocab=51_200,
    ),
    Source(
        "Zero Bubble", "zero.?bubble|2401.10241", "megatron-2022",
        "paper: Megatron-LM fork without fused attention; vocabulary of 32k from its SentencePiece tokenizer",
        zero=0,
    ),
    Source(
        "NVIDIA/Megatron-LM", "megatron-lm", "megatron-core",
        "README table: all overlap on; one microbatch per step without pipeline (weak scaling at a fixed local batch), "
        "one sequence and one layer per chunk with it",
        convention="full-attention", microbatch="local batch", layer_per_chunk=True, vocab=131_072,
    ),
    Source(
        "NVIDIA-NeMo/Megatron-Bridge", "megatron-?bridge", "megatron-bridge",
        "performance recipes at tags v0.2.0 to v0.5.0; no recompute unless listed below",
        variants=MEGATRON_BRIDGE,
    ),
    Source(
        "NVIDIA/NeMo", "nemo", "megatron-core",
        "long-sequence page: FP8, one sequence per microbatch, ring attention, causal attention counted once; NeMo's "
        "recipes use the distributed optimizer (zero 1)",
    ),
    Source(
        "huggingface/nanotron", "nanotron|ultra-?scale", "nanotron",
        "scaling-benchmark scripts: SP with TP, no recompute, MFU over full attention and 989 TFLOP/s; 8 H100 per node "
        "and paths under Amazon's /fsx: P5 nodes; stages cut by the cost of their matmuls; memory is what the first "
        "rank's allocator reserved, in GiB under the label GB (helpers.py, create_table_log)",
        convention="full-attention", peak=989e12, machines={"dgx-h100": "p5-h100"}, stages_by_cost=True,
        memory="reserved, first rank",
    ),
    Source(
        "MooreThreads/SimuMax", "simumax", "simumax",
        "benchmark scripts: Megatron-LM 0.14, nothing overlapped, sequence 4096, all-to-all context parallelism",
        context_method="ulysses",
    ),
    Source(
        "torchtitan", "torchtitan|2410.06511", "torchtitan",
        "reports: FSDP2, TP with SP, local batch printed, per-op selective recompute; async TP where it says so",
        zero=3, microbatch="local batch", variants=_TORCHTITAN,
    ),
)  # fmt: skip


# Rows that are scored apart, with the reason (another measurement of the same line contradicts them, or another
# algorithm ran).
SET_ASIDE = {
    "mbridge_26.02_DGX-H100_Qwen3-30B-A3B_16_FP8_1": "118 TFLOP/s where 26.02.01 prints 208 for the same line",
    "mbridge_25.11_DGX-H100_Qwen3-30B-A3B_16_FP8-CS_1": "121 TFLOP/s where 25.09 prints 241 for the same degrees",
    "mbridge_25.09_DGX-H100_Qwen3-30B-A3B_16_FP8_1": "token-drop routing, another algorithm",
    "nanotron_80.0B_4n": "2.3 times slower per GPU than its 16-node row at 66 GB: allocator thrash suspected",
    "titan_t2_2": "early ring attention: kernels at 185 instead of 285 TFLOP/s",
    "titan_t2_3": "early ring attention: kernels at 185 instead of 285 TFLOP/s",
    "titan_atp_5_0": "row-wise FP8 scaling, slower than BF16: another kernel class",
    "titan_atp_5_1": "row-wise FP8 scaling, slower than BF16: another kernel class",
}


def source_of(row: TableRow) -> Source:
    """The source of a row; of one that is not listed, its framework if it names one, else this project's defaults."""
    text = row.text("source")
    for source in SOURCES:
        if re.search(source.pattern, text, re.IGNORECASE):
            return source
    stack = "megatron-core" if "megatron" in text.lower() else "shardwise"
    return Source(text, "", stack, f"no recipe known: the defaults of {stack}")
