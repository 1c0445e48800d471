"""How gradients are summed: by the backend's own collective, or by the schedule that `strategy.collective` names.

"auto" takes the backend's own unless one of our schedules is predicted to be faster for this size on the network that
the group spans.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.collectives.schedule import CollectiveKind, Schedule
from shardwise.engine.collectives.communicator import Communicator
from shardwise.engine.collectives.reductions import Completion, Pending, all_reduce_sum, backend_of, reduce_scatter_sum
from shardwise.engine.mesh import Mesh
from shardwise.layout.gradient_schedules import UNNAMED, choose, gradient_groups
from shardwise.layout.groups import RankRun
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

RUN_ON = ("gloo", "nccl")


class GradientSums:
    """Sums over the groups of a mesh; without a job, by the backend's own collectives."""

    def __init__(self, mesh: Mesh, job: Job | None = None) -> None:
        self.job = job
        self._runs: dict[dist.ProcessGroup, tuple[RankRun, ...]] = {}
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self._chosen: dict[tuple[dist.ProcessGroup, CollectiveKind, int], Schedule | None] = {}
        if job is not None:
            self._runs = {
                mesh.group(group.name): group.runs for group in gradient_groups(job) if mesh.size(group.name) > 1
            }

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> Pending | None:
        """Starts to sum ``tensor`` in place."""
        schedule = self._schedule(group, CollectiveKind.ALL_REDUCE, tensor)
        if schedule is None:
            return all_reduce_sum(tensor, group, async_op=True, in_fp32=True)
        return self._communicator(group).run(schedule, tensor, async_op=True)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False, *, in_fp32: bool = False
    ) -> Pending | None:
        """Like `reduce_scatter_sum`: with ``async_op``, ``output`` must not be read before `wait`."""
        schedule = self._schedule(group, CollectiveKind.REDUCE_SCATTER, input)
        if schedule is None or output.dtype != input.dtype:
            return reduce_scatter_sum(output, input, group, async_op, in_fp32=in_fp32)
        if not async_op:
            return self._communicator(group).run(schedule, input, output)
        summed = torch.empty_like(output)
        work = self._communicator(group).run(schedule, input, summed, async_op=True)
        assert work is not None

        def write() -> None:
            work.wait()
            output.copy_(summed)

        return Completion(write)

    def _communicator(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self._communicators:
            self._communicators[group] = Communicator(group)
        return self._communicators[group]

    def _schedule(self, group: dist.ProcessGroup, kind: CollectiveKind, tensor: Tensor) -> Schedule | None:
        """The schedule for a tensor, or None; the same on all ranks, since it depends only on what all of them know."""
        runs = self._runs.get(group)
        if runs is None or self.job is None or backend_of(group, tensor.device.type) not in RUN_ON:
            return None
        size = tensor.numel() * tensor.element_size()
        key = group, kind, size
        if key not in self._chosen:
            wanted = self.job.strategy.collective
            try:
                self._chosen[key] = choose(kind, size, self.job.cluster, runs, wanted).schedule
            except SpecError:
                if wanted not in UNNAMED:
                    raise
                self._chosen[key] = None  # a group across the levels of the cluster, for which no network is described
        return self._chosen[key]
