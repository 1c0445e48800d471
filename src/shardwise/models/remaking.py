"""Parts of a compiled layer that keep neither normed states nor activations: their backward kernels recompute them.

This is selective recompute of norms and activations without extra passes over memory. (It needs operators of its own:
if a formula were simply written twice, the compiler would compute it once and keep the result.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import kernels
from shardwise.models.mlp import sum_of_matmuls
from shardwise.models.norm_gradients import rms_norm_gradients
from shardwise.models.norms import RMSNorm


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
        return of_states, partial.sum(0).to(scale.dtype), None, *(gradient.T @ rows for gradient in flat)


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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        gate, up, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_gate, of_up, inner = swiglu_gradients((rows @ weight).view_as(gate), gate, up)
        return of_gate, of_up, rows.T @ inner.flatten(0, -2), gradient


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
    from shardwise.models.kernels.gated_kernel import BLOCK, WARPS, gated_gradients

    of_gate, of_up, output = (torch.empty_like(gate) for _ in range(3))
    elements = gate.numel()
    gated_gradients[(-(-elements // BLOCK),)](
        gradient, gate, up, of_gate, of_up, output, elements, elements % BLOCK == 0, BLOCK, num_warps=WARPS
    )
    return of_gate, of_up, output


@swiglu_gradients.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape)
