"""Small models of every kind the decoder builds, and helpers that the tests of `models` share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.models import Decoder, initialise
from shardwise.spec.layers import LatentAttention, LayerRecord
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.numerics import Numerics

_LLAMA: dict[str, Any] = {
    "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61, "activation": "swiglu",
    "norm": "rmsnorm", "max_seq": 64,
}  # fmt: skip
_EXPERTS = MixtureOfExperts(experts=8, top_k=2, ffn=16, shared_ffn=16)
_LATENT = LatentAttention(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6, q_rank=12)
SHAPES: dict[str, Model] = {
    "dense": Model(**_LLAMA),
    "window": Model(**_LLAMA, qk_norm=True, sliding_window=5, sliding_window_every=2),
    "chunks": Model(**_LLAMA, attention_chunk=7, moe=replace(_EXPERTS, shared_ffn=0), pattern=(
        LayerRecord(mixer="chunk"), LayerRecord(mixer="full", rotary=False, feed_forward="mixture"))),
    "sinks": Model(**_LLAMA, attention_sinks=True, qkv_bias=True, attention_out_bias=True, mlp_bias=True,
                   sliding_window=5, sliding_window_every=2, numerics=Numerics(swiglu_limit=2.0),
                   moe=replace(_EXPERTS, shared_ffn=0, router_logit_bias=True)),
    "llama4": Model(**_LLAMA, attention_chunk=7, numerics=Numerics(
        long_query_scale=0.8, long_query_floor=4, renormalise_top_k=False, balance_loss=0.0),
        moe=replace(_EXPERTS, top_k=1, router="sigmoid", weighs_inputs=True), pattern=(
            LayerRecord(mixer="chunk"), LayerRecord(mixer="full", rotary=False, feed_forward="mixture"))),
    "gpt": Model(**{**_LLAMA, "activation": "gelu", "norm": "layernorm", "kv_heads": 4}, positions="learned",
                 tied_embeddings=True, qkv_bias=True, attention_out_bias=True, mlp_bias=True, lm_head_bias=True),
    "geglu": Model(**{**_LLAMA, "activation": "geglu"}, positions="none", numerics=Numerics(gelu="exact")),
    "moe": Model(**_LLAMA, moe=replace(_EXPERTS, shared_gate=True, every=2)),
    "moe-biased": Model(**{**_LLAMA, "activation": "relu"}, mlp_bias=True, moe=_EXPERTS),
    "mla": Model(**{**_LLAMA, "kv_heads": 4}, mla=_LATENT,
                 moe=replace(_EXPERTS, router="sigmoid", router_bias=True, groups=4, groups_used=2, dense_layers=1)),
}  # fmt: skip


def decoder_of(model: Model, seed: int = 0, wide: bool = True) -> Decoder:
    """A decoder with its first values; ``wide`` ones, so that every part of it shows in the logits."""
    decoder = Decoder(model)
    initialise(decoder, seed, model)
    if wide:
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)
    return decoder


def tokens(batch: int = 2, seq: int = 24, vocab: int = 61, seed: int = 3) -> Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    """The gradients, taken out of the decoder."""
    found = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Equal up to rounding, measured against the size of the gradients of the whole model."""
    assert left.keys() == right.keys()
    size = max(float(value.abs().max()) for value in right.values())
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=1e-4, atol=tolerance * size, msg=lambda m, n=name: f"{n}: {m}"
        )
