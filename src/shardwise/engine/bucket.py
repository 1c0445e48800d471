"""Gradients of some parameters in one piece of memory, where they are summed over the ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.collectives.choose import GradientSums
from shardwise.engine.compression import CompressedSum, compressed_sum
from shardwise.engine.labels import Called
from shardwise.engine.names import sent, waited
from shardwise.engine.reductions import Pending
from shardwise.spec.less_communication import Compression


class Bucket:
    """Parameters whose gradients are summed together, once the backward pass has left ``complete_after`` (or ended).

    The memory is taken once and for all; from the first backward pass of a step on the gradients are in it.
    """

    def __init__(self, group: dist.ProcessGroup, sums: GradientSums) -> None:
        self.group, self.sums = group, sums
        self.parameters: list[nn.Parameter] = []
        self.complete_after: nn.Module | None = None
        self.flat: Tensor | None = None
        self.compressed: CompressedSum | None = None
        self.compresses = True
        self.collected = self.started = False
        self.work: Pending | None = None

    @property
    def bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.parameters)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def expect(self, compression: Compression) -> None:
        """Before the first sum, if at all."""
        shapes = [one.shape for one in self.parameters]
        self.compressed = compressed_sum(compression, shapes, self.group, self.device)

    def reduce(self) -> Pending | None:
        """Begins the sum of what was collected."""
        flat = self.collect()
        if self.compressed is not None and self.compresses:
            return self.compressed.start(flat)
        with sent("dp", Called.GRADIENTS, flat):
            return self.sums.all_reduce(flat, self.group)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """All gradients in one tensor, which they are parts of from now on; zero where a parameter had none."""
        if self.flat is None:
            first = self.parameters[0]
            elements = sum(one.numel() for one in self.parameters)
            self.flat = torch.empty(elements, dtype=first.grad_dtype or first.dtype, device=first.device)
            pieces = torch.split(self.flat, [one.numel() for one in self.parameters])
            self.places = [piece.view_as(one) for piece, one in zip(pieces, self.parameters)]
        if self.collected:
            return self.flat
        self.collected = True
        missing = [place for place, one in zip(self.places, self.parameters) if one.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        there = [(place, one.grad) for place, one in zip(self.places, self.parameters) if one.grad is not None]
        torch._foreach_copy_([place for place, _ in there], [gradient for _, gradient in there])
        for place, one in zip(self.places, self.parameters):
            one.grad = place
        return self.flat

    def wait(self) -> None:
        if self.work is not None:
            with waited("dp", Called.GRADIENTS):
                self.work.wait()
            self.work = None

    def clear(self) -> None:
        self.collected, self.started, self.work = False, False, None
