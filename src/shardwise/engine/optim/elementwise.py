"""AdamW and SGD on plain tensors on any device: PyTorch's own fused kernels, one call for a list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.torch_private import fused_adamw_, fused_sgd_
from shardwise.spec.training import Optimization

STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
}


@dataclass(frozen=True)
class Update:
    """One step of a group of parameters.

    ``step`` is its number; gradients are divided by ``divisor``, and nothing moves if ``bad`` is 1. All three are
    scalars on the device of the tensors. With ``learnt_steps`` AdamW's second moments are frozen after so many steps.
    """

    kind: str
    settings: Optimization
    learning_rate: float
    weight_decay: float
    step: Tensor
    bad: Tensor | None
    divisor: Tensor | None
    learnt_steps: int | None = None

    def on(self, device: torch.device) -> Update:
        """The same step for tensors elsewhere, known not to be skipped."""
        divisor = None if self.divisor is None else self.divisor.to(device)
        return replace(self, step=self.step.to(device), bad=None, divisor=divisor)

    def __call__(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor], states: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """``states`` has a list for each name of `STATES`; all lists are of the same tensors' parts, in fp32."""
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
            fused_adamw_(
                list(values), list(gradients), lists["exp_avg"], lists["exp_avg_sq"], [], [self.step] * len(values),
                beta1=settings.beta1, beta2=settings.beta2, eps=settings.epsilon, amsgrad=False, **common,
            )  # fmt: skip
            return
        momentum = self.kind == "sgd-momentum"
        fused_sgd_(
            list(values), list(gradients), lists["momentum_buffer"] if momentum else [],
            momentum=settings.momentum if momentum else 0.0, dampening=0.0, nesterov=False,
            is_first_step=False,  # the buffers are zero, which is equivalent
            **common,
        )  # fmt: skip

    def _with_fixed_moments(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor], firsts: list[Tensor], seconds: list[Tensor]
    ) -> None:
        """AdamW with frozen second moments, for which PyTorch has no kernel."""
        assert self.learnt_steps is not None and self.divisor is None, "fp16 is refused"
        settings, moves = self.settings, torch.ones_like(self.step)
        if self.bad is not None:
            moves = moves - self.bad
            gradients = [one.nan_to_num(0.0, 0.0, 0.0) for one in gradients]
        rate = moves * self.learning_rate
        corrected = rate / (1 - settings.beta1**self.step)
        learnt = (1 - settings.beta2**self.learnt_steps) ** 0.5
        for value, gradient, first, second in zip(values, gradients, firsts, seconds):
            first.lerp_(gradient, moves * (1 - settings.beta1))
            value.mul_(1 - rate * self.weight_decay)
            moved = corrected * first / (second.sqrt().div_(learnt).add_(settings.epsilon))
            # Without a gradient in the exact steps an element would move by its block's mean over epsilon.
            value.sub_(moved.masked_fill_(second == 0, 0.0))
