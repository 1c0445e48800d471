"""What Megatron-LM's functional tests set, by what a row's name or notes say of them.

Read from tests/functional_tests/test_cases/*/model_config.yaml and megatron/training/arguments.py of NVIDIA/Megatron-LM
d98e8a6; settings of a recorded figure that is older, from the commit that recorded it. Never from the figure itself.
"""

from __future__ import annotations

from shardwise.accuracy.recipe import Variant

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
