"""What NVIDIA-NeMo/Megatron-Bridge's performance recipes set beyond the printed degrees, model by model.

Read from scripts/performance/configs/*/*_workload_base_configs.py and *_llm_pretrain.py of that repository: settings
only, never the performance they are printed with.
"""

from __future__ import annotations

from shardwise.cost.validation.variants import Variant

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
VARIANTS = (
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
