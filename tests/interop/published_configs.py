"""Published ``config.json`` files, the keys that shape the model only, by repository.

``CATALOGUE`` names the catalogue entry each describes; ``COUNTED`` gives the exact parameters of those that
have no entry.
"""

from __future__ import annotations

from typing import Any

_LLAMA_3 = {
    "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "mlp_bias": False,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
_QWEN_3 = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "num_key_value_heads": 8, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
_DEEPSEEK = {
    "attention_bias": False, "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "max_position_embeddings": 163840,
}  # fmt: skip
_GEMMA_2 = {
    "model_type": "gemma2", "attention_bias": False, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "sliding_window": 4096,
    "vocab_size": 256000, "query_pre_attn_scalar": 256,
}  # fmt: skip

CATALOGUE: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-community/gpt2": ("gpt2", {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    }),
    "openai-community/gpt2-xl": ("gpt2-xl", {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 1600, "n_head": 25,
        "n_layer": 48, "n_positions": 1024, "vocab_size": 50257,
    }),
    "meta-llama/Llama-2-7b-hf": ("llama2-7b", {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    }),
    "meta-llama/Meta-Llama-3-8B": ("llama3-8b", {
        **_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 32,
    }),
    "meta-llama/Llama-3.1-70B": ("llama3.1-70b", {
        **_LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_hidden_layers": 80,
    }),
    "meta-llama/Llama-3.2-1B": ("llama3.2-1b", {
        **_LLAMA_3, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "max_position_embeddings": 131072, "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    }),
    "01-ai/Yi-34B": ("yi-34b", {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 20480,
        "max_position_embeddings": 4096, "num_attention_heads": 56, "num_hidden_layers": 60,
        "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 64000,
    }),
    "mistralai/Mistral-7B-v0.1": ("mistral-7b", {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000,
    }),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral-8x7b", {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "sliding_window": None,
        "vocab_size": 32000,
    }),
    "Qwen/Qwen2.5-7B": ("qwen2.5-7b", {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
        "use_sliding_window": False, "tie_word_embeddings": False, "vocab_size": 152064,
    }),
    "Qwen/Qwen3-0.6B": ("qwen3-0.6b", {
        **_QWEN_3, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_hidden_layers": 28, "tie_word_embeddings": True,
    }),
    "Qwen/Qwen3-32B": ("qwen3-32b", {
        **_QWEN_3, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_hidden_layers": 64,
    }),
    "Qwen/Qwen3-30B-A3B": ("qwen3-30b-a3b", {
        **_QWEN_3, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4,
    }),
    "deepseek-ai/DeepSeek-V2": ("deepseek-v2", {
        **_DEEPSEEK, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8, "n_routed_experts": 160,
        "n_shared_experts": 2, "num_attention_heads": 128, "num_experts_per_tok": 6,
        "num_hidden_layers": 60, "num_key_value_heads": 128, "scoring_func": "softmax", "topk_group": 3,
        "topk_method": "group_limited_greedy", "vocab_size": 102400,
    }),
    "deepseek-ai/DeepSeek-V2-Lite": ("deepseek-v2-lite", {
        **_DEEPSEEK, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "vocab_size": 102400,
    }),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", {
        **_DEEPSEEK, "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
    }),
    "moonshotai/Kimi-K2-Instruct": ("kimi-k2", {
        **_DEEPSEEK, "model_type": "kimi_k2", "first_k_dense_replace": 1, "hidden_size": 7168,
        "intermediate_size": 18432, "max_position_embeddings": 131072, "moe_intermediate_size": 2048,
        "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_group": 1,
        "topk_method": "noaux_tc", "vocab_size": 163840,
    }),
    "google/gemma-7b": ("gemma-7b", {
        "model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu",
        "hidden_activation": None, "hidden_size": 3072, "intermediate_size": 24576,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 16, "vocab_size": 256000,
    }),
    "google/gemma-2-9b": ("gemma2-9b", {
        **_GEMMA_2, "head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336,
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
    }),
    "google/gemma-2-27b": ("gemma2-27b", {
        **_GEMMA_2, "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864,
        "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16,
    }),
    "google/gemma-3-1b-pt": ("gemma3-1b", {
        "model_type": "gemma3_text", "attention_bias": False, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    }),
    "EleutherAI/gpt-neox-20b": ("gpt-neox-20b", {
        "model_type": "gpt_neox", "hidden_act": "gelu_fast", "hidden_size": 6144,
        "intermediate_size": 24576, "max_position_embeddings": 2048, "num_attention_heads": 64,
        "num_hidden_layers": 44, "rotary_pct": 0.25, "tie_word_embeddings": False, "vocab_size": 50432,
    }),
    "openai/gpt-oss-20b": ("gpt-oss-20b", {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "sliding_window": 128,
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "tie_word_embeddings": False, "vocab_size": 201088,
    }),
    "microsoft/phi-2": ("phi-2", {
        "model_type": "phi", "hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False, "vocab_size": 51200,
    }),
    "allenai/OLMo-2-1124-7B": ("olmo2-7b", {
        "model_type": "olmo2", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000, "tie_word_embeddings": False,
        "vocab_size": 100352,
    }),
    "microsoft/Phi-3-mini-4k-instruct": ("phi-3-mini", {
        "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "sliding_window": 2047, "tie_word_embeddings": False,
        "vocab_size": 32064,
    }),
    "Qwen/Qwen1.5-MoE-A2.7B": ("qwen1.5-moe-a2.7b", {
        "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 8192, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }),
    "tiiuae/falcon-7b": ("falcon-7b", {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "vocab_size": 65024,
    }),
    "tiiuae/falcon-40b": ("falcon-40b", {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 8192,
        "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
        "num_kv_heads": 8, "parallel_attn": True, "vocab_size": 65024,
    }),
}  # fmt: skip

COUNTED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, {
        "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "vocab_size": 151936,
    }),
    "allenai/OLMo-7B-hf": (6888095744, {
        "model_type": "olmo", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "clip_qkv": None, "tie_word_embeddings": False, "vocab_size": 50304,
    }),
    # OPT's position table has two spare rows, which a Model does not hold: 125239296 less 2 x 768.
    "facebook/opt-125m": (125239296 - 2 * 768, {
        "model_type": "opt", "activation_function": "relu", "do_layer_norm_before": True, "ffn_dim": 3072,
        "hidden_size": 768, "max_position_embeddings": 2048, "num_attention_heads": 12,
        "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768,
    }),
    "zai-org/GLM-4.5-Air": (106852251264, {
        "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "intermediate_size":
        10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1, "use_qk_norm": False, "vocab_size": 151552, "tie_word_embeddings": False,
    }),
    "zai-org/GLM-4.6": (352797829024, {
        "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_size": 5120, "intermediate_size":
        12288, "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1, "use_qk_norm": True, "vocab_size": 151552, "tie_word_embeddings": False,
    }),
    "MiniMaxAI/MiniMax-M2": (228689764864, {
        "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers":
        62, "num_key_value_heads": 8, "num_local_experts": 256, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
        "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "vocab_size": 200064,
        "tie_word_embeddings": False,
    }),
    "allenai/OLMoE-1B-7B-0924": (6919161856, {
        "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size":
        1024, "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts":
        64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "vocab_size": 50304, "tie_word_embeddings": False,
    }),
    "rednote-hilab/dots.llm1.base": (142774381696, {
        "model_type": "dots1", "attention_bias": False, "first_k_dense_replace": 1, "head_dim": 128, "hidden_size":
        4096, "intermediate_size": 10944, "max_position_embeddings": 32768, "max_window_layers": 62,
        "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts":
        2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "routed_scaling_factor": 2.5,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 152064,
    }),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (30532122624, {
        "model_type": "qwen3_vl_moe_text", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262144,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
        "rope_type": "default"}, "rope_theta": 5000000, "tie_word_embeddings": False, "vocab_size": 151936,
    }),
    "ibm-granite/granite-3.1-3b-a800m-base": (3298793472, {
        "model_type": "granitemoe", "attention_bias": False, "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
        "logits_scaling": 6.0, "max_position_embeddings": 131072, "num_attention_heads": 24, "num_experts_per_tok":
        8, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40, "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06, "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49155,
    }),
    "ByteDance-Seed/Seed-OSS-36B-Base": (36151104512, {
        "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
        "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
        "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
        "vocab_size": 155136,
    }),
    "ibm-granite/granite-3.3-8b-instruct": (8170864640, {
        "model_type": "granite", "attention_bias": False, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12800,
        "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True, "vocab_size": 49159,
    }),
    "LGAI-EXAONE/EXAONE-4.0-32B": (32003216384, {
        "model_type": "exaone4", "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 27392, "max_position_embeddings": 131072, "num_attention_heads": 40,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": False,
        "vocab_size": 102400,
    }),
    "transformers HunYuanDenseV1Config(head_dim=128)": (8859684864, {
        "model_type": "hunyuan_v1_dense", "head_dim": 128,
    }),
    "transformers NemotronConfig(num_key_value_heads=8)": (15628775424, {
        "model_type": "nemotron", "num_key_value_heads": 8,
    }),
    "transformers MinistralConfig(head_dim=128)": (7241732096, {"model_type": "ministral", "head_dim": 128}),
    "meta-llama/Llama-4-Scout-17B-16E": (107769861120, {
        "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
        "attn_temperature_tuning": True, "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu", "hidden_size":
        5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760, "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "use_qk_norm": True, "vocab_size": 202048,
    }),
    "meta-llama/Llama-4-Maverick-17B-128E": (400711848960, {
        "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
        "attn_temperature_tuning": True, "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu", "hidden_size":
        5120, "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 1048576, "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 128, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "use_qk_norm": False, "vocab_size": 202048,
    }),
    "baidu/ERNIE-4.5-21B-A3B-PT": (21825437888, {
        "model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 12288,
        "max_position_embeddings": 131072, "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 29,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-05,
        "rope_theta": 500000, "tie_word_embeddings": True, "use_bias": False, "vocab_size": 103424,
    }),
    "baidu/ERNIE-4.5-300B-A47B-PT": (299484163264, {
        "model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672,
        "max_position_embeddings": 131072, "moe_intermediate_size": 3584, "moe_k": 8, "moe_layer_end_index": 53,
        "moe_layer_interval": 1, "moe_layer_start_index": 3, "moe_num_experts": 64, "moe_num_shared_experts": 0,
        "num_attention_heads": 64, "num_hidden_layers": 54, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 500000, "tie_word_embeddings": False, "use_bias": False, "vocab_size": 103424,
    }),
    "tencent/Hunyuan-A13B-Instruct": (80393183232, {
        "model_type": "hunyuan_v1_moe", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 3072, "max_position_embeddings": 32768, "moe_topk": [8, 8, 8, 8,
        8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8], "num_attention_heads":
        32, "num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "vocab_size": 128167,
    }),
}  # fmt: skip

# What transformers 5 builds from the defaults of a family alone; `models/huggingface/test_counts.py` lets it count.
DEFAULTS: dict[str, int] = {
    "qwen2_vl_text": 72706203648, "qwen2_5_vl_text": 72706203648, "qwen2_vl": 72706203648, "qwen2_5_vl": 72706203648,
    "qwen3_vl_text": 12049461248, "ministral3": 8489553920, "apertus": 6979596352,
    "olmo3": 6888624128, "smollm3": 3075098624, "seed_oss": 28921040896, "granite": 6738415616,
    "granitemoeshared": 37039116288,
    "glm": 9399951360, "glm4": 9400279040, "ernie4_5": 360748032, "helium": 2172643840,
    "cohere": 34980831232, "cohere2": 34980831232, "arcee": 4022766080, "stablelm": 2795443200,
    "starcoder2": 3030371328, "exaone4": 9429069824, "cwm": 32581097472,
    "qwen3_5_text": 8953803264, "qwen3_5_moe_text": 34660610688,
}  # fmt: skip
