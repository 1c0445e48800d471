"""The MLP of a dense layer or of the shared experts: plain, or gated (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.spec.model import Model

Activation = Callable[..., Tensor]
aten: Any = torch.ops.aten


def activation_of(model: Model) -> Activation:
    """The activation of an MLP: a function of the up projection, or of gate and up."""
    if model.activation == "swiglu" and (limit := model.numerics.swiglu_limit) is not None:
        return partial(clamped_swiglu, limit, model.numerics.swiglu_alpha)
    if model.activation == "swiglu":
        return partial(_gated, "silu")
    if model.activation == "relu":
        return F.relu
    if model.activation == "relu2":
        return _squared_relu
    if model.activation == "xielu":
        return LearnedActivation()
    approximate = "tanh" if model.numerics.gelu == "tanh" else "none"
    return partial(_gated, approximate) if model.gated else partial(F.gelu, approximate=approximate)


class LearnedActivation(nn.Module):
    """xIELU (arXiv 2411.13010): quadratic above zero, an integrated ELU below, each with a learned curvature."""

    SLOPE = 0.5  # at zero
    LEAST = -1e-6  # where expm1 is taken, as the library does: its gradient below is the one there

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, initial_curvature(name))

    def forward(self, up: Tensor) -> Tensor:
        above, below = F.softplus(self.above), self.SLOPE + F.softplus(self.below)
        bent = torch.expm1(up.clamp(max=self.LEAST)) - up
        return torch.where(up > 0, above * up * up, bent * below) + self.SLOPE * up


def initial_curvature(name: str) -> float:
    """By its parameter's name: what makes both curvatures 0.8, before the softplus."""
    return math.log(math.expm1(0.8 if name.endswith("above") else 0.8 - LearnedActivation.SLOPE))


def _squared_relu(up: Tensor) -> Tensor:
    squared: Tensor = _SquaredRelu.apply(up)  # type: ignore[no-untyped-call]
    return squared


class _SquaredRelu(torch.autograd.Function):
    """Autograd would also keep the ReLU before it is squared; here it is recomputed."""

    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        ctx.save_for_backward(up)
        return F.relu(up).square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (up,) = ctx.saved_tensors
        return gradient * (2 * F.relu(up))


def _gated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    product: Tensor = _Gated.apply(gate, up, kind)  # type: ignore[no-untyped-call]
    return product


class _Gated(torch.autograd.Function):
    """The activated gate times up. Autograd would also keep the activated gate; here it is recomputed."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _activated(gate, kind) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        of_activated = gradient * up
        if ctx.kind == "silu":
            of_gate = aten.silu_backward(of_activated, gate)
        else:
            of_gate = aten.gelu_backward(of_activated, gate, approximate=ctx.kind)
        return of_gate, gradient * _activated(gate, ctx.kind), None


def _activated(gate: Tensor, kind: str) -> Tensor:
    """SiLU, or GELU by its formula ("none") or its approximation ("tanh")."""
    return F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)


def clamped_swiglu(limit: float, alpha: float, gate: Tensor, up: Tensor) -> Tensor:
    """A SwiGLU of bounded inputs, which passes on what the gate lets through even where up is zero (gpt-oss, arXiv
    2508.10925, section 2.2)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class MLP(nn.Module):
    """Up, activation (times the gate), down."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, width, bias=model.mlp_bias) if model.gated else None
        self.up = nn.Linear(model.hidden, width, bias=model.mlp_bias)
        self.down = nn.Linear(width, model.hidden, bias=model.mlp_bias)
        self.activation = activation_of(model)
        self.is_swiglu = model.activation == "swiglu" and model.numerics.swiglu_limit is None
        self.project: Project = project_each

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """The output, added to ``residual`` if that is given."""
        return plus_linear(residual, self.activation(*self.project(hidden, *self.projections())), self.down)

    def projections(self) -> tuple[nn.Linear, ...]:
        """The linear layers that ``project`` applies to the hidden states."""
        return (self.up,) if self.gate is None else (self.gate, self.up)


# Several linear layers of the same hidden states as one call, which the engine may replace: it gathers inputs once for
# all of them, or makes one large matmul of three small ones.
Project = Callable[..., tuple[Tensor, ...]]
EveryHead = Callable[..., tuple[Tensor, ...]]


def project_each(hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
    """The outputs of each linear layer, in turn."""
    if torch.compiler.is_compiling() and len(maps) > 1 and all(is_plain(linear) for linear in maps):
        each: tuple[Tensor, ...] = _Projected.apply(hidden, *(linear.weight for linear in maps))  # type: ignore[no-untyped-call]
        return each
    return tuple(linear(hidden) for linear in maps)


class _Projected(torch.autograd.Function):
    """Several matmuls of the same inputs; in the backward pass each adds to the inputs' gradient in place."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # Only one parameter: without gradients Dynamo (torch 2.11 to 2.13, `AutogradFunctionVariable`) drops `ctx` if
        # there are as many arguments as parameters, as there would be with two weights.
        hidden, *weights = given
        ctx.save_for_backward(hidden, *weights)
        return tuple(F.linear(hidden, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        rows, flat = hidden.flatten(0, -2), [gradient.flatten(0, -2) for gradient in gradients]
        of_hidden = sum_of_matmuls(flat, weights).view_as(hidden) if ctx.needs_input_grad[0] else None
        trained = ctx.needs_input_grad[1:]
        return (of_hidden, *(gradient.T @ rows if needed else None for gradient, needed in zip(flat, trained)))


def sum_of_matmuls(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of the common input [tokens, features] of several matmuls, accumulated in place."""
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:]):
        total.addmm_(gradient, weight)
    return total


def plus_linear(residual: Tensor | None, inputs: Tensor, last: nn.Module) -> Tensor:
    """The output of the ``last`` linear layer, added to ``residual``; when compiled, by the matmul itself."""
    if residual is not None and torch.compiler.is_compiling() and is_plain(last):
        summed = torch.addmm(residual.flatten(0, -2), inputs.flatten(0, -2), last.weight.T)
        return summed.view_as(residual)
    outputs: Tensor = last(inputs)
    return outputs if residual is None else residual + outputs


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is an uncut linear layer without bias, multiplied by PyTorch itself."""
    replaced = "forward" in layer.__dict__  # by a matmul in FP8
    return type(layer) is nn.Linear and getattr(layer, "bias", None) is None and not replaced


def as_they_are(*narrow: Tensor) -> tuple[Tensor, ...]:
    """Latent vectors unchanged: a single device holds them and all heads."""
    return narrow
