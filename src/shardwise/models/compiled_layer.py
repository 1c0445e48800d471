"""Parts of compiled layers with backward kernels of their own, on a GPU.

One kernel computes the gradient of an RMS norm and of the residual path around it. The compiler's own code reads the
output's gradient and the input twice: for the gradient of the input, and for that of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import kernels
from shardwise.models.mlp import sum_of_matmuls
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
    from shardwise.models.triton_kernels import norm_gradients

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


# -- Norms and activations that are not kept: the backward kernels recompute them ------------------
# This is selective recompute of norms and activations without extra passes over memory. (It needs operators of its own:
# if a formula were simply written twice, the compiler would compute it once and keep the result.)


def normed_projection(
    norm: nn.Module | None, states: Tensor, maps: Sequence[nn.Linear]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Linear layers without bias of the normed states; and the states themselves, for the residual path."""
    assert isinstance(norm, RMSNorm)
    weights = [linear.weight for linear in maps]
    *outputs, around = _NormedProjection.apply(states, norm.weight, norm.eps, *weights)  # type: ignore[no-untyped-call]
    return tuple(outputs), around


class _NormedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        states, scale, epsilon, *weights = given  # one parameter: see `models.mlp._Projected`
        ctx.save_for_backward(states, scale, *weights)
        ctx.epsilon = epsilon
        normed = F.rms_norm(states, scale.shape, scale, epsilon)
        return (*(F.linear(normed, weight) for weight in weights), states.view_as(states))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, scale, *weights = ctx.saved_tensors
        *of_outputs, around = gradients
        flat = [gradient.flatten(0, -2) for gradient in of_outputs]
        of_normed = sum_of_matmuls(flat, weights).view_as(states)
        of_states, partial, normed = rms_norm_gradients(of_normed, around, states, scale, ctx.epsilon, True)
        rows = normed.flatten(0, -2)
        trained = ctx.needs_input_grad[3:]
        of_weights = (gradient.T @ rows if needed else None for gradient, needed in zip(flat, trained))
        return of_states, partial.sum(0).to(scale.dtype), None, *of_weights


def gated_down(gate: Tensor, up: Tensor, down: nn.Linear, residual: Tensor) -> Tensor:
    """``residual`` plus the last linear layer of silu(gate) · up."""
    summed: Tensor = _GatedDown.apply(gate, up, down.weight, residual)  # type: ignore[no-untyped-call]
    return summed


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        inner = (F.silu(gate) * up).flatten(0, -2)
        return torch.addmm(residual.flatten(0, -2), inner, weight.T).view_as(residual)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_gate, of_up, inner = swiglu_gradients((rows @ weight).view_as(gate), gate, up)
        of_weight = rows.T @ inner.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return of_gate, of_up, of_weight, gradient


@torch.library.custom_op("shardwise::swiglu_gradients", mutates_args=())
def swiglu_gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and silu(gate) · up once more."""
    gradient, gate, up = (tensor.contiguous() for tensor in (gradient, gate, up))
    if not kernels.run_on(gate.device):
        wide = gate.float() if gate.dtype != torch.float64 else gate
        share = wide.sigmoid()
        activated = wide * share
        of_gate = gradient * up * (share + activated * (1 - share))
        return of_gate.to(gate.dtype), (gradient * activated).to(gate.dtype), (activated * up).to(gate.dtype)
    from shardwise.models.triton_kernels import GATED_BLOCK, GATED_WARPS, gated_gradients

    of_gate, of_up, output = (torch.empty_like(gate) for _ in range(3))
    elements, block = gate.numel(), GATED_BLOCK
    gated_gradients[(-(-elements // block),)](
        gradient, gate, up, of_gate, of_up, output, elements, elements % block == 0, block, num_warps=GATED_WARPS
    )
    return of_gate, of_up, output


@swiglu_gradients.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape)
