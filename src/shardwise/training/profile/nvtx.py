"""NVTX ranges in some steps of a run, for nsys and other GPU tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.labels import step_name
from shardwise.engine.profiler_ranges import named, nvtx_ranges
from shardwise.engine.trainer import Trainer
from shardwise.spec.run import StepWindow
from shardwise.training.profile.profiler import layers_named


class NvtxSteps:
    """`step` wraps every step of a run; those in ``window`` have ranges, between cudaProfilerStart and Stop.

    nsys with `--capture-range=cudaProfilerApi` records from the first process that starts to the first that stops. So
    all ranks begin together, and end once the devices of all are done.
    """

    def __init__(self, trainer: Trainer[Any], window: StepWindow) -> None:
        self.trainer, self.window = trainer, window
        self._open: ExitStack | None = None

    def covers(self, number: int) -> bool:
        """Whether a step, counted from 1, has ranges; also one that is repeated within the window."""
        return self.window.has(number) or self._open is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if not self.covers(number):
            yield
            return
        if self._open is None:
            self._begin()
        with named(step_name(number)):
            yield
        if number == self.window.last:
            self._end()

    def _begin(self) -> None:
        self._meet()
        self._open = ExitStack()
        self._open.callback(torch.cuda.profiler.stop)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._open.enter_context(layers_named(self.trainer.stages.values()))
        self._open.enter_context(nvtx_ranges())

    def _end(self) -> None:
        assert self._open is not None
        self._meet()
        self._open.close()
        self._open = None

    def _meet(self) -> None:
        """Waits until all ranks are here and their devices idle."""
        torch.cuda.synchronize(self.trainer.device)
        dist.barrier()
        torch.cuda.synchronize(self.trainer.device)  # the barrier is a kernel of its own
