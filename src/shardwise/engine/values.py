"""First values of a rank's parameters: the part it holds of what the undivided model would start with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.engine.gradients import Held, held, local
from shardwise.engine.parts import Part
from shardwise.models.initialise import initial_value, is_stack_of_experts
from shardwise.spec.model import Model

Whole = Callable[[str, Part], Tensor]


def materialise(root: nn.Module, device: torch.device) -> None:
    """Memory for parameters that have had none; those that are one stay one, which `nn.Module.to_empty` forgets."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    root.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, own = name.rpartition(".")
            root.get_submodule(owner)._parameters[own] = root.get_parameter(first)


@torch.no_grad()
def initialise_parts(chunks: Iterable[nn.Module], model: Model, seed: int) -> None:
    """Fills parameters as `initialise` fills those of the whole model; buffers become zero. One tensor at a time."""
    chunks = list(chunks)
    for chunk in chunks:
        for buffer in chunk.buffers():
            buffer.zero_()
    for one in held(chunks):
        fill(one, lambda name, part, like=one.parameter: _drawn(name, part, seed, model, like.device))  # type: ignore[misc]


@torch.no_grad()
def fill(one: Held, part_value: Whole) -> None:
    """Writes into the local tensor what ``part_value`` gives for its part of the model."""
    local(one.parameter).copy_(divided_as(one.parameter, part_value(one.name, one.part)))


def divided_as(tensor: Tensor, value: Tensor) -> Tensor:
    """Of ``value``, which is as large as ``tensor``, what data parallelism gives to this rank of ``tensor``."""
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        for dimension, (start, length) in enumerate(zip(offset, shape)):
            value = value.narrow(dimension, min(start, value.shape[dimension] - length), length)
    return value


def as_divided(values: Tensor, like: Tensor) -> Tensor:
    """This rank's ``values`` as a tensor that is divided as ``like`` is."""
    if not isinstance(like, DTensor):
        return values
    return DTensor.from_local(values, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def _drawn(name: str, part: Part, seed: int, model: Model, device: torch.device) -> Tensor:
    """The part's own values; of stacked experts only those that are here are drawn."""
    first, rest = part.cuts[:1], part.cuts[1:]
    if is_stack_of_experts(name) and first and first[0].dimension == 0:
        here = range(*first[0].runs[0])
        value = initial_value(name, part.shape, seed, model, device=device, experts=here)
        return replace(part, cuts=rest).of(value)
    return part.of(initial_value(name, part.shape, seed, model, device=device))
