"""A small model of every family, as the transformers library builds it, with weights that are not near zero."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
NO_PAD = {"pad_token_id": None}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
NTK = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **SMALL, **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "first_k_dense_replace": 1,
}  # fmt: skip
V3: dict[str, Any] = {**LATENT, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
GEMMA: dict[str, Any] = {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5,
                         "pad_token_id": None}  # fmt: skip
BALANCED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1}
GLM: dict[str, Any] = {**SMALL, **BALANCED, "head_dim": 16}
GRANITE_MOE: dict[str, Any] = {
    **SMALL, "num_local_experts": 4, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.3, "pad_token_id": None,
}  # fmt: skip
ERNIE_MOE: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 16,
    "moe_num_experts": 8,
    "moe_k": 2,
    "pad_token_id": None,
}
LLAMA_4: dict[str, Any] = {
    **SMALL, "head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4,
    "attention_chunk_size": 7, "no_rope_layer_interval": 3, "floor_scale": 4, "attn_scale": 0.7,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    **SMALL,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
}
V2: dict[str, Any] = {**LATENT, "n_shared_experts": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-biased": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {**SMALL, "rope_scaling": LLAMA_3, "rope_theta": 500.0, "rms_norm_eps": 1e-5}),
    "llama-linear-rope": ("Llama", {**SMALL, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-yarn": ("Llama", {**SMALL, "rope_scaling": YARN, "rope_theta": 100.0, "head_dim": 16}),
    "mistral-window": ("Mistral", {**SMALL, "sliding_window": 7}),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2-window": ("Qwen2", {**SMALL, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5}),
    "qwen2-some-windows": ("Qwen2", {**SMALL, "use_sliding_window": True, "max_window_layers": 2,
                                     "sliding_window": 5}),
    "qwen3-listed": ("Qwen3", {**SMALL, "use_sliding_window": True, "sliding_window": 5, "layer_types": [
        "sliding_attention", "full_attention", "full_attention"]}),
    "qwen2-moe": ("Qwen2Moe", {**SMALL, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16, "rope_theta": 1e6}),
    "qwen3-moe": ("Qwen3Moe", {**SMALL, **EXPERTS, "head_dim": 8, "num_experts": 8, "norm_topk_prob": True}),
    "deepseek-v2": ("DeepseekV2", {**V2, "q_lora_rank": None}),
    "deepseek-v2-groups": ("DeepseekV2", {**V2, "q_lora_rank": 12, "n_group": 4, "topk_group": 2,
                                          "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}),
    "deepseek-v3": ("DeepseekV3", V3),
    "deepseek-v3-yarn": ("DeepseekV3", {**V3, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek-v3-halves": ("DeepseekV3", {**V3, "rope_interleave": False}),
    "olmo": ("Olmo", {**SMALL, "clip_qkv": 0.5, "pad_token_id": None}),
    "olmo2": ("Olmo2", {**SMALL, "pad_token_id": None}),
    "olmo3": ("Olmo3", {**SMALL, "num_hidden_layers": 5, "pad_token_id": None, "sliding_window": 5,
                        "rope_scaling": YARN}),
    "olmo3-listed": ("Olmo3", {**SMALL, "pad_token_id": None, "sliding_window": 5, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "smollm3": ("SmolLM3", {**SMALL, **NO_PAD, "no_rope_layer_interval": 2}),
    "smollm3-window": ("SmolLM3", {**SMALL, **NO_PAD, "no_rope_layers": [0, 1, 1], "use_sliding_window": True,
                                   "sliding_window": 5, "tie_word_embeddings": False}),
    "seed-oss": ("SeedOss", {**SMALL, **NO_PAD, "head_dim": 16}),
    "seed-oss-biased": ("SeedOss", {**SMALL, **NO_PAD, "attention_bias": False, "attention_out_bias": True,
                                    "mlp_bias": True}),
    "granite": ("Granite", {**SMALL, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
                            "attention_multiplier": 0.3, "tie_word_embeddings": True}),
    "granite-biased": ("Granite", {**SMALL, "attention_bias": True, "mlp_bias": True, "logits_scaling": 0.7}),
    "hunyuan": ("HunYuanDenseV1", {**SMALL, **NO_PAD, "head_dim": 16}),
    "hunyuan-biased": ("HunYuanDenseV1", {**SMALL, **NO_PAD, "head_dim": 8, "attention_bias": True,
                                          "tie_word_embeddings": True, "rope_parameters": NTK}),
    "glm": ("Glm", {**SMALL, **NO_PAD, "head_dim": 16}),
    "glm-unbiased": ("Glm", {**SMALL, **NO_PAD, "head_dim": 8, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4": ("Glm4", {**SMALL, **NO_PAD, "head_dim": 16}),
    "ernie4-5": ("Ernie4_5", {**SMALL, **NO_PAD, "head_dim": 16}),
    "ernie4-5-biased": ("Ernie4_5", {**SMALL, **NO_PAD, "head_dim": 8, "use_bias": True,
                                     "tie_word_embeddings": False}),
    "helium": ("Helium", {**SMALL, **NO_PAD, "head_dim": 8, "mlp_bias": True}),
    "helium-biased": ("Helium", {**SMALL, **NO_PAD, "head_dim": 8, "attention_bias": True}),
    "cohere": ("Cohere", {**SMALL, **NO_PAD}),
    "cohere-biased": ("Cohere", {**SMALL, **NO_PAD, "attention_bias": True, "logit_scale": 0.3,
                                 "tie_word_embeddings": False}),
    "cohere2": ("Cohere2", {**SMALL, **NO_PAD, "num_hidden_layers": 5, "sliding_window": 5}),
    "nemotron": ("Nemotron", {**SMALL, **NO_PAD}),
    "nemotron-biased": ("Nemotron", {**SMALL, **NO_PAD, "attention_bias": True, "mlp_bias": True, "head_dim": 16,
                                     "partial_rotary_factor": 0.25, "hidden_act": "gelu"}),
    "arcee": ("Arcee", {**SMALL, **NO_PAD}),
    "arcee-biased": ("Arcee", {**SMALL, **NO_PAD, "mlp_bias": True, "attention_bias": True}),
    "stablelm": ("StableLm", {**SMALL, **NO_PAD}),
    "stablelm-parallel": ("StableLm", {**SMALL, **NO_PAD, "use_parallel_residual": True, "use_qkv_bias": True,
                                       "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", {**SMALL, **NO_PAD, "sliding_window": 5}),
    "starcoder2-unbiased": ("Starcoder2", {**SMALL, **NO_PAD, "use_bias": False, "tie_word_embeddings": False}),
    "exaone4": ("Exaone4", {**SMALL, **NO_PAD, "num_hidden_layers": 5, "sliding_window": 5}),
    "exaone4-full": ("Exaone4", {**SMALL, **NO_PAD, "sliding_window": None,
                                 "layer_types": ["full_attention"] * 3}),
    "ministral": ("Ministral", {**SMALL, **NO_PAD, "head_dim": 16, "sliding_window": 5, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}),
    "ministral3": ("Ministral3", {**SMALL, **NO_PAD, "head_dim": 16, "rope_parameters": {
        **YARN, "original_max_position_embeddings": 6, "rope_theta": 100.0, "llama_4_scaling_beta": 0.4}}),
    "apertus": ("Apertus", {**SMALL, **NO_PAD, "dtype": torch.float32}),
    "apertus-tied": ("Apertus", {**SMALL, **NO_PAD, "dtype": torch.float32, "rope_theta": 9.0, "rope_scaling": YARN,
                                 "attention_bias": True, "tie_word_embeddings": True}),
    "cwm": ("Cwm", {**SMALL, **NO_PAD, "bos_token_id": 0, "head_dim": 16, "num_hidden_layers": 5, "sliding_window": 5}),
    "gpt-neox": ("GPTNeoX", {**SMALL, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5,
                                                          "rope_type": "default"}}),
    "gpt-neox-serial": ("GPTNeoX", {**SMALL, "use_parallel_residual": False, "attention_bias": False}),
    "phi": ("Phi", {**SMALL, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {**SMALL, "partial_rotary_factor": 0.75, "pad_token_id": None, "sliding_window": 9}),
    "phi3-long": ("Phi3", {**SMALL, "pad_token_id": None, "original_max_position_embeddings": 8,
                           "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3],
                                            "long_factor": [1.5, 2.0, 3.0, 4.0]}}),
    "gemma": ("Gemma", {**GEMMA, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": ("Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-listed": ("Gemma2", {**GEMMA, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window_pattern": 3, "final_logit_softcapping": 4.0}),
    "glm4-moe": ("Glm4Moe", {**GLM, "num_nextn_predict_layers": 0}),
    "glm4-moe-unlike": ("Glm4Moe", {**GLM, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.25,
                                    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2,
                                    "norm_topk_prob": False, "num_nextn_predict_layers": 0}),
    "dots1": ("Dots1", {**SMALL, **BALANCED, "n_shared_experts": 2, "max_window_layers": 3}),
    "dots1-window": ("Dots1", {**SMALL, **BALANCED, "n_shared_experts": 1, "max_window_layers": 1, "sliding_window": 5,
                               "norm_topk_prob": True, "attention_bias": True}),
    "minimax-m2": ("MiniMaxM2", {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2-share": ("MiniMaxM2", {**SMALL, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3,
                                       "rotary_dim": 4}),
    "olmoe": ("Olmoe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}),
    "olmoe-clip": ("Olmoe", {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": None,
                             "norm_topk_prob": True, "clip_qkv": 0.8}),
    "granite-moe": ("GraniteMoe", {**GRANITE_MOE, "attention_bias": True}),
    "granite-moe-shared": ("GraniteMoeShared", {**GRANITE_MOE, "shared_intermediate_size": 24}),
    "ernie-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "ernie-moe-some": ("Ernie4_5_Moe", {**ERNIE_MOE, "num_hidden_layers": 5, "moe_layer_interval": 2,
                                        "moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_k": 3,
                                        "moe_num_shared_experts": 0, "tie_word_embeddings": False}),
    "hunyuan-moe": ("HunYuanMoEV1", {**SMALL, "num_experts": 4, "moe_topk": 2, "head_dim": 8, "pad_token_id": None}),
    "hunyuan-moe-alpha": ("HunYuanMoEV1", {**SMALL, "num_experts": 8, "moe_topk": [3, 3, 3], "pad_token_id": None,
                                           "attention_bias": True, "head_dim": 16, "tie_word_embeddings": True,
                                           "rope_scaling": {"type": "dynamic", "alpha": 20.0, "factor": 1.0}}),
    "llama4": ("Llama4", LLAMA_4),
    "llama4-unlike": ("Llama4", {**LLAMA_4, "num_hidden_layers": 5, "interleave_moe_layer_step": 2,
                                 "use_qk_norm": False,
                                 "no_rope_layers": [0, 1, 1, 0, 1], "attention_bias": True, "attn_scale": 0.5,
                                 "floor_scale": 3}),
    "llama4-whole": ("Llama4", {**LLAMA_4, "attn_temperature_tuning": False, "moe_layers": [1],
                                "layer_types": ["full_attention", "chunked_attention", "full_attention"],
                                "rope_scaling": {**LLAMA_3, "low_freq_factor": 1.0, "high_freq_factor": 1.0}}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-unlike": ("GptOss", {**GPT_OSS, "attention_bias": False, "swiglu_limit": 0.3, "swiglu_alpha": 0.7,
                                  "sliding_window": 64,
                                  "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "n_positions": 64,
                      "bos_token_id": None, "eos_token_id": None}),
}  # fmt: skip


def build(case: str) -> Any:
    """The library's model of a case: in fp32, in evaluation, every parameter drawn wide enough to matter."""
    family, settings = CASES[case]
    config = getattr(transformers, f"{family}TextConfig" if family in ("Gemma3", "Llama4") else f"{family}Config")(
        **settings
    )
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # what older releases take instead leaves the cap out
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + head)(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scales = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if scales else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def saved(case: str, folder: Path) -> Any:
    """The library's model, saved by the library."""
    model = build(case)
    model.save_pretrained(folder)
    return model
