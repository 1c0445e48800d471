"""How far a parallel run is from the single process: one number for every tensor, and which is the worst."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.engine.gradients import local
from shardwise.engine.parts import Part
from shardwise.engine.values import divided_as

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


def deviation(name: str, found: Tensor, part: Part, whole: Tensor, absolute_scale: float | None = None) -> Deviation:
    """max|a-b| / max|b|, b being the whole reference; against ``absolute_scale`` where b is rounding only.

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
