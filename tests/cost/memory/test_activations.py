"""What a layer keeps for its backward pass, against the closed forms of the literature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cost.builders import DENSE, GPT, LLAMA, MIXTURE, MLA_MOE, MOE, job
from shardwise.cost.memory.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
    layer_saved_tensors,
)
from shardwise.cost.memory.device import peak_memory
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.jobs import read_job
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.training import RECIPES

S, B, H, A, T = 128, 2, 64, 8, 4
SBH = S * B * H
KORTHIKANTI = {"dropout": True, "attention": "unfused"}

# Korthikanti et al. 2022, Table 2.
TABLE_2: dict[str, tuple[dict[str, Any], float]] = {
    "no parallelism": ({}, SBH * (34 + 5 * A * S / H)),
    "tensor": ({"tp": T, "sequence_parallel": False}, SBH * (10 + 24 / T + 5 * A * S / (H * T))),
    "tensor + sequence": ({"tp": T}, SBH / T * (34 + 5 * A * S / H)),
    "tensor + selective": ({"tp": T, "sequence_parallel": False, "recompute": "selective"}, SBH * (10 + 24 / T)),
    "tensor + sequence + selective": ({"tp": T, "recompute": "selective"}, SBH * 34 / T),
    "full": ({"tp": T, "sequence_parallel": False, "recompute": "full"}, SBH * 2),
    "full + sequence": ({"tp": T, "recompute": "full"}, SBH * 2 / T),
}


def layer(model: Model, training: dict[str, Any] | None = None, kind: LayerRecord = DENSE, **strategy: Any) -> float:
    return layer_activation_bytes(job(model, training=training, microbatch=B, dp=1, **strategy), kind)


@pytest.mark.parametrize("case", TABLE_2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_korthikanti_table_2_is_exact(case: str, precision: str) -> None:
    strategy, expected = TABLE_2[case]
    assert layer(GPT, {**KORTHIKANTI, "precision": precision}, **strategy) == expected


def test_parts_of_a_layer() -> None:
    """Attention 11·sbh + 5·a·s²·b, MLP 19·sbh, norms 4·sbh (section 4.1)."""
    case = job(GPT, training=KORTHIKANTI, microbatch=B, dp=1)
    tensors = {t.name: t.bytes for t in layer_saved_tensors(case, DENSE)}
    assert tensors["attention scores"] == 5 * A * S * S * B
    assert tensors["norm inputs"] == 4 * SBH
    assert tensors["activation inputs"] + tensors["activation output"] == 16 * SBH
    assert tensors["queries"] + tensors["keys"] + tensors["values"] + tensors["attention output"] == 8 * SBH


def test_ends_of_the_pipeline() -> None:
    """Embedding dropout s·b·h per microbatch, last stage 4·sbh·(1 + v/h); divided by t under SP (section 4.3)."""
    whole, split = (job(GPT, training=KORTHIKANTI, microbatch=B, dp=1, tp=tp) for tp in (1, T))
    assert embedding_activation_bytes(whole) == SBH
    assert embedding_activation_bytes(split) == SBH / T
    assert head_activation_bytes(whole) == 4 * SBH * (1 + GPT.vocab / H)
    assert head_activation_bytes(split) == 4 * SBH / T * (1 + GPT.vocab / H)


def test_flash_attention_keeps_a_row_sum_instead_of_scores() -> None:
    """Without dropout the stored softmax is 2·a·s²·b; FlashAttention keeps 4·a·s·b (fp32 log-sum-exp)."""
    unfused, flash = (layer(GPT, {"attention": kind}) for kind in ("unfused", "flash"))
    assert unfused - flash == 2 * A * S * S * B - 4 * A * S * B
    # One more sequence length doubles flash and quadruples the scores.
    twice = layer(replace(GPT, max_seq=2 * S), {"attention": "flash", "seq": 2 * S})
    assert twice == 2 * flash


# -- the formula that fits 29 published SimuMax rows to 0.4 % (accuracy notes, section 7), from its own symbols --


def simumax_attention(model: Model, tokens: float, t: int) -> float:
    if model.mla:
        m, a = model.mla, model.heads / t
        latent = tokens / t * (2 * (m.q_rank or 0) + 2 * m.kv_rank + m.rope_dim)
        return 2 * latent + 2 * tokens * (2 * a * (m.nope_dim + m.rope_dim) + 2 * a * m.value_dim)
    a, kv, d = model.heads, model.kv_heads or model.heads, model.head_dim or 0
    return 2 * tokens * ((a + 2 * kv) * d + a * d) / t


def simumax_dense(model: Model, tokens: float, t: int) -> float:
    gated = 2 if model.gated else 1
    shared = 8 * model.hidden * tokens / t + simumax_attention(model, tokens, t) + 4 * model.heads * tokens / t
    return shared + 2 * tokens * (gated + 1) * model.ffn / t


def simumax_moe(model: Model, tokens: float, t: int) -> float:
    assert model.moe
    moe, h = model.moe, model.hidden
    shared = 8 * h * tokens / t + simumax_attention(model, tokens, t) + 4 * model.heads * tokens / t
    routed = 2 * tokens / t * moe.top_k * (h + 3 * moe.ffn)
    return shared + routed + 6 * tokens / t * moe.shared_ffn + 8 * tokens / t * moe.experts


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [GPT, LLAMA, MLA_MOE], ids=["gpt", "llama", "mla"])
def test_simumax_dense_layer(model: Model, tp: int) -> None:
    assert layer(model, tp=tp) == pytest.approx(simumax_dense(model, S * B, tp), rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [MOE, MLA_MOE], ids=["moe", "mla moe"])
def test_simumax_expert_layer(model: Model, tp: int) -> None:
    case = layer(model, kind=MIXTURE, tp=tp, expert_tp=1)
    assert case == pytest.approx(simumax_moe(model, S * B, tp), rel=1e-12)


def test_context_parallelism_divides_the_tokens() -> None:
    assert layer(LLAMA, cp=4) == layer(LLAMA) / 4


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    """LLAMA has 2 key-value heads: from tp 2 on every rank keeps one whole head of keys and of values."""

    def keys(tp: int) -> float:
        tensors = layer_saved_tensors(job(LLAMA, microbatch=B, dp=1, tp=tp), DENSE)
        return sum(t.bytes for t in tensors if t.name in ("keys", "values"))

    one_head = 2 * 2 * S * B * 8
    assert [keys(tp) for tp in (1, 2, 4, 8)] == [2 * one_head, one_head, one_head, one_head]


def test_experts_without_sequence_parallelism_keep_the_same_as_with_it() -> None:
    """Ranks that hold the same tokens and split every expert: each keeps all tokens and its slice of the width."""

    def routed(sequence_parallel: bool) -> float:
        case = job(MOE, microbatch=B, dp=1, tp=4, sequence_parallel=sequence_parallel)
        tensors = layer_saved_tensors(case, MIXTURE)
        return sum(t.bytes for t in tensors if "expert" in t.name or "dispatched" in t.name)

    tokens = S * B * 4  # top 4
    by_hand = 2 * tokens * 64 + 3 * 2 * tokens * 32 / 4
    assert routed(False) == routed(True) == by_hand


@pytest.mark.parametrize("operators", [("attention",), ("norm",), ("activation",), ("attention", "norm", "activation")])
def test_selective_recompute_drops_exactly_the_named_tensors(operators: tuple[str, ...]) -> None:
    by_operator = {"attention": 2 * A * S * S * B, "norm": 4 * SBH, "activation": 8 * SBH}
    stored = {"attention": "unfused"}
    kept = layer(GPT, stored, recompute="selective", recompute_operators=list(operators))
    assert layer(GPT, stored) - kept == sum(by_operator[name] for name in operators)


def test_flash_attention_leaves_the_operators_around_it_to_selective_recompute() -> None:
    """It rebuilds its scores itself: naming attention alone must still save memory, and cost no second attention."""
    alone, around = (
        layer(GPT, recompute="selective", recompute_operators=names)
        for names in (["attention"], ["norm", "activation"])
    )
    assert alone == around == layer(GPT) - 12 * SBH


def test_eight_bit_recipes_narrow_only_the_inputs_of_linear_layers() -> None:
    def linear_inputs(case: Job) -> float:
        wanted = ("linear inputs", "activation output", "attention output")
        return sum(t.bytes for t in layer_saved_tensors(case, DENSE) if t.name in wanted)

    wide, narrow = (job(LLAMA, training={"precision": p}, dp=1) for p in ("bf16", "fp8"))
    assert linear_inputs(narrow) == linear_inputs(wide) / 2
    assert RECIPES["fp8"].activation == 2
    # FlashAttention's backward pass reads the output in 16 bits: that copy comes on top.
    change = layer_activation_bytes(wide, DENSE) - layer_activation_bytes(narrow, DENSE)
    assert change == linear_inputs(wide) / 2 - 2 * S * 64


def test_mixtures_that_run_again_keep_what_enters_them() -> None:
    """Megatron-Core's "moe" module: of router, exchange and experts nothing stays, attention keeps all it kept."""
    again = {"recompute": "selective", "recompute_operators": ("experts",)}
    case = job(MOE, microbatch=B, dp=1, **again)
    outside = sum(tensor.bytes for tensor in layer_saved_tensors(case, MIXTURE) if not tensor.in_mixture)
    assert layer_activation_bytes(case, MIXTURE) == outside < layer(MOE, kind=MIXTURE)
    assert layer(LLAMA, **again) == layer(LLAMA)


def test_a_parallel_block_has_one_norm_output_and_one_dropout() -> None:
    training = {"dropout": True}
    plain, parallel = (layer(model, training) for model in (GPT, replace(GPT, parallel_block=True, norms_per_layer=1)))
    assert plain - parallel == SBH * (2 + 2 + 1)


# -- DeepSeek-V3 as published (arXiv 2412.19437) -----------------------------------------------------

DEEPSEEK = Path(__file__).parents[3] / "examples" / "deepseek-v3-hgx-h800.yaml"


def test_deepseek_v3_keeps_what_its_report_says() -> None:
    """A token of an expert layer, by hand: norms, SwiGLU and up-projections run again (sections 3.2.3 and 3.3.3)."""
    hidden, heads, experts, wide = 7168, 128, 8, 2048
    residual = 2 * 2 * hidden  # the inputs of two norms, bf16
    attention = heads * 128 * 1.5 + 4 * heads + 2 * (1536 + 512 + 64 + 1536 + 512)  # E5M6, log-sum-exp, latents
    experts_in = 8 * 256 + experts * hidden  # router in fp32; dispatched tokens in FP8
    gates = 2 * (experts + 1) * wide  # inputs of SwiGLU in FP8, the shared expert's too
    published = read_job(DEEPSEEK)
    assert layer_activation_bytes(published, MIXTURE) == 4096 * (residual + attention + experts_in + gates)
    wider = published.unchecked(stack=replace(published.stack, saved_activations="16-bit"))
    more = layer_activation_bytes(wider, MIXTURE) - layer_activation_bytes(published, MIXTURE)
    assert more == 4096 * (gates + heads * 128 * (1 + 2 - 1.5))  # bf16 gates; FP8 and bf16 instead of E5M6


def test_deepseek_v3_as_published_fits() -> None:
    published = read_job(DEEPSEEK)
    assert peak_memory(published).total < published.cluster.device.memory


def test_a_delta_net_keeps_as_much_for_every_token_however_long_the_sequence() -> None:
    """Qwen3-Next by hand, in 16 bits: 2048 queries and keys, 4096 values, 32 heads with a triangle of 64 tokens."""
    model = model_from_hf_config({"model_type": "qwen3_next"})
    short, long = (
        [layer_activation_bytes(job(model, training={"seq": s}, dp=1, microbatch=B), kind) / (s * B)
         for kind in model.kinds]
        for s in (1024, 8192)
    )  # fmt: skip
    assert short == long
    around_states = (2 * 2048 + 4096) + 2 * 4096 + 4096 + 32 * 64  # convolution, queries and keys, values, triangles
    # Output, its gate, and both; of each head a 16-bit rate, an fp32 decay, and norms of its query and its key.
    of_states = 2 * (around_states + 3 * 4096) + 32 * (2 + 3 * 4)
    # Queries, keys and values before and after their norms, output, gate, and both; one fp32 sum of each head.
    of_attention = 2 * (2 * 4096 + 3 * 512 + 3 * 4096) + 16 * 4
    assert short[0] - short[1] == of_states - of_attention
