"""The normalisations of a model; both compute as torch's own, chosen by the model's description."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.spec.model import Model


def norm_of(model: Model, features: int | None = None, epsilon: float | None = None) -> nn.Module:
    """The norm of a model's hidden states, or of a vector of ``features``."""
    size, epsilon = features or model.hidden, epsilon or model.numerics.norm_epsilon
    if model.norm == "rmsnorm":
        return RMSNorm(size, epsilon)
    return nn.LayerNorm(size, epsilon, bias=model.norm_bias)


class RMSNorm(nn.RMSNorm):
    """torch's own, which has a kernel on GPUs alone; elsewhere torch writes it out and keeps fp32 copies for later.

    Here it keeps only its input, as the kernel does, so that a CPU holds the tensors that a GPU would.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or torch.compiler.is_compiling():
            return super().forward(x)
        normed: Tensor = _RootMeanSquare.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return F.rms_norm(x, weight.shape, weight, epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        of_out = gradient.to(wide.dtype)
        scale = (wide.square().mean(-1, keepdim=True) + ctx.epsilon).rsqrt()
        normed = wide * scale
        of_normed = of_out * weight
        of_x = (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * scale
        return of_x.to(x.dtype), (of_out * normed).flatten(0, -2).sum(0).to(weight.dtype), None
