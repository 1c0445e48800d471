"""The training state of a rank: tensors with their place in the unsharded model, and a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.offload.store import MASTER
from shardwise.engine.parameters import HeldParameter, HeldPart, plain_name
from shardwise.engine.torch_private import compute_local_shape_and_global_offset
from shardwise.engine.trainer import Trainer
from shardwise.engine.tuning import trains
from shardwise.models.adapters import is_of_adapter
from shardwise.run.checkpoint.manifest import BASE, ContiguousRun, PlacedBox, placed, taken
from shardwise.spec.job import Job

WEIGHT, BUFFER = "weight", "buffer"
OUTER = ("outer_weight", "outer_momentum")
OWN_STEPS = "steps/optimizer"


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the training state, as far as this rank holds it."""

    key: str  # name of the full tensor
    shape: tuple[int, ...]  # of the full tensor
    places: tuple[PlacedBox, ...]  # the boxes of it that are here
    dtype: torch.dtype
    read: Callable[[], Tensor]  # the local tensor, or a copy of an offloaded one
    write: Callable[[Tensor], None]  # puts it back
    optional: bool = False  # starts from zero if a checkpoint of another layout or method has none of that shape
    worker: int = 0
    """Its owner, where data-parallel workers have weights of their own; the first worker's represent all."""

    @property
    def saved_as(self) -> str:
        """The name of the tensor in a checkpoint of the same run."""
        return saved_name(self.key, self.worker)


def saved_name(key: str, worker: int) -> str:
    return f"worker-{worker}/{key}" if worker else key


def late_name(age: int) -> str:
    return f"late_{age}"


def state_tensors(trainer: Trainer[Any]) -> list[StateTensor]:
    """Trained weights (fp32 masters if any), optimizer states, expert-balancing buffers, error feedback."""
    tied, optimizer, worker = trainer.job.model.tied_embeddings, trainer.optimizer, worker_of(trainer)
    tensors = []
    for held in trainer.trained:
        name = _name(held, tied)
        places = tuple(places_of(held))
        for state in (MASTER, *(name for name in optimizer.state[held.parameter] if name != MASTER)):
            key, dtype = f"{WEIGHT if state == MASTER else state}/{name}", optimizer.dtype(held.parameter, state)
            read, write = (
                partial(optimizer.read, held.parameter, state),
                partial(optimizer.write, held.parameter, state),
            )
            tensors.append(StateTensor(key, held.part.shape, places, dtype, read, write, worker=worker))
    balance = balance_tensors(trainer)
    return (
        tensors
        + [tensor for tensor in balance if is_saved(trainer.job, tensor.key.partition("/")[2])]
        + _histories(trainer)
        + _feedback(trainer)
        + _synchronisation_states(trainer, lambda held: _name(held, tied))
    )


def balance_tensors(trainer: Trainer[Any]) -> list[StateTensor]:
    """Buffers that are learned: what balances experts."""
    buffers = (named for stage in trainer.stages.values() for named in lasting_buffers(stage))
    return [_unsharded(f"{BUFFER}/{name}", buffer) for name, buffer in buffers]


def first_tensors(trainer: Trainer[Any]) -> list[StateTensor]:
    """All weights that a run starts from: everything but adapters."""
    tied, optimizer = trainer.job.model.tied_embeddings, trainer.optimizer
    tensors = []
    for held in trainer.parameters:
        if not is_of_adapter(held.name):
            read, write = (
                partial(optimizer.read, held.parameter, MASTER),
                partial(optimizer.write, held.parameter, MASTER),
            )
            dtype, places = optimizer.dtype(held.parameter, MASTER), tuple(places_of(held))
            tensors.append(StateTensor(f"{WEIGHT}/{_name(held, tied)}", held.part.shape, places, dtype, read, write))
    return tensors + balance_tensors(trainer)


def is_saved(job: Job, name: str) -> bool:
    """Whether checkpoints of a job hold a tensor of its model: one that is trained."""
    return trains(job.training.tuning, name, job.model)


def worker_of(trainer: Trainer[Any]) -> int:
    """Which worker with weights of its own this rank belongs to."""
    return 0 if trainer.outer is None else trainer.mesh.rank("dp")


def _synchronisation_states(trainer: Trainer[Any], name: Callable[[HeldParameter], str]) -> list[StateTensor]:
    """States of workers that do not synchronise every step: outer optimizer, sums in flight, a worker's step count."""
    trained = trainer.trained
    states = []
    outer, late = trainer.outer, trainer.late
    for number, held in enumerate(trained):
        tensors: dict[str, Callable[[], Tensor]] = {}
        if outer is not None and outer.anchors:
            for state, values in zip(OUTER, (outer.anchors, outer.momenta), strict=True):
                tensors[state] = partial(_same, values[number])
        for age in range(late.staleness if late is not None else 0):
            assert late is not None
            tensors[late_name(age)] = partial(late.read, age, number)
        places = tuple(places_of(held))
        for state, read in tensors.items():
            write = partial(_copy_into, read)
            states.append(StateTensor(f"{state}/{name(held)}", held.part.shape, places, read().dtype, read, write))
    if worker_of(trainer):
        counts = [group["step"] for group in trainer.optimizer.param_groups]
        own = _unsharded(OWN_STEPS, counts[0].view(1), worker=worker_of(trainer))
        states.append(replace(own, write=partial(_fill, counts)))
    return states


def _copy_into(read: Callable[[], Tensor], values: Tensor) -> None:
    read().copy_(values)


def _fill(counts: list[Tensor], values: Tensor) -> None:
    for count in counts:
        count.fill_(values.item())


def _histories(trainer: Trainer[Any]) -> list[StateTensor]:
    """Histories of delayed FP8 scaling, named by the first layer that reads each input; empty in other precisions."""
    if trainer.delayed is None:
        return []
    names = {module: name for stage in trainer.stages.values() for name, module in stage.named_modules()}
    layers = (plain_name(names[layer_input.layers[0]]) for layer_input in trainer.in_fp8)
    histories = trainer.delayed.history.unbind()
    return [_unsharded(f"fp8_history/{name}", history, optional=True) for name, history in zip(layers, histories)]


def _feedback(trainer: Trainer[Any]) -> list[StateTensor]:
    """Error feedback of compression, which is meaningful only to the same rank of the same layout."""
    strategy = trainer.job.strategy
    layout = "x".join(str(strategy.degree(name)) for name in strategy.order)
    states = []
    for name, state in trainer.data.feedback.items():
        key = f"feedback/{strategy.compression.method}.{layout}.{dist.get_rank()}.{name}"
        states.append(_unsharded(key, state, optional=True))
    return states


def numbers(trainer: Trainer[Any]) -> dict[str, Any]:
    """The state that is not in tensors, as plain data: counts of steps and the loss scale."""
    # All groups have taken the same steps: one count serves for all.
    steps = max((float(group["step"]) for group in trainer.optimizer.param_groups), default=0.0)
    values: dict[str, Any] = {"optimizer_steps": steps}
    if trainer.base is not None:
        values[BASE] = trainer.base
    if trainer.scaler is not None:
        values["loss_scale"] = {name: float(value) for name, value in trainer.scaler.state_dict().items()}
    if trainer.outer is not None:
        values["inner_steps"] = trainer.outer.steps
    if trainer.late is not None:
        values["late_sums"] = len(trainer.late.in_flight)
    return values


@torch.no_grad()
def restore_numbers(trainer: Trainer[Any], values: dict[str, Any]) -> None:
    """Puts the numbers back into the trainer, and updates the compute weights from what was loaded."""
    if not worker_of(trainer):  # others have their own
        for group in trainer.optimizer.param_groups:
            group["step"].fill_(values["optimizer_steps"])
    trainer.reset_compression()
    if trainer.outer is not None:
        trainer.outer.steps = int(values.get("inner_steps", 0))
    if trainer.scaler is not None and "loss_scale" in values:
        for name, tensor in trainer.scaler.state_dict().items():
            tensor.fill_(values["loss_scale"].get(name, float(tensor)))
    trainer.data.publish()


def places_of(held: HeldParameter) -> list[PlacedBox]:
    """The boxes of the full parameter that make up the local tensor."""
    dimensions = _runs(held.part)
    if isinstance(held.parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            held.parameter.shape, held.parameter.device_mesh, held.parameter.placements
        )
        dimensions = [taken(runs, first, first + size) for runs, first, size in zip(dimensions, offset, shape)]
    return placed(dimensions)


def _runs(part: HeldPart) -> list[list[ContiguousRun]]:
    dimensions = [[ContiguousRun(0, size)] for size in part.shape]
    for cut in part.cuts:
        held = dimensions[cut.dimension]
        dimensions[cut.dimension] = [run for start, stop in cut.runs for run in taken(held, start, stop)]
    return dimensions


def _name(held: HeldParameter, tied: bool) -> str:
    """A parameter's name; a tied head on another stage is the model's embedding."""
    return "embedding.weight" if tied and held.name == "head.weight" else held.name


def _unsharded(key: str, tensor: Tensor, *, optional: bool = False, worker: int = 0) -> StateTensor:
    """A tensor that this rank holds in full."""
    shape = tuple(tensor.shape)
    places = tuple(placed([[ContiguousRun(0, size)] for size in shape]))
    read = partial(_same, tensor)
    return StateTensor(key, shape, places, tensor.dtype, read, partial(_copy_into, read), optional, worker)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def lasting_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are learned, by their names in the unsharded model."""
    lasting = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in lasting and buffer.is_floating_point():
            yield plain_name(name), buffer
