"""Gradients of a whole model in FP8 are off by what rounding alone makes of them, in an emulation that shares no code.

The emulation computes in float64 and rounds the operands of every linear layer, forward and backward. Both are compared
with float64 without rounding: a mistake (a term left out, a scale applied twice) would add to the distance.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.fp8.cases import MODEL, PRECISIONS, gradients_here, job_of
from engine.workers import on_ranks

HIDDEN, HEADS = MODEL["hidden"], MODEL["heads"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {"fp8": "tensor", "fp8-rowwise": "row", "fp8-blockwise": "block"}


def rounded(matrix: Tensor, dtype: torch.dtype, recipe: str, square: bool = False) -> Tensor:
    most = 448.0 if dtype is E4M3 else 57344.0
    wide = matrix.float()
    if recipe == "tensor":
        scale = (most / wide.abs().max().clamp(min=1e-12)).expand_as(wide)
    elif recipe == "row":
        scale = (2 ** torch.floor(torch.log2(most / wide.abs().amax(1, keepdim=True).clamp(min=1e-12)))).expand_as(wide)
    else:
        height = 128 if square else 1
        blocks = wide.view(len(wide) // height, height, -1, 128)
        scale = (most / blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)).expand_as(blocks).reshape(wide.shape)
    return (wide * scale).to(dtype).double() / scale.double()


class RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.recipe = recipe
        return rounded(inputs, E4M3, recipe) @ rounded(weight, E4M3, recipe, True).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (inputs, weight), recipe = ctx.saved_tensors, ctx.recipe
        dtype = E5M2 if recipe == "tensor" else E4M3
        of_inputs = rounded(gradient, dtype, recipe) @ rounded(weight.T.contiguous(), E4M3, recipe, True).T
        of_weight = rounded(gradient.T.contiguous(), dtype, recipe) @ rounded(inputs.T.contiguous(), E4M3, recipe).T
        return of_inputs, of_weight, None


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotated(heads: Tensor) -> Tensor:
    half, seq = heads.shape[-1] // 2, heads.shape[1]
    angles = torch.arange(seq).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    (first, second), (cosine, sine) = heads.split(half, -1), (angles.cos()[:, None], angles.sin()[:, None])
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def loss_of(weights: dict[str, Tensor], tokens: Tensor, labels: Tensor, recipe: str) -> Tensor:
    """The decoder of MODEL in float64."""

    def linear(inputs: Tensor, name: str) -> Tensor:
        weight = weights[name + ".weight"]
        found: Tensor = RoundedLinear.apply(inputs, weight, recipe) if recipe else inputs @ weight.T  # type: ignore[no-untyped-call]
        return found

    (batch, seq), states = tokens.shape, weights["embedding.weight"][tokens.flatten()]
    for number in range(MODEL["layers"]):
        layer = f"layers.{number}"
        normed = norm(states, weights[f"{layer}.attention_norm.weight"])
        query, key, value = (
            linear(normed, f"{layer}.attention.{name}").view(batch, seq, HEADS, -1)
            for name in ("query", "key", "value")
        )
        query, key, value = (one.transpose(1, 2) for one in (rotated(query), rotated(key), value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        states = states + linear(attended.reshape(-1, HIDDEN), f"{layer}.attention.output")
        normed = norm(states, weights[f"{layer}.mlp_norm.weight"])
        wide = F.silu(linear(normed, f"{layer}.mlp.gate")) * linear(normed, f"{layer}.mlp.up")
        states = states + linear(wide, f"{layer}.mlp.down")
    return F.cross_entropy(norm(states, weights["norm.weight"]) @ weights["head.weight"].T, labels.flatten())


@cache
def engine_gradients(precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    ((weights, gradients, tokens, labels),) = on_ranks(1, gradients_here, job_of(precision, microbatch=8))
    return weights, gradients, tokens, labels


@cache
def emulated(recipe: str) -> dict[str, Tensor]:
    weights, _, tokens, labels = engine_gradients("bf16")
    wide = {name: one.double().requires_grad_() for name, one in weights.items()}
    loss_of(wide, tokens, labels, recipe).backward()  # type: ignore[no-untyped-call]
    return {name: one.grad for name, one in wide.items() if one.grad is not None}


def apart(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The distance, relative, and how long the found one is in the direction of the expected."""
    found, expected = found.double().flatten(), expected.flatten()
    return float((found - expected).norm() / expected.norm()), float(found @ expected / (expected @ expected))


def test_the_emulation_without_rounding_is_the_model() -> None:
    for name, one in engine_gradients("bf16")[1].items():
        off, along = apart(one, emulated("")[name])
        assert off < 0.03 and abs(along - 1) < 0.01, name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_off_by_rounding_alone(precision: str) -> None:
    for name, one in engine_gradients(precision)[1].items():
        off, along = apart(one, emulated("")[name])
        expected, expected_along = apart(emulated(RECIPES[precision])[name], emulated("")[name])
        assert off == pytest.approx(expected, rel=0.25, abs=0.01), name
        assert along == pytest.approx(expected_along, abs=0.05), name
