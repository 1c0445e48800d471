"""RMS norms of compiled layers on a GPU: one kernel for the gradient of a norm and of the residual path around it.

The compiler's own code reads the output's gradient and the input twice: for the gradient of the input, and for that of
the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import kernels
from shardwise.models.norms import RMSNorm

PROGRAMS = 528  # four for each multiprocessor of an H100; each makes a partial sum of the weight's gradient
WIDEST = 16384  # features of a row, which a program holds at once


def normed_beside(norm: nn.Module | None, states: Tensor) -> tuple[Tensor, Tensor]:
    """The normed states, and the states themselves for the residual path."""
    if norm is None:
        return states, states
    if not (torch.compiler.is_compiling() and type(norm) is RMSNorm and norm.weighted and not norm.plus_one):
        return norm(states), states
    if not (kernels.run_on(states.device) and torch.is_grad_enabled() and states.shape[-1] <= WIDEST):
        return norm(states), states
    both: tuple[Tensor, Tensor] = _Beside.apply(states, norm.weight, norm.eps)  # type: ignore[no-untyped-call]
    return both


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(states, weight)
        ctx.epsilon = epsilon
        return F.rms_norm(states, weight.shape, weight, epsilon), states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, around: Tensor) -> tuple[Tensor, Tensor, None]:
        states, weight = ctx.saved_tensors
        of_states, partial, _ = rms_norm_gradients(gradient, around, states, weight, ctx.epsilon, False)
        return of_states, partial.sum(0).to(weight.dtype), None


@torch.library.custom_op("shardwise::rms_norm_gradients", mutates_args=())
def rms_norm_gradients(
    gradient: Tensor, around: Tensor, states: Tensor, weight: Tensor, epsilon: float, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the states, plus that of the path ``around`` the norm; and that of the weight, as partial sums
    [any, features] in fp32. With ``again``, the normed states as well."""
    if not kernels.run_on(states.device):
        return _plain_gradients(gradient, around, states, weight, epsilon, again)
    from shardwise.models.kernels.norm_kernel import norm_gradients

    features = states.shape[-1]
    rows, width = states.numel() // features, 1 << (features - 1).bit_length()
    of_states = states.new_empty(states.shape)
    partial = torch.empty((PROGRAMS, features), dtype=torch.float32, device=states.device)
    normed = torch.empty_like(of_states) if again else of_states.new_empty(0)
    norm_gradients[(PROGRAMS,)](
        gradient.contiguous(), around.contiguous(), states.contiguous(), weight, of_states, partial, normed, rows,
        features, epsilon, again, PROGRAMS, width, width == features, num_warps=max(1, min(16, width // 512)),
    )  # fmt: skip
    return of_states, partial, normed


@rms_norm_gradients.register_fake
def _(
    gradient: Tensor, around: Tensor, states: Tensor, weight: Tensor, epsilon: float, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    sums = PROGRAMS if kernels.run_on(states.device) else 1
    partial = states.new_empty((sums, states.shape[-1]), dtype=torch.float32)
    return states.new_empty(states.shape), partial, states.new_empty(states.shape if again else 0)


def _plain_gradients(
    gradient: Tensor, around: Tensor, states: Tensor, weight: Tensor, epsilon: float, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(states.dtype, torch.float32)
    x, dy, w = (tensor.to(wide) for tensor in (states, gradient, weight))
    inverse = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normed, of_normed = x * inverse, dy * w
    of_states = (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * inverse + around
    partial = (dy * normed).flatten(0, -2).sum(0, keepdim=True).float()
    outputs = (normed * w).to(states.dtype) if again else states.new_empty(0)
    return of_states.to(states.dtype), partial, outputs
