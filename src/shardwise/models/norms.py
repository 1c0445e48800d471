"""The norms of a model, chosen by its description; both compute what torch's own do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.spec.model import Model


def norm_of(
    model: Model, features: int | None = None, epsilon: float | None = None, *, weighted: bool = True
) -> nn.Module:
    """The norm of a model's hidden states, or of a vector of ``features``."""
    size, epsilon = features or model.hidden, epsilon or model.numerics.norm_epsilon
    weighted = weighted and model.norm_weight
    if model.norm == "rmsnorm":
        return RMSNorm(size, epsilon, weighted=weighted, plus_one=model.numerics.norm_plus_one)
    kind = PlusOneLayerNorm if model.numerics.norm_plus_one else nn.LayerNorm
    return kind(size, epsilon, elementwise_affine=weighted, bias=model.norm_bias)


class PlusOneLayerNorm(nn.LayerNorm):
    """It multiplies by its weight plus one (Nemotron, arXiv 2402.16819)."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """torch's own has a fused kernel on GPUs only; elsewhere torch composes it and saves fp32 copies.

    This one saves only its input, like the kernel, so that a CPU holds the same tensors as a GPU. ``plus_one``: it
    multiplies by its weight plus one, in fp32; a weight near zero is more precise than one near one.
    """

    def __init__(self, features: int, epsilon: float, *, weighted: bool = True, plus_one: bool = False) -> None:
        super().__init__(features, epsilon, elementwise_affine=weighted)
        self.weighted, self.plus_one = weighted, plus_one

    def forward(self, x: Tensor) -> Tensor:
        if not self.weighted:
            return super().forward(x)
        if not (x.is_cuda or torch.compiler.is_compiling()):
            normed: Tensor = _RootMeanSquare.apply(x, self.weight, self.eps, self.plus_one)  # type: ignore[no-untyped-call]
            return normed
        return _plus_one_norm(x, self.weight, self.eps) if self.plus_one else super().forward(x)


def _plus_one_norm(x: Tensor, weight: Tensor, epsilon: float | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + 1, epsilon).type_as(x)


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, plus_one: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.plus_one = epsilon, plus_one
        return _plus_one_norm(x, weight, epsilon) if plus_one else F.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        of_out = gradient.to(wide.dtype)
        scale = (wide.square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt()
        normed = wide * scale
        of_normed = of_out * (weight.to(wide.dtype) + 1 if ctx.plus_one else weight)
        of_x = (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * scale
        return of_x.to(x.dtype), (of_out * normed).flatten(0, -2).sum(0).to(weight.dtype), None, None
