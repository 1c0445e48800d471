"""What Megatron-Bridge's performance recipes and Megatron-LM's functional tests set beyond what is printed."""

from __future__ import annotations

from typing import Any

from shardwise.accuracy.table import Variant

# GPT-3's block as Megatron, MPT and Pax build it.
GPT3_BLOCK = {"positions": "learned", "tied_embeddings": True, "norm": "layernorm", "qkv_bias": True,
              "attention_out_bias": True, "mlp_bias": True}  # fmt: skip

# -- Megatron-Bridge, container by container ---------------------------------------------------------
# Read from scripts/performance/configs/*/*_workload_base_configs.py and *_llm_pretrain.py of NVIDIA-NeMo/Megatron-
# Bridge, tags v0.2.0 (container 25.11) to v0.6.0 (26.08): settings only, never the performance they are printed with.

_LLAMA3_8B = r"Llama.?3.*\b8B"
_LLAMA3_70B = r"Llama.?3.*70B"
_QWEN3_30B = r"Qwen.?3.*30B"
_QWEN3_235B = r"Qwen.?3.*235B"
_DEEPSEEK_V3 = r"DeepSeek.?V3"
_GPT_OSS = r"GPT.?OSS"
_NAMES = {_QWEN3_30B: "Qwen3-30B", _QWEN3_235B: "Qwen3-235B", _DEEPSEEK_V3: "DeepSeek-V3", _GPT_OSS: "GPT-OSS"}
# Patterns of devices and precisions in words; one that is not anchored also matches the GB devices.
_WORDS = {"GB[23]00": "GB200, GB300", r"\bB[23]00": "B200, B300", "B[23]00": "B200, B300, GB200, GB300",
          "B200": "B200, GB200", r"\bB200": "B200", r"\bB300": "B300", "mx": "MXFP8", "bf16": "BF16", "fp8": "FP8",
          "^(?!.*mx)": "not MXFP8"}  # fmt: skip

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


# What recipes of single mixtures set otherwise than most of their release, which is the version of the stack
# (catalogue/stacks/megatron-bridge.yaml): model, devices, precision, first and last container; CUDA graphs, dispatcher,
# overlapped all-to-all (None: as the version), recomputed operators. A dense MLP is not an operator here.
# "hybrid": HybridEP or DeepEP. At most one line describes a row.
_PLAIN, _ANY_BUT_MX = "plain", "^(?!.*mx)"
_OSS = ("norm", "activation")
_MIXTURES: tuple[tuple[str, str, str, str, str, str | None, str | None, bool | None, tuple[str, ...]], ...] = (
    (_DEEPSEEK_V3, "H100", "", "25.11", "25.11", None, "hybrid", None, ("up-projection",)),
    (_DEEPSEEK_V3, "H100", "", "26.02", "", None, None, None, ("up-projection",)),
    (_DEEPSEEK_V3, "B200", "", "25.09", "25.09", "none", None, None, ("up-projection",)),
    (_DEEPSEEK_V3, "GB200", "", "25.11", "26.02.01", None, None, None, ("up-projection",)),
    (_DEEPSEEK_V3, "GB200", "bf16", "26.04", "26.04.01", None, None, None, ("up-projection",)),
    (_DEEPSEEK_V3, "GB200", "", "26.06", "", None, None, None, ("up-projection",)),
    (_DEEPSEEK_V3, "GB300", "bf16", "", "", None, None, None, ("activation",)),
    (_DEEPSEEK_V3, "GB300", "mx", "26.02", "26.04.01", "none", None, None, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB200", "", "25.11", "26.04", None, None, None, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB200", "", "26.04.01", "", "partial", None, True, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB300", "", "", "26.04", "none", None, None, ("up-projection",)),
    (_DEEPSEEK_V3, r"\bB300", "", "26.04.01", "", None, None, None, ("up-projection",)),
    (_GPT_OSS, "H100", "", "", "", "none", _PLAIN, False, _OSS),
    (_GPT_OSS, "B200", "", "", "26.02.01", "none", _PLAIN, False, _OSS),
    (_GPT_OSS, r"\bB200", "", "26.04", "26.04", None, None, None, _OSS),
    (_GPT_OSS, r"\bB200", "", "26.04.01", "", "none", _PLAIN, False, _OSS),
    (_GPT_OSS, "GB200", "", "26.04", "26.04", "none", None, True, _OSS),
    (_GPT_OSS, "GB200", "", "26.04.01", "26.04.01", "none", _PLAIN, True, _OSS),
    (_GPT_OSS, "GB200", _ANY_BUT_MX, "26.06", "", "none", _PLAIN, True, _OSS),
    (_GPT_OSS, "GB300", "", "", "26.04.01", None, _PLAIN, None, ()),
    (_GPT_OSS, "GB300", _ANY_BUT_MX, "26.06", "", None, _PLAIN, None, ()),
    (_GPT_OSS, r"\bB300", "", "", "26.02.01", None, _PLAIN, None, ()),
    (_GPT_OSS, r"\bB300", "mx", "26.06.01", "", "partial", None, False, ()),
    (_QWEN3_30B, r"\bB200", "", "", "26.02", "partial", _PLAIN, None, ()),
    (_QWEN3_30B, r"\bB200", "", "26.02.01", "26.06", "partial", None, None, ()),
    (_QWEN3_30B, r"\bB200", _ANY_BUT_MX, "26.06.01", "", "partial", None, None, ()),
    (_QWEN3_30B, r"\bB300", "mx", "26.06", "26.06", "full", None, True, ()),
    (_QWEN3_30B, "H100", "bf16", "25.11", "26.02", "partial", _PLAIN, True, ()),
    (_QWEN3_30B, "H100", "fp8", "26.02", "26.02", None, _PLAIN, True, ()),
    (_QWEN3_235B, r"\bB[23]00", "", "25.11", "25.11", None, None, True, ()),
    (_QWEN3_235B, r"\bB200", "", "26.02", "26.06", "none", _PLAIN, None, ()),
    (_QWEN3_235B, r"\bB300", "", "26.02", "26.04", "none", _PLAIN, None, ()),
    (_QWEN3_235B, r"\bB300", "", "26.04.01", "26.06", "none", None, None, ()),
    (_QWEN3_235B, "H100", "", "26.02", "", None, _PLAIN, True, ()),
)


def _mixture(
    model: str, gpus: str, precision: str, since: str, until: str,
    graphs: str | None, dispatch: str | None, overlapped: bool | None, recomputed: tuple[str, ...],
) -> Variant:  # fmt: skip
    stack: dict[str, Any] = {}
    if graphs is not None:  # the fused kernels of experts came with the graph of the whole iteration
        stack |= {"cuda_graphs": graphs, "fused_moe_mlp": graphs == "full", "fused_permute": graphs == "full"}
    if dispatch is not None:
        stack["dispatch"] = "all-to-all" if dispatch == _PLAIN else "deduplicated"
    if overlapped is not None:
        stack["overlap"] = {"ep": overlapped}
    operators = {"recompute": "selective", "recompute_operators": list(recomputed)}
    containers = " ".join([f"from {since}"] * bool(since) + [f"up to {until}"] * bool(until))
    rows = ", ".join(filter(None, (_NAMES[model], _WORDS.get(precision), containers)))
    what = (
        *([f"{graphs.replace('none', 'no')} CUDA graphs"] if graphs else []),
        *(["NCCL all-to-all" if dispatch == _PLAIN else "HybridEP or DeepEP"] if dispatch else []),
        *([] if overlapped is None else ["overlapped" if overlapped else "not overlapped"]),
        *([f"recompute of {' and '.join(recomputed)}"] if recomputed else []),
    )
    return Variant(
        f"{rows} on {_WORDS.get(gpus, gpus)}",
        ", ".join(what),
        {"model": model, "gpu": gpus, "precision": precision},
        since,
        until or "~",
        strategy=operators if recomputed else {},
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
    *(_mixture(*line) for line in _MIXTURES),
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


# -- Megatron-LM's functional tests, by what a row's name or notes say of them -----------------------
# Read from tests/functional_tests/test_cases/*/model_config.yaml and megatron/training/arguments.py of NVIDIA/Megatron-
# LM d98e8a6; settings of a recorded figure that is older, from the commit that recorded it. Never from the figure
# itself.

_UNFUSED = {"attention": "unfused"}
_FLASH = {"attention": "flash-2"}
_OLD_LTS = "lts_dgxa100_dracooci|frozen.*_lts_dgx_a100|vp1_resume_torch_dist_lts_dgx_a100"

# Later ones win over earlier ones.
MEGATRON_TESTS = (
    Variant("hidden size 512 and 4096, not gated", "GPT-3's block: learned positions, LayerNorm, biases",
            {"hidden": "^(512|4096)$", "gated_mlp": "^0"},
            model={"positions": "learned", "norm": "layernorm", "qkv_bias": True, "attention_out_bias": True,
                   "mlp_bias": True}),
    Variant("all but those below", "dropout 0.1, the default", {}, training={"dropout": True}),
    Variant("context parallelism, hidden size 1024, release tests, CUDA graphs", "dropout 0",
            {"row_id": "^(?!.*tp2_cp2_pp2_ep2).*(cp[24]_|etp1_(?!ep4)|release|cudagraph)"},
            training={"dropout": False}),
    Variant("deterministic mode", "larger workspaces of cuBLAS", {"notes": "deterministic mode"},
            stack={"deterministic": True}),
    Variant("without --no-gradient-accumulation-fusion", "matmuls add to the fp32 gradients",
            {"notes": "^(?!.*no grad-accumulation fusion)"}, stack={"dummy_gradients": True}),
    Variant("A100, GB200", "FlashAttention-2, which Transformer Engine prefers there when it must be deterministic",
            {"gpu": "A100|GB200"}, stack=_FLASH),
    Variant("--attention-backend flash", "FlashAttention-2", {"notes": "attention backend flash"}, stack=_FLASH),
    Variant("--attention-backend unfused", "scores stored", {"notes": "attention backend unfused"}, stack=_UNFUSED),
    Variant("--transformer-impl local", "scores stored, in a buffer that stays", {"notes": r"local \(non-TE\)"},
            stack={"layers": "megatron", **_UNFUSED}),
    Variant("LTS container before November 2025, deterministic",
            "scores stored: its Transformer Engine has no deterministic fused attention",
            {"row_id": _OLD_LTS, "notes": "deterministic mode"}, stack=_UNFUSED),
    Variant("--cross-entropy-loss-fusion", "its steps compiled one by one",
            {"row_id": "cross_entropy_loss_fusion|etp1_(memory|mtp|selective|resume)"}, stack={"loss": "steps"}),
    Variant("uninstall_te", "plain kernels", {"row_id": "uninstall_te"}, stack={"elementwise": "eager"}),
    Variant("--defer-embedding-wgrad-compute", "gradients of the head wait, of 2 microbatches",
            {"row_id": "defer_embedding_wgrad"}, stack={"deferred_head_gradients": 2}),
    Variant("--qk-layernorm", "norms of queries and keys", {"row_id": "qk_layernorm"}, model={"qk_norm": True}),
    Variant("two distributed optimizers", "states divided over half of the replicas",
            {"row_id": "multi_dist_optimizer", "dp": "4"}, strategy={"shard_group": 2}),
    Variant("two distributed optimizers on 2 replicas", "states not divided",
            {"row_id": "multi_dist_optimizer", "dp": "2"}, strategy={"zero": 0}),
    Variant("1 MTP layer", "one multi-token-prediction layer", {"notes": "1 MTP layer"}, model={"mtp_layers": 1}),
    Variant("uneven pipeline", "2 layers on the first and last stage", {"row_id": "uneven_pipeline"},
            strategy={"stage_layers": [2, 4, 4, 2]}),
    Variant("groups of 5 microbatches on 4 stages", "read as 8 microbatches in groups of 4",
            {"row_id": "tunable_overlap"}, training={"global_batch": 64}),
    Variant("fine-grained offloading", "gradients reduced after the backward pass; all activations but those of latent "
            "vectors, router and shared expert offloaded, 95% of the bytes", {"row_id": "offloading"},
            strategy={"offload": {"activations": 0.95}}, stack={"overlap": {"dp": False}}),
    Variant("without --moe-grouped-gemm", "experts in turn",
            {"row_id": "4experts2parallel|8experts2parallel_(dist|multi)"}, stack={"experts": "in turn"}),
    Variant("mixtures of hidden size 1024", "fused permutation", {"row_id": "^mlm_moe", "hidden": "1024"},
            stack={"fused_permute": True}),
)  # fmt: skip
