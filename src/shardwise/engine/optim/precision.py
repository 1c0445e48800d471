"""Number formats of a step, for computing, accumulating, reducing and keeping; and loss scaling for fp16.

The recipe of the job decides (`spec.training.RECIPES`). Gradients are summed over ranks in the format that they are
accumulated in; sums of 16-bit numbers are themselves added in fp32 (`reductions`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.spec.errors import SpecError
from shardwise.spec.training import RECIPES, LossScaling, Training

FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Number formats of a step; masters are fp32."""

    compute: torch.dtype = torch.float32  # of weights and activations
    gradient: torch.dtype = torch.float32  # in which gradients are accumulated over microbatches and sent
    scaling: str = ""  # of linear layers in FP8 (`engine.fp8`); everything else is computed in `compute`
    delayed: bool = False  # FP8 scales come from earlier steps
    scaled: bool = False  # the loss is scaled up, so that small gradients do not vanish in fp16

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates fp32 copies of the weights."""
        return self.compute != torch.float32


FP32 = Precision()


def precision_of(training: Training) -> Precision:
    """The formats of a job's recipe; refuses what this engine cannot compute in."""
    recipe = RECIPES[training.precision]
    if recipe.scaling:
        return Precision(torch.bfloat16, torch.float32, recipe.scaling, recipe.delayed)
    if recipe.compute not in FORMATS:
        raise SpecError("training.precision", f"this engine has no matmuls in {recipe.compute}", "precision: bf16")
    compute = FORMATS[recipe.compute]
    return Precision(compute, torch.float32 if recipe.gradient == 4 else compute, scaled=recipe.compute == "fp16")


class LossScaler:
    """The scale of the loss and its history, as tensors on the device, so that the host never waits for it.

    All ranks agree, since every rank calls `update` with the same ``bad``.
    """

    def __init__(self, scaling: LossScaling, device: torch.device | str) -> None:
        self.scaling = scaling
        start = scaling.initial if scaling.static is None else scaling.static
        self.scale = torch.tensor(float(start), device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        self.patience = torch.full((), scaling.hysteresis, dtype=torch.int64, device=device)

    def update(self, bad: Tensor) -> None:
        """``bad`` is 1 where the gradients of this step were not finite, else 0."""
        if self.scaling.static is not None:
            return
        bad = bad.to(torch.bool)
        patience = torch.where(bad, self.patience - 1, self.patience)
        good = (self.good + 1).masked_fill(bad, 0)  # `torch.where` with a number would make the host wait
        lower, higher = patience <= 0, good >= self.scaling.window
        halved = (self.scale / 2).clamp(min=self.scaling.minimum)
        self.scale.copy_(torch.where(lower, halved, torch.where(higher, self.scale * 2, self.scale)))
        changed = lower | higher
        self.patience.copy_(patience.masked_fill(changed, self.scaling.hysteresis))
        self.good.copy_(good.masked_fill(higher, 0))

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good": self.good, "patience": self.patience}
