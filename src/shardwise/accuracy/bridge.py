"""What Megatron-Bridge's performance recipes set beyond the printed degrees, container by container.

Read from scripts/performance/configs/*/*_workload_base_configs.py and *_llm_pretrain.py of NVIDIA-NeMo/Megatron-Bridge,
tags v0.2.0 (container 25.11) to v0.6.0 (26.08): settings only, never the performance they are printed with.
"""

from __future__ import annotations

from typing import Any

from shardwise.accuracy.recipe import Variant

_LLAMA3_8B = r"Llama.?3.*\b8B"
_LLAMA3_70B = r"Llama.?3.*70B"
_QWEN3_30B = r"Qwen.?3.*30B"
_QWEN3_235B = r"Qwen.?3.*235B"
_DEEPSEEK_V3 = r"DeepSeek.?V3"
_GPT_OSS = r"GPT.?OSS"
_NAMES = {_QWEN3_30B: "Qwen3-30B", _QWEN3_235B: "Qwen3-235B", _DEEPSEEK_V3: "DeepSeek-V3", _GPT_OSS: "GPT-OSS"}
# Patterns of devices and precisions in words; one that is not anchored also matches the GB devices.
_WORDS = {"GB[23]00": "GB200, GB300", r"\bB[23]00": "B200, B300", "B[23]00": "B200, B300, GB200, GB300",
          "GB200|B300": "GB200, GB300, B300", "H100|B200": "H100, B200, GB200", r"\bB200": "B200", r"\bB300": "B300",
          "mx": "MXFP8", "mx|fp8": "FP8 and MXFP8", "bf16": "BF16", "fp8": "FP8"}  # fmt: skip

# cpu_offloading_num_layers of the FSDP recipes: model, its pattern, its layers; then device, precision and layers.
_OFFLOADED = (
    ("Llama3-70B", _LLAMA3_70B, 80, (("GB200", "FP8", 40), ("GB200", "BF16", 20), ("GB300", "FP8", 20),
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


def _captured(rows: str, cells: dict[str, str], since: str = "") -> Variant:
    """``cuda_graph_impl`` "local" with scope "full_iteration"."""
    return Variant(rows, "full-iteration CUDA graph", cells, since, stack={"cuda_graphs": "full"})


# The mixtures: model, devices, precision, first and last container; CUDA graphs, dispatcher, overlapped all-to-all,
# recomputed operators. A dense MLP that is recomputed is no operator here. "hybrid": HybridEP or DeepEP, which send a
# token once to each node or rank. "fused": full-iteration graph, overlapped HybridEP, CuTeDSL grouped MLP. Later lines
# win.
_MIXTURES: tuple[tuple[str, str, str, str, str, str, str, bool, tuple[str, ...]], ...] = (
    (_DEEPSEEK_V3, "H100", "", "", "25.11", "none", "hybrid", True, ("up-projection",)),
    (_DEEPSEEK_V3, "H100", "", "26.02", "", "none", "hybrid", False, ("up-projection",)),
    (_DEEPSEEK_V3, "GB200", "", "25.11", "", "partial", "hybrid", False, ("up-projection",)),
    (_DEEPSEEK_V3, "GB200", "mx|fp8", "26.04", "26.04.01", "partial", "hybrid", False, ()),
    (_DEEPSEEK_V3, "GB200", "mx", "26.06", "", "fused", "hybrid", True, ("up-projection",)),
    (_DEEPSEEK_V3, "GB300", "bf16", "", "", "partial", "hybrid", False, ("activation",)),
    (_DEEPSEEK_V3, "GB300", "mx", "", "26.04.01", "none", "hybrid", False, ("up-projection",)),
    (_DEEPSEEK_V3, "GB300", "mx", "26.06", "", "fused", "hybrid", True, ()),
    (_DEEPSEEK_V3, r"\bB200", "", "", "25.11", "none", "plain", False, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB200", "", "26.02", "26.04", "none", "hybrid", False, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB200", "", "26.04.01", "", "partial", "hybrid", True, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB300", "", "", "26.04", "none", "hybrid", False, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB300", "", "26.04.01", "26.06", "partial", "hybrid", False, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB300", "mx", "26.06.01", "", "fused", "hybrid", True, ("up-projection",)),
    (_GPT_OSS, r"H100|B200", "", "", "", "none", "plain", False, ("norm", "activation")),
    (_GPT_OSS, r"\bB200", "", "26.04", "26.04", "none", "hybrid", False, ("norm", "activation")),
    (_GPT_OSS, "GB200", "", "26.04", "26.04", "none", "hybrid", True, ("norm", "activation")),
    (_GPT_OSS, "GB200", "", "26.04.01", "", "none", "plain", True, ("norm", "activation")),
    (_GPT_OSS, "GB300", "", "", "", "partial", "plain", False, ()),
    (_GPT_OSS, r"\bB300", "", "", "26.02.01", "partial", "plain", False, ()),
    (_GPT_OSS, r"\bB300", "", "26.04", "", "partial", "hybrid", False, ()),
    (_GPT_OSS, "GB[23]00", "mx", "26.06", "", "fused", "hybrid", True, ()),
    (_QWEN3_30B, "B[23]00", "", "", "", "partial", "hybrid", False, ()),
    (_QWEN3_30B, r"\bB200", "", "", "26.02", "partial", "plain", False, ()),
    (_QWEN3_30B, "H100", "bf16", "", "26.02", "partial", "plain", True, ()),
    (_QWEN3_30B, "H100", "fp8", "", "26.02", "none", "plain", True, ()),
    (_QWEN3_30B, "H100", "", "26.02.01", "", "none", "hybrid", False, ()),
    (_QWEN3_30B, "GB200|B300", "mx", "26.06", "", "fused", "hybrid", True, ()),
    (_QWEN3_30B, r"\bB200", "mx", "26.06.01", "", "fused", "hybrid", True, ()),
    (_QWEN3_235B, "GB[23]00", "", "", "", "partial", "hybrid", False, ()),
    (_QWEN3_235B, r"\bB[23]00", "", "", "25.11", "none", "plain", True, ()),
    (_QWEN3_235B, r"\bB[23]00", "", "26.02", "26.06", "none", "plain", False, ()),
    (_QWEN3_235B, r"\bB300", "", "26.04.01", "26.06", "none", "hybrid", False, ()),
    (_QWEN3_235B, "GB[23]00", "mx", "26.06", "", "fused", "hybrid", True, ()),
    (_QWEN3_235B, r"\bB[23]00", "mx", "26.06.01", "", "fused", "hybrid", True, ()),
    (_QWEN3_235B, "H100", "", "", "", "none", "plain", True, ()),
)


def _mixtures() -> tuple[Variant, ...]:
    return tuple(_mixture(*line) for line in _MIXTURES)


def _mixture(
    model: str, gpus: str, precision: str, since: str, until: str,
    graphs: str, dispatch: str, overlapped: bool, recomputed: tuple[str, ...],
) -> Variant:  # fmt: skip
    stack: dict[str, Any] = {
        "cuda_graphs": "full" if graphs == "fused" else graphs,
        "dispatch": "all-to-all" if dispatch == "plain" else "deduplicated",
        "overlap": {"ep": overlapped},
        "fused_moe_mlp": graphs == "fused",
        "fused_permute": graphs == "fused",
    }
    operators = {"recompute": "selective", "recompute_operators": list(recomputed)}
    containers = " ".join([f"from {since}"] * bool(since) + [f"up to {until}"] * bool(until))
    rows = ", ".join(filter(None, (_NAMES[model], _WORDS.get(precision), containers)))
    what = (
        f"{ {'fused': 'full-iteration', 'none': 'no'}.get(graphs, graphs) } CUDA graphs",
        "NCCL all-to-all" if dispatch == "plain" else "HybridEP or DeepEP",
        *["overlapped"] * overlapped,
        *["fused expert MLP"] * (graphs == "fused"),
        *([f"recompute of {' and '.join(recomputed)}"] if recomputed else []),
    )
    return Variant(
        f"{rows} on {_WORDS.get(gpus, gpus)}",
        ", ".join(what),
        {"model": model, "gpu": gpus, "precision": precision},
        since,
        until or "~",
        strategy=operators if recomputed else {"recompute": "none"},
        stack=stack,
    )


# Later ones win over earlier ones.
MEGATRON_BRIDGE = (
    Variant("NVFP4", "TP overlap off; parameters gathered in bf16", {"precision": "fp4"},
            stack={"overlap": {"tp": False}, "parameter_gather": "bf16"}),
    _captured("Llama3-8B, not NVFP4, on B200, B300, GB300",
              {"model": _LLAMA3_8B, "precision": "^(?!.*fp4)", "gpu": r"\bB[23]00|GB300"}),
    _captured("Llama3-8B, BF16 and MXFP8 on GB200", {"model": _LLAMA3_8B, "precision": "bf16|mx", "gpu": "GB200"}),
    _captured("Llama3-8B, FP8 on GB200 from container 26.02 on",
              {"model": _LLAMA3_8B, "precision": "^fp8", "gpu": "GB200"}, since="26.02"),
    _captured("Llama3-8B, NVFP4 on GB300", {"model": _LLAMA3_8B, "precision": "fp4", "gpu": "GB300"}),
    _captured("Llama3-70B, BF16 on B200", {"model": _LLAMA3_70B, "precision": "^bf16", "gpu": r"\bB200"}),
    Variant("Llama3-70B, NVFP4 on GB200 from container 26.06 on", "CUDA graphs of attention and MLP",
            {"model": _LLAMA3_70B, "precision": "fp4", "gpu": "GB200"}, "26.06", stack={"cuda_graphs": "partial"}),
    Variant("Qwen3-235B and DeepSeek-V3 on H100", "TP overlap off", {"model": f"{_QWEN3_235B}|{_DEEPSEEK_V3}",
            "gpu": "H100"}, stack={"overlap": {"tp": False}}),
    *_mixtures(),
    Variant("DeepSeek-V3", "one multi-token-prediction layer", {"model": _DEEPSEEK_V3}, model={"mtp_layers": 1}),
    Variant("DeepSeek-V3 marked w/o MTP", "no such layer", {"model": _DEEPSEEK_V3, "notes": "w/o MTP"},
            model={"mtp_layers": 0}),
    *(Variant(f"DeepSeek-V3, PP {pp}, VP {chunks}", "chunks of 4 layers, the last of 1 and the MTP layer (layout_map)",
              {"model": _DEEPSEEK_V3, "pp": f"^{pp}$", "vpp": f"^{chunks}$"}, strategy={"stage_layers": [4] * 15 + [1]})
      for pp, chunks in ((4, 4), (8, 2), (16, 1))),
    Variant("GPT-OSS", "biases; every second layer sees 128 keys", {"model": _GPT_OSS},
            model={"sliding_window": 128, "sliding_window_every": 2, "mlp_bias": True}),
    *_offloads(),
)  # fmt: skip
