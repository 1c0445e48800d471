"""How far a parallel run is from the single process: one number for every tensor, and which is the worst."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.engine.parameters import HeldPart, divided_as, local
from shardwise.spec.optimization import Optimization

TOLERANCE = 1e-5
NEGLIGIBLE = 1e-6  # of the global norm: gradients this small are rounding (a key bias has gradient zero in theory)


@dataclass(frozen=True, order=True)
class Deviation:
    """A relative difference and the tensor that shows it."""

    value: float
    where: str

    @staticmethod
    def worst(found: Iterable[Deviation]) -> Deviation:
        return max(found, default=Deviation(0.0, ""))


def negligible(gradients: Mapping[str, Tensor]) -> frozenset[str]:
    """Parameters whose gradients are rounding only."""
    norm = global_norm(gradients.values())
    return frozenset(name for name, one in gradients.items() if largest(one) < NEGLIGIBLE * norm)


def gradient_scales(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """What a difference of each gradient is measured by: its own largest, where rounding leaves that any digits.

    Some gradients are small differences of large terms: behind a softmax a score's is P·(dP − ΣP·dP), and where all
    dP are nearly equal those of query and key are far smaller than the value's, which is made of the same terms. Each
    term is rounded to ε of itself, so that a difference of up to ε times the largest gradient of the same layer is
    rounding, however small the gradient is. That is what the scale makes of the tolerance: error/scale ≤ tolerance
    where error ≤ max(tolerance·own, ε·layer's).
    """
    of_layers, rounded = _largest_of_layers(gradients), torch.finfo(torch.float32).eps / TOLERANCE
    return {name: max(largest(one), rounded * of_layers[name]) for name, one in gradients.items()}


def weight_scales(
    weights: Mapping[str, Tensor], steps: Sequence[Mapping[str, Tensor]], settings: Optimization
) -> dict[str, float]:
    """What a difference of each weight is measured by: its own largest, and how far AdamW carries rounding.

    A step is rate·g/(|g|+ϵ), whose slope is rate/ϵ where g is far below ϵ: there a gradient's rounding, ε times the
    largest of its layer as in `gradient_scales`, moves a weight by rate/ϵ times as much. Clipping makes it less.
    """
    found = {name: largest(one) for name, one in weights.items()}
    rounded = torch.finfo(torch.float32).eps / TOLERANCE
    for gradients in steps:
        norm = global_norm(gradients.values())
        clipped = min(1.0, settings.clip_norm / norm) if settings.clip_norm and norm else 1.0
        carried = rounded * clipped * settings.learning_rate / settings.epsilon
        for name, one in _largest_of_layers(gradients).items():
            found[name] += carried * one
    return found


def _largest_of_layers(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """For each gradient the largest element of all of its layer."""
    of_layers: dict[str, float] = {}
    for name, one in gradients.items():
        of_layers[_layer(name)] = max(of_layers.get(_layer(name), 0.0), largest(one))
    return {name: of_layers[_layer(name)] for name in gradients}


def _layer(name: str) -> str:
    """`layers.3` of `layers.3.attention.key.weight`; what is in no layer stands alone."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered[0] if numbered else name


def deviation(
    name: str, found: Tensor, part: HeldPart, whole: Tensor, absolute_scale: float | None = None
) -> Deviation:
    """max|a-b| / max|b|, b being the whole reference; or / ``absolute_scale``, which does not ask how large b is.

    Where data parallelism divides ``found``, a is what this rank holds of it.
    """
    expected, mine = part.of(whole), local(found)
    if found.shape != expected.shape or not torch.isfinite(mine).all():
        return Deviation(float("inf"), name)
    scale = largest(whole) if absolute_scale is None else absolute_scale
    difference = largest(mine - divided_as(found, expected))
    return Deviation(difference / scale if scale else float(difference > 0), name)


def relative(name: str, found: float, expected: float) -> Deviation:
    difference = abs(found - expected)
    return Deviation(difference / abs(expected) if expected else difference, name)


def global_norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([one.float().norm() for one in tensors]).norm())


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
