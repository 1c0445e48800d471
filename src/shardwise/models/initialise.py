"""Initial values of the parameters: each from its own generator, so that none depends on which others are present.

Normal with a standard deviation of 0.02 (GPT-2); for projections back into the hidden states it is divided by the
square root of their number (arXiv 1909.08053 and GPT-2). Norms start by multiplying by one, biases are zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.spec.model import Model

DEVIATION = 0.02


@torch.no_grad()
def initialise(target: nn.Module | Iterable[tuple[str, Tensor]], seed: int, model: Model) -> None:
    """Fills a module (a `Decoder` or what is left of one) or named parameters in place; buffers become zero."""
    if isinstance(target, nn.Module):
        for buffer in target.buffers():
            buffer.zero_()
        target = target.named_parameters()
    for name, parameter in target:
        parameter.copy_(initial_value(name, parameter.shape, seed, model, parameter.dtype, parameter.device))


def initial_value(
    name: str,
    shape: Iterable[int],
    seed: int,
    model: Model,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    experts: range | None = None,
) -> Tensor:
    """The whole initial value of one parameter, by its full name in a `Decoder`; the same on every call.

    ``experts`` selects some experts of a stacked parameter. Values are drawn on ``device`` and differ between kinds of
    devices.
    """
    size = tuple(shape)
    if model.tied_embeddings and name == "head.weight":
        name = "embedding.weight"  # where the two live apart they must still start equal
    if is_bias(name):
        return torch.zeros(_size_of(size, experts), dtype=dtype, device=device)
    if is_norm(name):
        value = 0.0 if model.numerics.norm_plus_one else 1.0
        return torch.full(size, value, dtype=dtype, device=device)
    deviation = DEVIATION / math.sqrt(2 * model.layers) if is_projection_back(name) else DEVIATION
    if not is_stack_of_experts(name):
        return _draw(name, size, seed, deviation, device).to(dtype)
    numbers = range(size[0]) if experts is None else experts
    result = torch.empty(_size_of(size, numbers), dtype=dtype, device=device)
    for place, number in enumerate(numbers):
        result[place] = _draw(f"{name}[{number}]", size[1:], seed, deviation, device)
    return result


def is_bias(name: str) -> bool:
    return name.endswith((".bias", "_bias"))


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def is_stack_of_experts(name: str) -> bool:
    return ".experts." in name


def is_projection_back(name: str) -> bool:
    """Whether a matrix's outputs are added to the hidden states."""
    return name.removesuffix(".weight").endswith((".output", ".down"))


def _size_of(shape: tuple[int, ...], experts: range | None) -> tuple[int, ...]:
    return shape if experts is None else (len(experts), *shape[1:])


def _draw(name: str, shape: tuple[int, ...], seed: int, deviation: float, device: torch.device | str) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape, device=device).normal_(std=deviation, generator=generator)
