"""What each published source does not print, filled in from its public recipe, with the reason.

Chosen per source, never by the error it gives. `docs/accuracy.md` lists this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Microbatch = Literal["printed", "local batch", "one"]


@dataclass(frozen=True)
class Source:
    """Defaults of one source for fields its tables leave out."""

    prefix: str  # of the row's source column
    stack: str
    reason: str
    convention: str = "causal"  # how its TFLOP/s or MFU count a token
    peak: float | None = None  # FLOP/s behind its MFU
    microbatch: Microbatch = "printed"
    layer_per_chunk: bool = False  # pipelines interleave down to one layer per chunk
    printed_sequence_parallel: bool = False  # the column is a printed fact; elsewhere SP goes with TP
    ends_lighter: bool = False  # first and last stage have one layer less
    vocab: int | None = None
    context_method: str = "ring"
    stack_changes: tuple[tuple[str, dict[str, Any]], ...] = field(default=())  # row-id pattern → flags
    strategy_changes: tuple[tuple[str, dict[str, Any]], ...] = field(default=())  # row-id pattern → fields


SOURCES = (
    Source(
        "Korthikanti", "megatron-2022",
        "paper: fp16, scores stored, Adam not sharded, gradients reduced after the backward pass; SP is printed",
        convention="full-attention", peak=312e12, printed_sequence_parallel=True,
    ),
    Source(
        "Zero Bubble", "megatron-2022",
        "paper: Megatron-LM fork without fused attention; first and last stage one layer less; vocabulary of 32k from "
        "its SentencePiece tokenizer",
        vocab=32_000, ends_lighter=True,
    ),
    Source(
        "NVIDIA/Megatron-LM", "megatron-core",
        "README table: all overlap on; one microbatch per step without pipeline (weak scaling at a fixed local batch), "
        "one sequence and one layer per chunk with it",
        convention="full-attention", microbatch="local batch", layer_per_chunk=True,
    ),
    Source(
        "NVIDIA-NeMo/Megatron-Bridge", "megatron-bridge",
        "performance recipes at tags v0.2.0 to v0.5.0; NVFP4 recipes switch TP overlap off; containers from 26.06 on "
        "run Qwen3-30B on GB200 with overlapped all-to-all, a full-iteration CUDA graph and a fused expert MLP; "
        "Llama3-70B under FSDP on GB200 offloads the activations of 40 of its 80 layers",
        strategy_changes=((r"GB200_Llama3-70B_64_FP8", {"offload": {"activations": 0.5}}),),
        stack_changes=(
            ("NVFP4", {"overlap": {"dp": True, "tp": False, "cp": True}}),
            (r"_26\.06_DGX-GB200_Qwen3", {"cuda_graphs": "full", "fused_moe_mlp": True, "fused_permute": True,
                                        "overlap": {"dp": True, "tp": True, "cp": True, "ep": True}}),
            (r"_26\.06\.01_DGX-GB200_Qwen3", {"cuda_graphs": "full", "fused_moe_mlp": True, "fused_permute": True,
                                           "overlap": {"dp": True, "tp": True, "cp": True, "ep": True}}),
            (r"_26\.08_DGX-GB200_Qwen3", {"cuda_graphs": "full", "fused_moe_mlp": True, "fused_permute": True,
                                        "overlap": {"dp": True, "tp": True, "cp": True, "ep": True}}),
        ),
    ),
    Source(
        "NVIDIA/NeMo", "megatron-core",
        "long-sequence page: FP8, one sequence per microbatch, ring attention, causal attention counted once",
        microbatch="one",
    ),
    Source(
        "huggingface/nanotron", "nanotron",
        "scaling-benchmark scripts: SP with TP, no recompute, MFU over full attention and 989 TFLOP/s",
        convention="full-attention", peak=989e12,
        stack_changes=(),
    ),
    Source(
        "MooreThreads/SimuMax", "simumax",
        "benchmark scripts: Megatron-LM 0.14, nothing overlapped, sequence 4096, all-to-all context parallelism",
        context_method="ulysses",
    ),
    Source(
        "torchtitan benchmarks/llama3", "torchtitan", "report: FSDP2, local batch printed, per-op selective recompute",
        microbatch="local batch",
        stack_changes=(("titan_t1_0", {"elementwise": "eager"}), ("titan_t3_0", {"elementwise": "eager"})),
    ),
    Source(
        "torchtitan benchmarks/asyncTP", "torchtitan", "report: FSDP2 and TP with SP, async TP where it says so",
        microbatch="local batch",
        stack_changes=tuple((f"titan_atp_{i}_1", {"overlap": {"dp": True, "tp": True, "cp": True}}) for i in (3, 4, 5)),
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


def source_of(text: str) -> Source | None:
    for source in SOURCES:
        if text.startswith(source.prefix):
            return source
    return None
