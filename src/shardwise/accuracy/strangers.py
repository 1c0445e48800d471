"""Sources that no constant is fitted on: what each does not print, filled in from its public recipe.

Their error is that of a source nobody here had seen. `docs/accuracy.md` lists it by source.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.accuracy.megatron import GPT3_BLOCK
from shardwise.accuracy.table import Source, Variant

_INTERNEVO = (
    Variant(
        "all",
        "fused RMSNorm of apex, rotary embedding and cross entropy of flash-attention; 16-bit weights and gradients "
        "beside fp32 masters; every weight has one rank, which broadcasts it after the update "
        "(internlm/solver/optimizer/hybrid_zero_optim.py, _partition_param_list and broadcast_params); PyTorch 1.13.1 "
        "and flash-attention 1.0.5 (doc/en/install.md at c18bec9, July 2023), AdamW of flat tensors (train.py)",
        {},
        stack={
            "attention": "flash-1",
            "adamw": "foreach",
            "owned_parameters": True,
            "norms": "fused",
            "loss": "fused",
            "gradient_reduce": "bf16",
            "sharded_parameters": "16-bit",
        },
    ),
)
_MODALITIES = (
    Variant(
        "all",
        "FSDP1 with gradients reduced in bf16 (running_env/env_utils.py, BF_16), so AdamW of flat tensors, not fused "
        "(optimizers/optimizer_factory.py before 9e661dc7); eager: its configurations of that time compile nothing",
        {},
        stack={"gradient_reduce": "bf16", "adamw": "foreach"},
    ),
)
_KEMPNER = (
    Variant(
        "all",
        "weights stored and updated in bf16 (distributed/parallel.py, model.to), with torch's AdamW, whose states have "
        "the format of the weights; embedding whole on every tensor-parallel rank (distributed/tensor_parallel.py); "
        "embedding and head freed after each forward pass (distributed/parallel.py, reshard_after_forward); "
        "fused AdamW; a ColwiseParallel for every projection (distributed/tensor_parallel.py, _build_block_tp_plan); "
        "cuDNN's attention (benchmarks/profiling/13b_24gpu_profiling.md)",
        {},
        training={"optimizer": "adamw-bf16-moments"},
        stack={
            "masters": "none",
            "sharded_parameters": "16-bit",
            "loss": "whole",
            "whole_ends": "embedding",
            "ends": "freed",
            "adamw": "in place",
            "tp_inputs": "each",
            "attention": "fused",
        },
    ),
    Variant(
        "pipelines, mixtures and 13B under FSDP alone",
        "compile_model is false in their scripts (mfu_bench.sh, moe_packed_bench.sh) and configurations",
        {"row_id": r"kf_08|_pp\d|_moe_"},
        stack={"elementwise": "eager", "gated_activation": "separate", "norms": "fp32", "attention_by_heads": True},
    ),
    Variant(
        "tensor parallelism alone",
        "FSDP2 over groups of one (distributed/setup.py, init_distributed)",
        {"tp": r"^[2-9]", "dp": "^1$"},
        strategy={"zero": 3},
    ),
    Variant(
        "FSDP2 with several microbatches",
        "gradients stay whole until the last (training/grad.py, maybe_no_sync)",
        {"gpus": r"^([2-9]|\d\d)", "microbatches": r"^([2-9]|\d\d)"},
        strategy={"accumulate": "local"},
    ),
    Variant(
        "pipelines",
        "torch.distributed.pipelining keeps what a backward pass gathered; the head is whole on every tensor-parallel "
        "rank",
        {"pp": r"^[2-9]"},
        strategy={"keep_parameters": True},
        stack={"whole_ends": "both"},
    ),
    Variant(
        "mixtures",
        "experts in batched matmuls, padded to the fullest one (model/moe.py, grouped_expert_forward_packed); routers "
        "with their auxiliary loss as an attribute (model/router.py)",
        {"arch": "moe"},
        stack={"experts": "padded", "kept_router_losses": True},
    ),
)
_NEMO = (
    Variant("GPT-3", "tied embeddings, learned positions and biases", {"model": "GPT"}, model=GPT3_BLOCK),
    Variant("Nemotron", "squared ReLU, rotary positions", {"model": "Nemotron"}, model={"activation": "relu"}),
)  # fmt: skip
_PAX = (
    Variant("all", "tied embeddings, learned positions and biases", {}, model=GPT3_BLOCK),
    Variant(
        "126M",
        "no scan (USE_REPEATED_LAYER), so nothing is repeated (praxis' StackedTransformer.remat) and gradients are "
        "reduced beside the backward pass",
        {"model": "126M"},
        stack={"overlap": {"dp": True}},
    ),
    Variant(
        "5B",
        "SAVE_DOT_WITH_NO_BATCH_DIM: weight matmuls kept; attention and element-wise work repeated",
        {"model": r"\b5B"},
        strategy={"recompute": "selective", "recompute_operators": ["attention", "norm", "activation"]},
    ),
    Variant(
        "175B", "whole layers repeated: kept matmuls alone take 260 GB", {"model": "175B"},
        strategy={"recompute": "full"},
    ),
    Variant(
        "without Transformer Engine", "XLA's own attention stores the scores", {"precision": "no TE"},
        stack={"attention": "unfused"},
    ),
)  # fmt: skip
_OLD_NANOTRON = (
    Variant(
        "all",
        "tied embeddings; no asynchronous products (bench_cluster/template/base_config.py, "
        "tp_linear_async_communication), so that gathered inputs are kept, and PyTorch records no streams for "
        "collectives that are waited for at once (ProcessGroupNCCL.cpp, avoidRecordStreams)",
        {},
        model={"tied_embeddings": True},
        stack={"gathered_inputs": "whole", "layer_launches": 0},
    ),
    Variant(
        "two nodes",
        "one 100 Gb/s Ethernet a node: its job script linked no library for the node's network until October 2024 "
        "(bench_cluster f55b5e5, which mends the throughput); a stage sends 1.3 to 1.9 GB/s, as a TCP connection does",
        {"row_id": r"nano_old_16"},
    ),
)
_MODEL_ZOO = (
    Variant(
        "all",
        "no TP overlap, Transformer Engine's cross entropy, fused permutation, expandable segments "
        "(model_configs/benchmarking/Qwen3-235B-A22B.yaml)",
        {},
        model={"qk_norm": True},
        stack={"overlap": {"tp": False}, "loss": "fused", "fused_permute": True, "allocator": "expandable"},
    ),
    Variant("DeepEP", "a token is sent to a node once", {"notes": "DeepEP"}, stack={"dispatch": "deduplicated"}),
    Variant("1F1B overlap", "exchange beside other microbatches", {"notes": "1f1b"}, stack={"overlap": {"ep": True}}),
)
_TPU_RECIPES = (
    Variant(
        "bf16 weights stored",
        "no fp32 masters; moments inherit their format (configs/base.yml, mu_dtype)",
        {"precision": "bf16 weights"},
        training={"optimizer": "adamw-bf16-moments"},
        stack={"masters": "none", "sharded_parameters": "16-bit"},
    ),
    Variant("num_vocab_tiling", "logits a part at a time", {"notes": "vocab tiling"}, stack={"loss": "pieces"}),
    Variant("dropped mixtures", "equal load by capacity 1.25", {"notes": "capacity"}, stack={"routing": "capacity"}),
    Variant(
        "Gemma 3", "every sixth layer sees all keys, the others 1,024; four norms a layer", {"model": "Gemma3"},
        model={"sliding_window": 1024, "sliding_window_every": 6, "norms_per_layer": 4, "qk_norm": True,
               "activation": "geglu"},
    ),
)  # fmt: skip


_AO = (
    Variant(
        "H100",
        "torchao of 28 February 2025, when torchtitan's AdamW was fused (6e4988550)",
        {"gpu": "H100"},
        stack={"adamw": "in place"},
    ),
    Variant("MI300X", "torchtitan at 2c8b594 (August 2025)", {"gpu": "MI300"}, version="torchtitan@2025"),
    Variant("Llama 4 Scout", "torchao's MXFP8 experts (late 2025)", {"model": "Scout"}, version="torchtitan@2025"),
)


def strangers(torchtitan: tuple[Variant, ...]) -> tuple[Source, ...]:
    """The sources; ``torchtitan`` is what rows of that framework have in common with those that are fitted."""
    sources = (
        Source(
            "torchtitan, 2024", "torchtitan docs/performance", "torchtitan@2024",
            "reports of 2024: FSDP2, eager on A100 (train_configs at 157a12c56), compiled on H100",
            zero=3, microbatch="local batch", variants=torchtitan,
        ),
        Source(
            "pytorch/ao", "pytorch/ao", "torchtitan@2024",
            "torchtitan with torchao's float8 and MXFP8 linear layers, compiled", zero=3, microbatch="local batch",
            variants=(*torchtitan, *_AO),
        ),
        Source(
            "InternLM/InternEvo", "InternEvo", "pytorch",
            "configs/7B_sft.py: bf16, flash attention, no SP, gradients reduced beside the backward pass; 4 x 100 Gb/s "
            "RoCE a node (doc/en/train_performance.md)", variants=_INTERNEVO,
        ),
        Source(
            "Modalities", "Modalities/modalities", "pytorch",
            "GPT-2 class model with FSDP1, bf16, on MareNostrum 5 (4 GPUs and 4 x 200 Gb/s a node)", zero=3,
            microbatch="local batch", vocab=50_304, variants=_MODALITIES,
        ),
        Source(
            "KempnerInstitute/KempnerForge", "KempnerForge", "pytorch-compiled",
            "FSDP2 with fp32 reduction, TP with SP by DTensor (without SP in pipelines), checkpoints that are not "
            "re-entrant, as its scripts run it; the first rank prints its memory (metrics/memory.py)",
            zero=3, memory="first rank", variants=_KEMPNER,
        ),
        Source(
            "NVIDIA NeMo 24.12", r"NeMo user guide 24\.12", "nemo@24.04",
            "performance recipes: SP with TP, no recompute, distributed Adam, bf16 reduction", vocab=50_304,
            convention="full-attention", variants=_NEMO,
        ),
        Source(
            "NVIDIA/JAX-Toolbox, Pax", "JAX-Toolbox", "paxml",
            "paxml/contrib/gpu/scripts_gpu/configs.py: 126M data parallel, 5B and 175B under FSDP over all 256 GPUs",
            convention="full-attention", zero=3, microbatch="local batch", vocab=50_304, variants=_PAX,
        ),
        Source(
            "huggingface/nanotron, logs of 2024", "nanotron/old_bench", "nanotron",
            "log_metrics.csv on the same P5 nodes as its later benchmark: SP with TP, no recompute, stages cut by the "
            "cost of their matmuls; memory is that of the first rank, which prints it (trainer.py)",
            machines={"dgx-h100": "p5-h100"}, stages_by_cost=True, memory="reserved, first rank",
            variants=_OLD_NANOTRON,
        ),
        Source(
            "yanring/Megatron-MoE-ModelZoo", "Megatron-MoE-ModelZoo", "megatron-core@2024",
            "benchmark configuration: distributed Adam, fp32 gradients, overlapped gradients and parameters",
            variants=_MODEL_ZOO, fp32_gradients=True,
        ),
        Source(
            "AI-Hypercomputer/tpu-recipes", "tpu-recipes", "maxtext@2025",
            "recipes at c8cfe2f: MaxText with a policy of what each layer keeps, moves to the host and repeats",
            convention="full-attention", zero=3, microbatch="local batch", variants=_TPU_RECIPES,
        ),
    )  # fmt: skip
    return tuple(replace(source, fitted=False) for source in sources)
