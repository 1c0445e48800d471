"""The collectives of `fully_shard`, named for the profiler, and in the background on gloo.

FSDP2 overlaps by streams, which a CPU does not have: on gloo it waits for every reduce-scatter. Ours starts in the
backward pass of a layer and is finished by the end of the whole pass, with at most two in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.choose import GradientSums
from shardwise.engine.collectives.reductions import SCRATCH, Pending, all_gather, on_gloo
from shardwise.engine.labels import Called
from shardwise.engine.parameters import local
from shardwise.engine.profiler_ranges import sent, wait_for
from shardwise.engine.torch_private import at_end_of_backward, current_graph_task_id, parameter_groups

IN_FLIGHT = 2


def install(module: nn.Module, unfinished: Unfinished, sums: GradientSums) -> list[GradientReduceScatter]:
    """Gives a module under `fully_shard` our collectives."""
    reductions = []
    for group in parameter_groups(module):
        mesh = group.mesh_info.mesh
        lent = on_gloo(mesh.get_group(mesh.ndim - 1), mesh.device_type)
        overlapped = lent and mesh.ndim == 1  # hybrid: FSDP goes on to sum between the shard groups at once
        fsdp: Any = module
        reductions.append(GradientReduceScatter(group.fsdp_params, lent, unfinished if overlapped else None, sums))
        fsdp.set_custom_reduce_scatter(reductions[-1])
        fsdp.set_custom_all_gather(ParameterAllGather(lent))
    return reductions


class ParameterAllGather:
    """``lent``: into memory that is reused."""

    def __init__(self, lent: bool) -> None:
        self.lent = lent

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return SCRATCH.lend(size[0], dtype) if self.lent else torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        with sent("dp", Called.PARAMETERS, input_tensor):
            return all_gather(output_tensor, input_tensor, group, async_op)


class Unfinished:
    """Reductions that were started in the backward pass that is running, oldest first.

    They are finished at its end; or by the caller, who sets ``will_finish``, for gradients of another origin.
    """

    def __init__(self) -> None:
        self.started: list[_Reduction] = []
        self.will_finish = False

    @property
    def may_begin(self) -> bool:
        return self.will_finish or current_graph_task_id() != -1

    def add(self, one: _Reduction) -> None:
        if not self.will_finish:
            self.will_finish = True
            at_end_of_backward(self.finish)
        self.started.append(one)
        while len(self.started) > IN_FLIGHT:
            self.started.pop(0).finish()

    def finish(self) -> None:
        self.will_finish = False
        self.finish_started()

    def finish_started(self) -> None:
        while self.started:
            self.started.pop(0).finish()


class GradientReduceScatter:
    """Sums the gradients of one unit; in the background where ``unfinished`` is given."""

    def __init__(
        self, fsdp_parameters: Sequence[Any], lent: bool, unfinished: Unfinished | None, sums: GradientSums
    ) -> None:
        self.fsdp_parameters, self.lent, self.unfinished, self.sums = fsdp_parameters, lent, unfinished, sums
        self.allocations = 0
        self.total: Tensor | None = None  # where FSDP accumulates: the output of the first reduction of a step

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice: for the input, which is freed soon, and the output, which becomes the gradients."""
        self.allocations += 1
        if self.lent and self.allocations % 2:
            return SCRATCH.lend(size[0], dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        with sent("dp", Called.GRADIENT_SHARDS, input_tensor):
            if self.unfinished is None or not self._may_wait(output_tensor, self.unfinished):
                if self.unfinished is not None:
                    self.unfinished.finish_started()  # FSDP may add to one of them now
                self.sums.reduce_scatter(output_tensor, input_tensor, group, in_fp32=True)
                self.total = None
                return
            work = self.sums.reduce_scatter(output_tensor, input_tensor, group, async_op=True)
        assert work is not None
        gradients = [one.sharded_param.grad for one in self.fsdp_parameters]
        if all(gradient is None for gradient in gradients):
            # FSDP makes the output the gradients, unread.
            self.total = output_tensor
            self.unfinished.add(_Reduction(work, input_tensor, output_tensor, None))
        elif self._accumulates_into_total(gradients, output_tensor):
            output_tensor.zero_()  # FSDP adds it now, we what it will be
            self.unfinished.add(_Reduction(work, input_tensor, output_tensor, self.total))
        else:
            self.unfinished.finish_started()
            wait_for(work, "dp", Called.GRADIENT_SHARDS)

    def _may_wait(self, output: Tensor, unfinished: Unfinished) -> bool:
        """The output is needed at once where FSDP converts it, or nobody would wait for it later."""
        same_format = all(one.orig_dtype == output.dtype for one in self.fsdp_parameters)
        return same_format and unfinished.may_begin

    def _accumulates_into_total(self, gradients: Sequence[Any], output: Tensor) -> bool:
        if self.total is None or self.total.numel() != output.numel():
            return False
        place = self.total.untyped_storage().data_ptr()
        trained = [one for one, other in zip(gradients, self.fsdp_parameters) if other.sharded_param.requires_grad]
        return all(one is not None and local(one).untyped_storage().data_ptr() == place for one in trained)


class _Reduction:
    """``sent`` is kept: freed, its memory would be reused."""

    def __init__(self, work: Pending, sent: Tensor, output: Tensor, total: Tensor | None) -> None:
        self.work, self.sent, self.output, self.total = work, sent, output, total

    def finish(self) -> None:
        wait_for(self.work, "dp", Called.GRADIENT_SHARDS)
        if self.total is not None:
            self.total += self.output
