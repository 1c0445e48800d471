"""Models and jobs for tests of recompute and compilation, and one training step of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cost.builders import job
from engine.live_bytes import Kept, kept_by
from shardwise.engine.context.blocks import BackwardInputs, Scores, kernel_for
from shardwise.models.attention import attention_scale, rotation_of
from shardwise.models.decoder import Decoder, initialise
from shardwise.models.dot_product import AttentionArguments
from shardwise.spec.job import Job
from shardwise.spec.layers import LatentAttention
from shardwise.spec.model import MixtureOfExperts, Model

BATCH, SEQUENCE = 2, 16
LLAMA = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64, max_seq=16, activation="swiglu",
              norm="rmsnorm", norm_bias=False)  # fmt: skip
QWEN = replace(LLAMA, qk_norm=True, activation="geglu")
GPT = Model(layers=2, hidden=32, heads=4, ffn=64, vocab=64, max_seq=16, positions="learned", qkv_bias=True,
            attention_out_bias=True, mlp_bias=True)  # fmt: skip
LATENT = replace(LLAMA, kv_heads=4,
                 mla=LatentAttention(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8, q_rank=12))  # fmt: skip
MIXTURE = replace(LLAMA, moe=MixtureOfExperts(experts=8, top_k=2, ffn=16, shared_ffn=24))
MODELS = {"llama": LLAMA, "qwen": QWEN, "gpt": GPT, "latent": LATENT, "mixture": MIXTURE}
NUMBERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def job_of(model: Model, precision: str = "fp32", **strategy: Any) -> Job:
    training = {"seq": SEQUENCE, "precision": precision}
    return job(model, training=training, **{"microbatch": BATCH, "dp": 1, **strategy})


def decoder_of(job: Job) -> Decoder:
    decoder = Decoder(job.model)
    initialise(decoder, 0, job.model)
    for module in decoder.modules():
        if job.model.mla and hasattr(module, "attend"):
            module.attend = fused_attention  # type: ignore[assignment]
    return decoder.to(NUMBERS[job.training.precision])


def batch(model: Model, seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(model.vocab, (BATCH, SEQUENCE), generator=random) for _ in range(2))
    return tokens, labels


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def step(decoder: Decoder) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch."""
    decoder.zero_grad()
    loss = decoder(*batch(decoder.model))
    loss.backward()
    return loss.item(), gradients(decoder)


def kept_by_last_layer(decoder: Decoder, job: Job) -> list[Kept]:
    layer, apart = layer_call(decoder, job)
    return kept_by(layer, hidden_of(job), apart)


def hidden_of(job: Job) -> Tensor:
    """Hidden states as they come to a layer on one rank."""
    tokens = SEQUENCE // job.strategy.tp if job.strategy.sequence_parallel else SEQUENCE
    return torch.randn(BATCH, tokens, job.model.hidden, dtype=NUMBERS[job.training.precision])


def layer_call(decoder: Decoder, job: Job) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """The last layer as a function of hidden states, and the tensors that it needs but does not keep."""
    model, layer = job.model, list(decoder.layers.values())[-1]
    rotation = rotation_of(model, torch.arange(SEQUENCE)[None]) if model.positions == "rope" else None
    arguments = AttentionArguments(model.causal, None, attention_scale(model))
    apart = [*(rotation or ()), *layer.parameters(), *layer.buffers()]
    return lambda hidden: layer(hidden, rotation, arguments), apart


def fused_attention(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
    """Fused for values of another width than the keys as well, which torch's own is on GPUs alone."""
    out: Tensor = _Fused.apply(query, key, value, Scores(arguments.scale, arguments.causal))  # type: ignore[no-untyped-call]
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        out, log_sum = kernel_for(query, value, False).forward(query, key, value, scores)
        ctx.save_for_backward(query, key, value, out := out.contiguous(), log_sum)
        ctx.scores = scores
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = BackwardInputs(gradient, *ctx.saved_tensors)
        return *kernel_for(saved.query, saved.value, False).backward(saved, ctx.scores), None
