"""One step of a list of local tensors: AdamW and SGD by PyTorch's own fused kernels on any device, and Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine import torch_private
from shardwise.engine.labels import Called
from shardwise.engine.optim import eight_bits
from shardwise.engine.parameters import as_divided, divided_as
from shardwise.engine.profiler_ranges import sent
from shardwise.spec.training import Optimization

# Of every kind of update: the names of its states, which are fp32 unless the kind says otherwise.
STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw-bf16-moments": ("exp_avg", "exp_avg_sq"),
    "adam8bit": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}


@dataclass(frozen=True)
class Update:
    """One step of a group of parameters. Its tensors are scalars on the device of the parameters."""

    kind: str
    settings: Optimization
    learning_rate: float | Tensor  # a tensor in a recorded step
    weight_decay: float
    step: Tensor  # the number of the step
    bad: Tensor | None  # 1: nothing changes
    divisor: Tensor | None  # what gradients are divided by
    learnt_steps: int | None = None  # number of steps after which AdamW's second moments are frozen

    @property
    def in_one_pass(self) -> bool:
        """Whether `OnePass` can take it: AdamW with both moments moving."""
        return self.kind in ("adamw", "adamw-bf16-moments", "adam8bit") and self.learnt_steps is None

    def on(self, device: torch.device) -> Update:
        """The same step for tensors on another device; it is known not to be skipped."""
        divisor = None if self.divisor is None else self.divisor.to(device)
        return replace(self, step=self.step.to(device), bad=None, divisor=divisor)

    def __call__(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """``states`` has a list for each name of `STATES`; all lists are of the same tensors' parts.

        They are fp32, but for the moments of a ``kind`` that keeps them in bf16 or 8 bits.
        """
        if self.kind == "adam8bit":
            self._in_eight_bits(values, gradients, states)
            return
        if self.kind == "adamw-bf16-moments":
            wide = {name: [state.float() for state in some] for name, some in states.items()}
            replace(self, kind="adamw")(values, gradients, wide)
            for name, some in states.items():
                torch_private.foreach_copy_(list(some), wide[name])
            return
        common: dict[str, Any] = {
            "lr": self.learning_rate,
            "weight_decay": self.weight_decay,
            "maximize": False,
            "grad_scale": self.divisor,
            "found_inf": self.bad,
        }
        settings, lists = self.settings, {name: list(some) for name, some in states.items()}
        if self.kind == "adamw" and self.learnt_steps is not None:
            self._with_fixed_moments(values, gradients, lists["exp_avg"], lists["exp_avg_sq"])
            return
        if self.kind == "adamw":
            # The kernel of torch.optim.AdamW(fused=True), without its bookkeeping for each parameter.
            torch_private.fused_adamw_(
                list(values), list(gradients), lists["exp_avg"], lists["exp_avg_sq"], [], [self.step] * len(values),
                beta1=settings.beta1, beta2=settings.beta2, eps=settings.epsilon, amsgrad=False, **common,
            )  # fmt: skip
            return
        momentum = self.kind == "sgd-momentum"
        torch_private.fused_sgd_(
            list(values), list(gradients), lists["momentum_buffer"] if momentum else [],
            momentum=settings.momentum if momentum else 0.0, dampening=0.0, nesterov=False,
            is_first_step=False,  # the buffers are zero, which is equivalent
            **common,
        )  # fmt: skip

    def _in_eight_bits(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]]
    ) -> None:
        wide = {
            name: [
                eight_bits.decoded(coded, value.numel(), signed=name == "exp_avg").view_as(value)
                for coded, value in zip(some, values)
            ]
            for name, some in states.items()
        }
        replace(self, kind="adamw")(values, gradients, wide)
        for name, some in states.items():
            for coded, moment in zip(some, wide[name]):
                before = coded.clone()
                eight_bits.encode_(moment, coded, signed=name == "exp_avg", step=self.step)
                if self.bad is not None:
                    coded.copy_(torch.where(self.bad.bool(), before, coded))

    def _with_fixed_moments(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor], firsts: list[Tensor], seconds: list[Tensor]
    ) -> None:
        """AdamW with frozen second moments, for which PyTorch has no kernel."""
        assert self.learnt_steps is not None and self.divisor is None, "fp16 is refused"
        settings, moves = self.settings, torch.ones_like(self.step)
        if self.bad is not None:
            moves = moves - self.bad
            gradients = [gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients]
        rate = moves * self.learning_rate
        corrected = rate / (1 - settings.beta1**self.step)
        learnt = (1 - settings.beta2**self.learnt_steps) ** 0.5
        for value, gradient, first, second in zip(values, gradients, firsts, seconds):
            first.lerp_(gradient, moves * (1 - settings.beta1))
            value.mul_(1 - rate * self.weight_decay)
            moved = corrected * first / (second.sqrt().div_(learnt).add_(settings.epsilon))
            # An element without a gradient in the exact steps would move by its block's mean divided by epsilon.
            value.sub_(moved.masked_fill_(second == 0, 0.0))


# -- Muon (Jordan et al. 2024): the momentum of a matrix, made orthogonal by five Newton-Schulz steps ----------
# Matrices of one shape go through the matmuls together. A matrix that ZeRO-1 has cut into rows is gathered first: it is
# the whole that is orthogonal (Liu et al. 2025, arXiv 2502.16982, section 2.3); every rank then computes all.

# The quintic whose slope at zero is as steep as convergence allows: kellerjordan.github.io/posts/muon
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7


@torch.no_grad()
def muon_update(
    update: Update,
    parameters: Sequence[nn.Parameter],
    values: Sequence[Tensor],
    gradients: list[Tensor],
    momenta: Sequence[Tensor],
) -> None:
    """One step of local ``values``, cut like ``parameters``."""
    rate: float | Tensor = update.learning_rate
    if update.divisor is not None:
        gradients = list(torch_private.foreach_div(gradients, update.divisor))
    if update.bad is not None:  # no kernel skips a step: zeros are added instead
        rate = rate * (1 - update.bad)
        for gradient in gradients:
            gradient.masked_fill_(update.bad.bool(), 0.0)
    directions = _directions(parameters, gradients, momenta, update.settings.momentum, update.bad)
    torch_private.foreach_mul_(list(values), 1 - rate * update.weight_decay)
    torch_private.foreach_mul_(directions, -rate)
    torch_private.foreach_add_(list(values), directions)


def _directions(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    momentum: float,
    bad: Tensor | None,
) -> list[Tensor]:
    """The direction of each local tensor, with Nesterov's look-ahead; ``momenta`` are updated in place.

    They keep their values if ``bad`` is 1; gradients are zero then.
    """
    if bad is None:
        torch_private.foreach_lerp_(list(momenta), list(gradients), 1 - momentum)
    else:
        torch_private.foreach_mul_(list(momenta), momentum + (1 - momentum) * bad)
        torch_private.foreach_add_(list(momenta), list(gradients), alpha=1 - momentum)
    ahead = torch_private.foreach_lerp(list(gradients), list(momenta), momentum)
    wholes = [_whole(parameter, piece) for parameter, piece in zip(parameters, ahead)]
    results: dict[int, Tensor] = {}
    by_shape: dict[torch.Size, list[int]] = {}
    for number, whole in enumerate(wholes):
        by_shape.setdefault(whole.shape[-2:], []).append(number)
    for (rows, columns), numbers in by_shape.items():
        stacked = torch.cat([wholes[number].reshape(-1, rows, columns) for number in numbers])
        directions = orthogonal(stacked) * math.sqrt(max(1, rows / columns))
        sizes = [wholes[number].numel() // (rows * columns) for number in numbers]
        for number, part in zip(numbers, torch.split(directions, sizes)):
            results[number] = divided_as(parameters[number], part.view_as(wholes[number]))
    return [results[number] for number in range(len(wholes))]


def orthogonal(matrices: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrices (singular values from 0.7 to 1.2); on a GPU in bf16, which suffices."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x.bfloat16() if x.is_cuda else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = (x if wide else x.mT).to(matrices.dtype)
    return result


def _whole(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """The rows of all ranks; FSDP has cut parameters along their first dimension."""
    if not isinstance(parameter, DTensor):
        return piece
    with sent("dp", Called.MOMENTUM, piece):
        return as_divided(piece, parameter).full_tensor()  # type: ignore[no-any-return, attr-defined]
