"""All that a rank has to keep of its training: tensors with their place in the whole model, and a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.engine.gradients import Held
from shardwise.engine.offload.states import MASTER
from shardwise.engine.optimizer import LocalOptimizer
from shardwise.engine.parts import Part, plain_name
from shardwise.engine.trainer import Trainer
from shardwise.train.checkpoint.boxes import Placed, Run, blocks_taken, placed, taken

WEIGHT = "weight"


@dataclass(frozen=True)
class Kept:
    """A tensor of this rank: ``key`` names the whole one, of ``shape``; ``places`` are the boxes that are here.

    ``read`` gives the tensor, or a copy of one that is kept outside of the device's memory; ``write`` takes it back.
    ``optional``: begins anew where a checkpoint has none of that shape, one of another layout or method.
    """

    key: str
    shape: tuple[int, ...]
    places: tuple[Placed, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    optional: bool = False


def kept(trainer: Trainer[Any]) -> list[Kept]:
    """Weights (fp32 masters where there are), optimizer states, the buffers that balance experts, and what compression
    has left out on this rank."""
    tied, optimizer = trainer.job.model.tied_embeddings, trainer.optimizer
    found = []
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    for one in trainer.parameters:
        name = _name(one, tied)
        places = tuple(places_of(one))
        for state in _states(one.parameter, optimizer):
            key, dtype = f"{WEIGHT if state == MASTER else state}/{name}", optimizer.dtype(one.parameter, state)
            read, write = partial(optimizer.read, one.parameter, state), partial(optimizer.write, one.parameter, state)
            found.append(Kept(key, one.part.shape, places, dtype, read, write))
    for name, buffer in _buffers(trainer):
        read, write = partial(_same, buffer), partial(_copy, buffer)
        found.append(Kept(f"buffer/{name}", tuple(buffer.shape), tuple(_all(buffer)), buffer.dtype, read, write))
    return found + _feedback(trainer)


def _feedback(trainer: Trainer[Any]) -> list[Kept]:
    """Every rank's own, which means something to the same rank of the same layout only."""
    strategy = trainer.job.strategy
    layout = "x".join(str(strategy.degree(name)) for name in strategy.order)
    found = []
    for name, state in trainer.data.feedback.items():
        key = f"feedback/{strategy.compression.method}.{layout}.{dist.get_rank()}.{name}"
        read, write = partial(_same, state), partial(_copy, state)
        found.append(Kept(key, tuple(state.shape), tuple(_all(state)), state.dtype, read, write, optional=True))
    return found


def numbers(trainer: Trainer[Any]) -> dict[str, Any]:
    """What is no tensor of the model, as plain data: the count of steps and the scale of the loss."""
    # Every group has taken every step that was not left out: one count for all.
    steps = max((float(group["step"]) for group in trainer.optimizer.param_groups), default=0.0)
    found: dict[str, Any] = {"optimizer_steps": steps}
    if trainer.scaler is not None:
        found["loss_scale"] = {name: float(value) for name, value in trainer.scaler.state_dict().items()}
    return found


@torch.no_grad()
def take_numbers(trainer: Trainer[Any], found: dict[str, Any]) -> None:
    """Back into the trainer; afterwards the weights that are computed with follow what was loaded."""
    for group in trainer.optimizer.param_groups:
        group["step"].fill_(found["optimizer_steps"])
    if trainer.scaler is not None and "loss_scale" in found:
        for name, tensor in trainer.scaler.state_dict().items():
            tensor.fill_(found["loss_scale"][name])
    trainer.data.publish()


def places_of(one: Held) -> list[Placed]:
    """The boxes of the whole parameter that the local tensor is."""
    dimensions = _runs(one.part)
    if isinstance(one.parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            one.parameter.shape, one.parameter.device_mesh, one.parameter.placements
        )
        dimensions = [taken(runs, first, first + size) for runs, first, size in zip(dimensions, offset, shape)]
    return placed(dimensions)


def _runs(part: Part) -> list[list[Run]]:
    dimensions = [[Run(0, size)] for size in part.shape]
    for cut in part.cuts:
        runs = dimensions[cut.dimension]
        dimensions[cut.dimension] = (
            taken(runs, cut.start, cut.stop) if cut.blocks == 1 else blocks_taken(runs, cut.start, cut.stop, cut.blocks)
        )
    return dimensions


def _name(one: Held, tied: bool) -> str:
    """A tied head on a stage of its own is the embedding of the whole model."""
    return "embedding.weight" if tied and one.name == "head.weight" else one.name


def _states(parameter: nn.Parameter, optimizer: LocalOptimizer) -> Iterator[str]:
    yield MASTER
    yield from (name for name in optimizer.state[parameter] if name != MASTER)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copy(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def _buffers(trainer: Trainer[Any]) -> Iterator[tuple[str, Tensor]]:
    for stage in trainer.stages.values():
        lasting = set(stage.state_dict(keep_vars=True))
        for name, buffer in stage.named_buffers():
            if name in lasting and buffer.is_floating_point():
                yield plain_name(name), buffer


def _all(tensor: Tensor) -> list[Placed]:
    return placed([[Run(0, size)] for size in tensor.shape])
