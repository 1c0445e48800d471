"""Records a few steps of a run on this rank: every phase, layer and collective, on a clock that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.gradients import local
from shardwise.engine.labels import layer_name, step_name
from shardwise.engine.mesh import own
from shardwise.engine.names import named
from shardwise.engine.trainer import Trainer
from shardwise.layout.ranks import node_of
from shardwise.layout.stages import stage_layers
from shardwise.spec.job import Job
from shardwise.spec.profile import Profile
from shardwise.training.profile.clocks import clock_offset
from shardwise.training.profile.flights import flights
from shardwise.training.profile.ranges import recorded
from shardwise.training.profile.record import Flight, Range, RankRecord


class Profiler:
    """`step` goes around every step of a run; those of ``asked`` are recorded and written to ``folder``."""

    def __init__(self, trainer: Trainer[Any], asked: Profile, folder: Path) -> None:
        self.trainer, self.asked, self.folder = trainer, asked, folder
        self._open: ExitStack | None = None
        self._ranges: Callable[[int], list[Range]] = lambda zero_ns: []
        self._offset_ns = self._error_ns = 0

    def covers(self, number: int) -> bool:
        """Whether the step, counted from 1, is recorded: none if a run begins in the middle of the window."""
        return number == self.asked.first or (self._open is not None and number <= self.asked.last)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if not self.covers(number):
            yield
            return
        if self._open is None:
            self._begin()
        with named(step_name(number)):
            yield
        if number == self.asked.last:
            self._end()

    def _begin(self) -> None:
        self._offset_ns, self._error_ns = clock_offset()
        self._open = ExitStack()
        if not self.trainer.job.training.compile:  # a hook would make a compiled layer another one
            self._open.enter_context(layers_named(self.trainer.stages.values()))
        self._ranges = self._open.enter_context(recorded(self.trainer.device))

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        ranges = self._ranges(0)
        zero: list[Any] = [min((one.start for one in ranges), default=0.0)]
        dist.broadcast_object_list(zero, 0)
        zero_ns = int(zero[0] * 1e9) + self._offset_ns
        begin, end = (int(1e9 * moment) for moment in (ranges[0].start, max(one.end for one in ranges)))
        self._record(self._ranges(zero_ns), flights(begin, end, zero_ns)).write(self.folder)
        dist.barrier()  # the folder is whole when any rank goes on

    def _record(self, ranges: list[Range], backend: tuple[Flight, ...]) -> RankRecord:
        trainer, rank = self.trainer, dist.get_rank()
        layers = stage_layers(trainer.job)
        return RankRecord(
            rank=rank,
            node=node_of(rank, _ranks_of_a_node(trainer.job)),
            device=trainer.device.type,
            clock_error=self._error_ns / 1e9,
            groups={name: own(division) for name, division in trainer.mesh.divisions.items()},
            stages={stage: tuple(layers[stage]) for stage in trainer.stages},
            memory=state_bytes(trainer),
            ranges=tuple(ranges),
            flights=backend,
        )


def _ranks_of_a_node(job: Job) -> int:
    return job.cluster.node_devices if job.run.emulate is None else job.run.emulate.ranks_per_node


@contextmanager
def layers_named(stages: Any) -> Iterator[None]:
    """The forward pass of every layer carries its number while the block runs."""
    hooks = []
    for stage in stages:
        layers: Any = getattr(stage, "layers", None)
        for index, layer in layers.items() if isinstance(layers, nn.ModuleDict) else ():
            inside = _Inside(layer_name(index))
            # Data parallelism gathers before the layer begins and lets go after it has ended.
            hooks.append(layer.register_forward_pre_hook(inside.enter))
            hooks.append(layer.register_forward_hook(inside.leave, prepend=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Inside:
    """A range that two hooks open and close."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[Any] = []

    def enter(self, *_: Any) -> None:
        self._open.append(named(self.name))
        self._open[-1].__enter__()

    def leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def state_bytes(trainer: Trainer[Any]) -> dict[str, int]:
    """What this rank's device holds between two steps: weights, and the optimizer's states."""
    weights = [local(one.parameter) for one in trainer.parameters]
    # Sharded weights are fp32 masters too, and counted once.
    known = {one.untyped_storage().data_ptr() for one in weights}
    states = {
        value.untyped_storage().data_ptr(): value
        for of_parameter in trainer.optimizer.state.values()
        for value in (local(one) for one in of_parameter.values() if isinstance(one, torch.Tensor))
    }
    return {
        "weights": sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in weights),  # none of those offloaded
        "optimizer": sum(one.nbytes for place, one in states.items() if place not in known),
    }
