"""What sources of fine-tuning runs do not print: shapes of models, machines, layers with adapters, software."""

from __future__ import annotations

from typing import Any

from shardwise.accuracy.table import Source, Variant

_GATED = {"activation": "swiglu", "norm": "rmsnorm"}
_QWEN = {**_GATED, "qkv_bias": True, "vocab": 151_936}
_PHI = {"heads": 32, "vocab": 51_200, "parallel_block": True, "norms_per_layer": 1, "lm_head_bias": True,
        "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}  # fmt: skip
_GEMMA = {"activation": "geglu", "norm": "rmsnorm", "head_dim": 256, "vocab": 256_000, "tied_embeddings": True}
_FALCON = {"head_dim": 64, "parallel_block": True, "vocab": 65_024}

# A pattern of the name with the billions of parameters; a model of the catalogue or, by its config.json, a shape.
MODELS: tuple[tuple[str, str | dict[str, Any]], ...] = (
    ("mixtral-8x7b", "mixtral-8x7b"),
    ("mistral", "mistral-7b"),
    (r"llama.?3\.1.?405b", "llama3-405b"),
    (r"llama.?3\.1.?70b", "llama3.1-70b"),
    (r"llama.?3\.1.?8b", "llama3.1-8b"),
    (r"llama.?3\.2.?1b", "llama3.2-1b"),
    (r"llama.?3\.2.?3b", "llama3.2-3b"),
    (r"llama.?3.?8b", "llama3-8b"),
    ("tiny-?llama", {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn": 5632, "vocab": 32_000, **_GATED}),
    (r"llama.{0,3}70b", "llama2-70b"),
    (r"llama.{0,3}13b", "llama2-13b"),
    (r"llama.{0,3}7b", "llama2-7b"),
    (r"qwen-1\.8b", {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 5504, **_QWEN}),
    ("qwen-7b", {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11_008, **_QWEN}),
    ("qwen-14b", {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13_696, **_QWEN}),
    ("qwen-72b", {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 24_576, **_QWEN}),
    ("santacoder", {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 1, "ffn": 8192, "vocab": 49_280,
                    "positions": "learned", "tied_embeddings": True, "qkv_bias": True, "attention_out_bias": True,
                    "mlp_bias": True}),
    ("stablelm.*alpha", {"layers": 16, "hidden": 4096, "heads": 32, "ffn": 16_384, "vocab": 50_688, "qkv_bias": True,
                         "attention_out_bias": True, "mlp_bias": True, "parallel_block": True}),
    (r"phi-1\.5", {"layers": 24, "hidden": 2048, "ffn": 8192, **_PHI}),
    ("phi-2", {"layers": 32, "hidden": 2560, "ffn": 10_240, **_PHI}),
    ("phi-3-mini", {"layers": 32, "hidden": 3072, "heads": 32, "ffn": 8192, "vocab": 32_064, **_GATED}),
    (r"gemma-2b 2\.6", {"layers": 26, "hidden": 2304, "heads": 8, "kv_heads": 4, "ffn": 9216, "norms_per_layer": 4,
                        **_GEMMA}),
    ("gemma-2b", {"layers": 18, "hidden": 2048, "heads": 8, "kv_heads": 1, "ffn": 16_384, **_GEMMA}),
    ("gemma-2-9b", "gemma2-9b"),
    ("gemma-7b", "gemma-7b"),
    ("falcon-7b", {"layers": 32, "hidden": 4544, "heads": 71, "kv_heads": 1, "ffn": 18_176, "norms_per_layer": 1,
                   **_FALCON}),
    ("falcon 40b", {"layers": 60, "hidden": 8192, "heads": 128, "kv_heads": 8, "ffn": 32_768, **_FALCON}),
    ("yi 34b", "yi-34b"),
)  # fmt: skip

# Machines that training tables do not name: a pattern, a cluster of the catalogue, the device in its place, and what
# its slots have of the cluster's PCIe 4 x16.
NODES: tuple[tuple[str, str, str, float], ...] = (
    # "Without NVLink", "an older motherboard and slow PCI lanes" (benchmarks_03_2024.md): taken as PCIe 3 x8.
    ("rtx 3090", "workstation-4090", "rtx-3090", 0.25),
    ("rtx 4090", "workstation-4090", "", 1.0),
    ("a6000 ada", "workstation-4090", "l40s", 1.0),
    ("a10g", "workstation-4090", "a10g", 1.0),
    ("^t4", "workstation-4090", "t4", 1.0),
)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("^$", ("q_proj", "v_proj")),  # PEFT's default for Llama (utils/constants.py)
    ("^q_proj k_proj v_proj o_proj", _ATTENTION),
    ("^linear_qkv linear_proj", ("linear_qkv", "linear_proj")),
    ("c_attn c_proj w1 w2|^all|key value projection mlp", ("all-linear",)),
    ("^query value|^q_proj v_proj( .tutorial.)?$", ("q_proj", "v_proj")),
    (r"^q_proj v_proj output_proj \+ mlp", ("q_proj", "v_proj", "o_proj", "mlp")),
)

# Weights, gradients and moments in 16 bits: a model loaded in its own format, trained by torch's AdamW by its defaults.
_ALL_16_BIT = {"masters": "none", "gradient_reduce": "bf16", "adamw": "foreach"}
_FULL = Variant("all weights", "16-bit weights, gradients and moments", {"method": "full"}, stack=_ALL_16_BIT)

_FMS = (
    _FULL,
    Variant("all weights, mixed, several GPUs", "Accelerate makes fp32 shards of what FSDP trains",
            {"method": "full", "trainable_precision": "mixed", "gpus": "^[248]"},
            version="accelerate@0.34", stack={"masters": "fp32", "gradient_reduce": "fp32"}),
    Variant("LoRA", "lora_dropout 0.1 (scenarios.yaml)", {"method": "lora"}, fill={"dropout": "0.1"}),
    Variant("baseline-peft-bnb", "prepare_model_for_kbit_training", {"framework": "baseline-peft", "gpus": "^1$"},
            stack={"upcast_base": True}),  # FSDP flattens tensors of one format
    Variant("foak", "Unsloth's RMS norm, rotary embedding and cross entropy, on transformers' fp32 copy of the logits",
            {"kernels": "foak"}, stack={"norms": "fused", "loss": "copied"}),
    Variant("accelerated-peft, foak", "Unsloth's products with adapters", {"framework": "accelerated-peft.*foak"},
            stack={"adapters": "fused", "adapter_units": "shared"}),  # not FSDP's: foak/utils.py, ignored_modules
    Variant("liger", "Liger's loss in pieces", {"kernels": "liger"}, stack={"loss": "pieces"}),
)  # fmt: skip
_LITGPT = (
    Variant("all but bf16-mixed", "bf16-true: 16-bit weights or adapters, gradients and moments",
            {"base_precision": "^(?!fp32)"}, stack=_ALL_16_BIT),
    Variant("LoRA", "lora_dropout 0.05 (finetune/lora.py)", {"method": "lora"}, fill={"dropout": "0.05"}),
    Variant("all", "chunked_cross_entropy on 16-bit logits (utils.py), a head of its own and one product for "
            "queries, keys and values (model.py, lora.py); no_backward_sync until the last microbatch; Fabric's FSDP1 "
            "with use_orig_params; bitsandbytes before 0.43.2 keeps inputs", {},
            model={"tied_embeddings": False},
            stack={"loss": "whole", "joined_projections": True, "quantised_inputs": "kept", "loads_whole": True,
                   "accumulation": "local", "flat_parameters": "mixed"}),
    Variant("config_hub", "the loop holds a loss until it has the next; the tutorials' longest sample was the first",
            {"source": "config_hub"}, stack={"quantised_inputs": "kept over losses"}),
)  # fmt: skip
_TORCHTUNE = (
    Variant("compiled", "compile=True", {"kernels": "compile"}, version="pytorch-compiled"),
    Variant("all", "dtype: bf16 of its configurations: 16-bit weights or adapters, gradients and moments; fused AdamW",
            {}, stack={**_ALL_16_BIT, "adamw": "in place"}),
    Variant("chunked loss", "CEWithChunkedOutputLoss, the default of its configurations: a part's gradient takes the "
            "place of its 16-bit logits", {"kernels": "chunked|torch.compile"}, stack={"loss": "fused"}),
    Variant("memory table", "checkpointing is the default of its configurations; the A6000's rows ran without",
            {"gradient_checkpointing": "differs", "gpu": "4090|A100"}, strategy={"recompute": "full"}),
)  # fmt: skip
_QWEN_README = (
    Variant("LoRA", "lora_dropout 0.05 (finetune.py)", {"method": "lora"}, fill={"dropout": "0.05"}),
    Variant(
        "LoRA on one",
        "no DeepSpeed; the model's loss reads 16-bit logits (modeling_qwen.py)",
        {"zero_or_fsdp": "^none"},
        version="accelerate@0.34",
        stack={"trained_copies": True, "shifted_logits": False},
    ),
    Variant(
        "Q-LoRA",
        "GPTQ without exllama, trainable: no kernel of AutoGPTQ",
        {"method": "qlora"},
        stack={"dequantised_by": "operators"},
    ),
    Variant(
        "all weights",
        "ds_config_zero3.json: fp32 masters and moments",
        {"method": "full"},
        strategy={"zero": 3},
    ),
    Variant("ZeRO-2", "ds_config_zero2.json", {"method": "lora", "zero_or_fsdp": "ds config"}, strategy={"zero": 2}),
)
_LIGER = (
    Variant("Liger", "fused kernels and loss", {"kernels": "liger"},
            stack={"loss": "pieces", "elementwise": "fused", "gated_activation": "fused", "norms": "fused"}),
)  # fmt: skip

_ANSWER = (
    Variant("all", "precision bf16: 16-bit weights, adapters (PEFT 0.9, tuners/lora/layer.py: in the base's format) "
            "and moments; bitsandbytes 0.43.0 keeps inputs", {},
            stack={**_ALL_16_BIT, "adapters": "16-bit", "quantised_inputs": "kept"}),
)  # fmt: skip

_BLOG = (
    Variant("all", "transformers 4.30: scores of attention in fp32 (LlamaAttention, before PyTorch's kernels); "
            "prepare_model_for_kbit_training; bitsandbytes 0.39", {}, training={"attention": "unfused"},
            stack={"attention": "unfused", "upcast_base": True, "quantised_inputs": "kept"}),
    Variant("two GPUs", "device_map: half of the layers on each", {"gpus": "^2$"}, strategy={"pp": 2}),
)  # fmt: skip

_MLPERF = (
    Variant("DeepSpeed", "the reference code: transformers, ZeRO-3, every layer repeated", {"framework": "deepspeed"},
            version="deepspeed", strategy={"zero": 3, "recompute": "full"}),
)  # fmt: skip

# Qwen's runs on two servers take twice as long as those on one GPU at any length: the batch of a step is not printed.
_UNTIMED = ({"notes": r"\(multinode\)"},)

SOURCES = tuple(
    Source(name, pattern, stack, reason, zero=zero, fitted=False, untimed=_UNTIMED, variants=variants)
    for name, pattern, stack, zero, reason, variants in (
        ("IBM fms-acceleration", "fms-acceleration", "accelerate@0.34", 3,
         "scripts/benchmarks: transformers' Trainer, models loaded in 16 bits, FSDP1", _FMS),
        ("Qwen README", "Qwen README", "deepspeed", 2, "finetune.py with its DeepSpeed configurations", _QWEN_README),
        ("LitGPT config_hub", "LitGPT config_hub", "pytorch", 3, "yaml files: bf16-true", _LITGPT),
        ("LitGPT tutorials", "LitGPT tutorials", "pytorch", 3, "bf16-true; FSDP with two devices or more", _LITGPT),
        ("torchtune", "torchtune", "pytorch", 3, "recipes and configurations", _TORCHTUNE),
        ("Answer.AI FSDP+QLoRA", "Answer.AI", "accelerate@0.34", 3, "train.py: FSDP1, Llama of transformers", _ANSWER),
        ("MLPerf LoRA", "llama2_70b_lora", "nemo@24.04", 1, "NVIDIA's NeMo code: TP with SP, CP beyond 4", _MLPERF),
        ("Liger-Kernel", "Liger", "accelerate@0.34", 3, "examples/huggingface: bf16 passes of fp32 shards", _LIGER),
        ("HF blog on 4 bits", "4bit-transformers", "accelerate@0.34", 0, "notebook of the blog, of May 2023", _BLOG),
        ("PEFT README", "PEFT README", "accelerate@0.34", 3, "batch and length are not printed", ()),
    )
)  # fmt: skip
