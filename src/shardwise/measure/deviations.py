"""How far a parallel run is from the single process: relative differences, and what counts as rounding."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.engine.parameters import HeldPart, divided_as, local
from shardwise.spec.training import Optimization

TOLERANCE = 1e-5


@dataclass(frozen=True, order=True)
class Deviation:
    """A relative difference and the tensor that shows it."""

    value: float
    where: str

    @staticmethod
    def worst(deviations: Iterable[Deviation]) -> Deviation:
        return max(deviations, default=Deviation(0.0, ""))


def gradient_scales(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """The scale of each gradient's deviation: its largest element, or more where rounding of its layer exceeds that.

    Some gradients are small differences of large terms: behind a softmax a score's is P·(dP − ΣP·dP), and if all dP
    are nearly equal, those of query and key are far smaller than the value's, which has the same terms. Each term is
    rounded to ε of itself, so a difference of up to ε times the largest gradient of the layer is rounding, however
    small the gradient is. With this scale error/scale ≤ tolerance means error ≤ max(tolerance·own, ε·layer's).
    """
    of_layers, rounded = largest_of_layers(gradients), torch.finfo(torch.float32).eps / TOLERANCE
    return {name: max(largest(gradient), rounded * of_layers[name]) for name, gradient in gradients.items()}


def weight_scales(
    weights: Mapping[str, Tensor], steps: Sequence[Mapping[str, Tensor]], settings: Optimization
) -> dict[str, float]:
    """The scale of each weight's deviation: its largest element, and how far AdamW amplifies rounding.

    A step is rate·g/(|g|+ϵ), whose slope is rate/ϵ for g far below ϵ: there a gradient's rounding, ε times the largest
    of its layer as in `gradient_scales`, moves a weight by rate/ϵ times as much; less with clipping.
    """
    scales = {name: largest(weight) for name, weight in weights.items()}
    rounded = torch.finfo(torch.float32).eps / TOLERANCE
    for gradients in steps:
        norm = global_norm(gradients.values())
        clipped = min(1.0, settings.clip_norm / norm) if settings.clip_norm and norm else 1.0
        carried = rounded * clipped * settings.learning_rate / settings.epsilon
        for name, gradient in largest_of_layers(gradients).items():
            scales[name] += carried * gradient
    return scales


def largest_of_layers(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """For each gradient the largest element of its layer."""
    of_layers: dict[str, float] = defaultdict(float)
    for name, gradient in gradients.items():
        of_layers[_layer(name)] = max(of_layers[_layer(name)], largest(gradient))
    return {name: of_layers[_layer(name)] for name in gradients}


def _layer(name: str) -> str:
    """`layers.3` of `layers.3.attention.key.weight`; the name itself outside of layers."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered[0] if numbered else name


def deviation(name: str, held: Tensor, part: HeldPart, whole: Tensor, absolute_scale: float | None = None) -> Deviation:
    """max|a-b| / max|b|, b being the full reference, or / ``absolute_scale``; a is this rank's shard of ``found``."""
    expected, mine = part.of(whole), local(held)
    if held.shape != expected.shape or not torch.isfinite(mine).all():
        return Deviation(float("inf"), name)
    scale = largest(whole) if absolute_scale is None else absolute_scale
    difference = largest(mine - divided_as(held, expected))
    return Deviation(difference / scale if scale else float(difference > 0), name)


def relative(name: str, actual: float, expected: float) -> Deviation:
    difference = abs(actual - expected)
    if not math.isfinite(difference):  # no order with others
        return Deviation(float("inf"), name)
    return Deviation(difference / abs(expected) if expected else difference, name)


def global_norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.float().norm() for tensor in tensors]).norm())


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
