"""What each published source does not print, filled in from its public recipe, with the reason.

Chosen per source, never by the error it gives. `docs/accuracy.md` lists this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.cost.validation.megatron_bridge import VARIANTS as BRIDGE
from shardwise.cost.validation.table import Row
from shardwise.cost.validation.variants import Variant

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
        variants=BRIDGE,
    ),
    Source(
        "NVIDIA/NeMo", "nemo", "megatron-core",
        "long-sequence page: FP8, one sequence per microbatch, ring attention, causal attention counted once; NeMo's "
        "recipes use the distributed optimizer (zero 1)",
    ),
    Source(
        "huggingface/nanotron", "nanotron|ultra-?scale", "nanotron",
        "scaling-benchmark scripts: SP with TP, no recompute, MFU over full attention and 989 TFLOP/s; 8 H100 per node "
        "and paths under Amazon's /fsx: P5 nodes; stages cut by the cost of their products; memory is what the first "
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


def source_of(row: Row) -> Source:
    """The source of a row; of one that is not listed, its framework if it names one, else this project's defaults."""
    text = row.text("source")
    for source in SOURCES:
        if re.search(source.pattern, text, re.IGNORECASE):
            return source
    stack = "megatron-core" if "megatron" in text.lower() else "shardwise"
    return Source(text, "", stack, f"no recipe known: the defaults of {stack}")
