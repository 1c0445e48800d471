"""Parts that only some families have (norms behind, caps, a share of rope) compute the same in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from engine.parity import check
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.numerics import Numerics, RopeScaling
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

SHAPE: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61, "max_seq": 64}
RMS: dict[str, Any] = {**SHAPE, "norm": "rmsnorm", "activation": "swiglu"}
LONG = RopeScaling(
    kind="longrope", factor=4.0, original_seq=8, short_factors=(1.0, 1.1, 1.2), long_factors=(2.0, 3.0, 4.0)
)
YARN = RopeScaling(kind="yarn", factor=4.0, original_seq=4)
MODELS = {
    "olmo": Model(**SHAPE, activation="swiglu", norm_weight=False, numerics=Numerics(clip_qkv=0.3)),
    "olmo2": Model(**RMS, norm_after=True, qk_norm=True, qk_norm_whole=True),
    "phi": Model(**SHAPE, parallel_block=True, norms_per_layer=1, qkv_bias=True, mlp_bias=True, lm_head_bias=True,
                 attention_out_bias=True, qk_norm=True, numerics=Numerics(rotary_share=0.5)),
    "neox": Model(**SHAPE, parallel_block=True, mlp_bias=True, numerics=Numerics(rotary_share=0.25)),
    "phi3": Model(**RMS, numerics=Numerics(rotary_share=0.75, rope_scaling=LONG)),
    "gemma2": Model(**{**RMS, "activation": "geglu"}, norms_per_layer=4, tied_embeddings=True, sliding_window=5,
                    sliding_window_every=2,
                    numerics=Numerics(norm_plus_one=True, embedding_scale=32**0.5, attention_scalar=5.0,
                                      attention_softcap=0.5, logit_softcap=0.7)),
    "gemma3": Model(**RMS, norms_per_layer=4, tied_embeddings=True, sliding_window=5, sliding_window_every=3,
                    qk_norm=True, numerics=Numerics(norm_plus_one=True, windowed_rope_theta=100.0, rope_theta=1e6)),
    "gpt-oss": Model(**RMS, attention_sinks=True, qkv_bias=True, attention_out_bias=True, mlp_bias=True,
                     sliding_window=5, sliding_window_every=2, numerics=Numerics(swiglu_limit=2.0),
                     moe=MixtureOfExperts(experts=4, top_k=2, ffn=16, router_logit_bias=True)),
    "olmo3": Model(**RMS, norm_after=True, qk_norm=True, qk_norm_whole=True, sliding_window=5, sliding_window_every=4,
                   numerics=Numerics(windowed_rope_theta=100.0, rope_theta=100.0, rope_scaling=YARN)),
    "smollm3": Model(**RMS, tied_embeddings=True, sliding_window=5, pattern=(
        LayerRecord(repeat=2), LayerRecord(mixer="window", rotary=False), LayerRecord(rotary=False))),
    "nemotron": Model(**{**SHAPE, "activation": "relu2"}, norm="layernorm", mlp_bias=True,
                      numerics=Numerics(norm_plus_one=True, rotary_share=0.5)),
    "apertus": Model(**{**SHAPE, "activation": "xielu"}, norm="rmsnorm", qk_norm=True),
    "hunyuan": Model(**RMS, qk_norm=True, qk_norm_rotated=True),
    "granite": Model(**RMS, tied_embeddings=True, numerics=Numerics(
        embedding_scale=12.0, residual_scale=0.22, logit_scale=0.5, attention_scalar=5.0)),
    "llama4": Model(**RMS, attention_chunk=7,
                    numerics=Numerics(long_query_scale=0.8, long_query_floor=4, renormalise_top_k=False),
                    moe=MixtureOfExperts(experts=4, top_k=1, ffn=16, shared_ffn=16, router="sigmoid",
                                         weighs_inputs=True),
                    pattern=(LayerRecord(mixer="chunk"),
                             LayerRecord(mixer="full", rotary=False, feed_forward="mixture"))),
}  # fmt: skip
SP, PLAIN, PP = {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}
ULYSSES = {"cp": 2, "context_method": "ulysses"}
QUICK = [
    ("olmo2", SP),
    ("olmo2", {**PLAIN, "dp": 1}),
    ("neox", SP),
    ("gemma2", SP),
    ("gemma2", {"pp": 2, "schedule": "zbv"}),
    ("gemma3", PP),
    ("phi", {"dp": 2, "zero": 3}),
    ("gpt-oss", {**ULYSSES, "tp": 2}),
    ("llama4", {"cp": 2, "context_method": "all-gather", "tp": 2, "dp": 1}),
    ("gpt-oss", {"cp": 2, "context_method": "all-gather", "dp": 1}),
    ("smollm3", {"cp": 2, "context_method": "all-gather"}),
    ("granite", SP),
    ("nemotron", SP),
    ("apertus", {**SP, "dp": 2, "zero": 3}),
    ("hunyuan", {**ULYSSES, "tp": 2}),
]
MORE = [
    ("olmo2", {"tp": 4}),  # more ranks than key-value heads: some hold the same
    ("olmo2", {"tp": 4, "sequence_parallel": False}),
    ("olmo2", {"cp": 2, "tp": 2}),
    ("olmo2", {"dp": 2, "recompute": "selective", "recompute_operators": ("norm", "activation")}),
    ("gemma2", {"dp": 2, "recompute": "selective", "recompute_operators": ("norm", "activation")}),
    ("gemma2", {"tp": 2, "recompute": "full"}),
    ("gemma2", {**ULYSSES, "zero": 3}),
    ("gpt-oss", {"tp": 2, "ep": 2, "dp": 2}),
    ("llama4", {"tp": 2, "ep": 2, "dp": 2, "overlap": {"ep": True}}),
    ("llama4", {"dp": 2, "ep": 2, "zero": 3}),
    ("llama4", ULYSSES),
    ("gpt-oss", {"dp": 2, "ep": 2, "zero": 3}),
    ("smollm3", ULYSSES),
    ("granite", {"dp": 2, "zero": 3, "recompute": "selective", "recompute_operators": ("norm", "activation")}),
    *((name, fields) for name in MODELS for fields in (SP, PLAIN, PP, {"dp": 2, "zero": 2})),
]


def job_of(name: str, fields: dict[str, Any]) -> Job:
    strategy = Strategy(**{"dp": 1, **fields})
    training = Training(global_batch=4 * strategy.data_parallel, seq=16, precision="fp32")
    return Job(
        model=MODELS[name], cluster=cluster_from(f"laptop:{strategy.world}"), strategy=strategy, training=training
    )


@pytest.mark.quick(5)
@pytest.mark.parametrize(("name", "fields"), QUICK, ids=str)
def test_it_equals_one_process(name: str, fields: dict[str, Any]) -> None:
    check(job_of(name, fields))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), MORE, ids=str)
def test_so_do_other_layouts(name: str, fields: dict[str, Any]) -> None:
    check(job_of(name, fields))
