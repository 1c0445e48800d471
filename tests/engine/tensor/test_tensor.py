"""Tensor and sequence parallelism: a whole model against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.rounding import negligible
from engine.workers import on_ranks
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.mesh import build_mesh
from shardwise.engine.parameters import parts_of
from shardwise.engine.patterns import DECODER
from shardwise.engine.tensor.apply import apply_tensor
from shardwise.measure.reference import deviation, global_norm
from shardwise.models.decoder import Decoder, initialise
from shardwise.spec.layers import LatentAttention
from shardwise.spec.model import Model
from shardwise.spec.strategy import Overlap, Strategy

LLAMA = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50, activation="swiglu", norm="rmsnorm",
              norm_bias=False, qk_norm=True)  # fmt: skip
GPT = Model(layers=2, hidden=32, heads=4, ffn=64, vocab=51, positions="learned", tied_embeddings=True, qkv_bias=True,
            attention_out_bias=True, mlp_bias=True, max_seq=16)  # fmt: skip
LATENT = replace(LLAMA, kv_heads=4, qk_norm=False, vocab=64,
                 mla=LatentAttention(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8, q_rank=16))  # fmt: skip
MIXED = replace(LATENT, mla=LatentAttention(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8))  # queries of full width
MODELS = {"llama": LLAMA, "gpt": GPT, "latent": LATENT, "mixed": MIXED}


def batch(model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.vocab, (3, 16), generator=random)
    labels = torch.randint(model.vocab, (3, 16), generator=random)
    labels[0, :5] = -100
    return tokens, labels, torch.arange(16)[None]


def whole(model: Model) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    decoder = Decoder(model)
    initialise(decoder, 0, model)
    tokens, labels, positions = batch(model)
    loss = decoder(tokens, labels, positions=positions)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    return loss.item(), gradients, decoder(tokens, positions=positions).detach()  # type: ignore[return-value]


def cut(model: Model, strategy: Strategy) -> tuple[float, dict[str, Any], torch.Tensor]:
    mesh = build_mesh(strategy, key_value_heads=model.key_value_heads)
    decoder = Decoder(model)
    initialise(decoder, 0, model)
    apply_tensor(decoder, mesh, DECODER, model)
    tokens, labels, positions = batch(model)
    loss = decoder(tokens, labels, positions=positions)
    loss.backward()
    parts, gradients = parts_of(decoder), {}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        if parts[name].partial:
            all_reduce_sum(parameter.grad, mesh.group(parts[name].partial))
        gradients[name] = (parts[name], parameter.grad)
    return loss.item(), gradients, decoder(tokens, positions=positions).detach()


WAYS: dict[str, Any] = {
    "sequence parallel": {},
    "plain": {"sequence_parallel": False},
    "overlapped": {"overlap": Overlap(tp=True)},
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("llama", 4), ("gpt", 2), ("latent", 2), ("mixed", 2)])
def test_loss_gradients_and_logits_are_those_of_one_process(name: str, tp: int, way: str) -> None:
    model = MODELS[name]
    loss, gradients, logits = whole(model)
    rounding, norm = negligible(gradients), global_norm(gradients.values())
    strategy = Strategy(tp=tp, **WAYS[way])
    for rank_loss, parts, rank_logits in on_ranks(tp, cut, model, strategy):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(rank_logits, logits, atol=1e-6, rtol=1e-5)
        assert set(parts) == set(gradients)
        for which, (part, gradient) in parts.items():
            scale = norm if which in rounding else None
            assert deviation(which, gradient, part, gradients[which], scale).value < 1e-5, which
