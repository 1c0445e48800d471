"""Weights that ZeRO-3 gathers in FP8: a rank casts its shard by the scales of the whole weight, one byte per element.

`fully_shard` asks a shard what to send (``fsdp_pre_all_gather``) and hands it what has arrived
(``fsdp_post_all_gather``). The scales need the largest elements of all shards, on which ranks agree once a step, for
all weights together; so the FP8 numbers are those of an undivided weight. With row scaling the two forms of a weight
are different numbers: both together would take as many bytes as the weight in bf16, which is gathered instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.fp8.linear import Group
from shardwise.engine.fp8.scaling import BLOCK, E4M3, LARGEST, SMALLEST, Form
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.torch_private import local_shard


class GatheredWeight:
    """One weight: its shard on this rank, the scales of the whole, and the whole in FP8 while it is gathered.

    The parameter that layers see has no memory: only its shape and its gradient are used.
    """

    def __init__(self, parameter: Any, scaling: str, group: dist.ProcessGroup) -> None:
        rows, columns = parameter.shape
        self.scaling, self.shape = scaling, (rows, columns)
        self.padded_rows = -(-rows // group.size())
        self.first_row = min(rows, group.rank() * self.padded_rows)
        self.values: Tensor | None = None
        shard = local_shard(parameter)
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        self.inverse = torch.ones(blocks if scaling == "block" else (), device=shard.device)
        self._shard = weakref.ref(shard)
        shard.fsdp_pre_all_gather = self._to_send
        shard.fsdp_post_all_gather = self._arrived

    def largest(self) -> Tensor:
        """The largest element of this rank's rows, or of its part of each block."""
        shard = self._narrow()
        if self.scaling == "tensor":
            return shard.abs().amax().float().view(1) if shard.numel() else self.inverse.new_zeros(1)
        table = self.inverse.new_zeros(self.inverse.shape)
        of_rows = F.pad(shard, (0, -shard.shape[1] % BLOCK)).view(len(shard), -1, BLOCK).abs().amax(-1).float()
        return table.scatter_reduce_(0, self._blocks_of_rows()[:, None].expand_as(of_rows), of_rows, "amax").flatten()

    def scale_by(self, largest: Tensor) -> None:
        """Sets the scales from the maximum over all ranks of what `largest` returns."""
        self.inverse.copy_((LARGEST[E4M3] / largest.clamp(min=SMALLEST)).view(self.inverse.shape))

    @property
    def form(self) -> Form:
        """Of the whole weight, while it is gathered."""
        assert self.values is not None
        scales, square = self.inverse.reciprocal(), self.scaling == "block"
        return Form(self.values, F.pad(scales, (0, -scales.shape[1] % 4)) if square else scales, square)

    @property
    def _held(self) -> Tensor:
        shard: Tensor | None = self._shard()
        assert shard is not None
        return shard

    def _narrow(self) -> Tensor:
        """The shard as it is computed with: rounded to bf16."""
        return self._held.detach().bfloat16()

    def _blocks_of_rows(self) -> Tensor:
        held = self._held
        rows: Tensor = self.first_row + torch.arange(len(held), device=held.device)
        return rows // BLOCK

    def _to_send(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        wide = self._narrow().float()
        inverse = self.inverse
        if self.scaling == "block":
            inverse = inverse[self._blocks_of_rows()].repeat_interleave(BLOCK, 1)[:, : wide.shape[1]]
        values = (wide * inverse).clamp_(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
        if len(values) < self.padded_rows:
            whole = values.new_zeros((self.padded_rows, self.shape[1]))
            whole[: len(values)] = values
            values = whole
        return (values,), None

    def _arrived(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        self.values = gathered[0][: self.shape[0]]
        if out is not None:
            return None
        return torch.empty(self.shape, dtype=dtype, device=gathered[0].device), ()


class WeightsTogether(NamedTuple):
    """Weights that read the same input; with tensor scaling they share a scale."""

    weights: tuple[GatheredWeight, ...]
    cut_over: Group  # the tensor-parallel ranks that they are cut over


class GatherScales:
    """Finds the scales of all gathered weights of a rank, once a step: one all-reduce over the shards."""

    def __init__(self, together: Sequence[WeightsTogether], group: dist.ProcessGroup) -> None:
        self.together, self.group = together, group

    @torch.no_grad()
    def find(self) -> None:
        weights = [weight for some in self.together for weight in some.weights]
        tables = [weight.largest() for weight in weights]
        flat = torch.cat(tables)
        with sent("dp", Called.LARGEST_WEIGHTS, flat):
            dist.all_reduce(flat, dist.ReduceOp.MAX, self.group)
        largest = dict(zip(weights, torch.split(flat, [len(table) for table in tables])))
        for some in self.together:
            for weight in some.weights if some.weights[0].scaling == "block" else ():
                weight.scale_by(largest[weight])
            if some.weights[0].scaling == "tensor":
                most = torch.stack([largest[weight] for weight in some.weights]).amax(0)
                if some.cut_over is not None:
                    dist.all_reduce(most, dist.ReduceOp.MAX, some.cut_over)
                for weight in some.weights:
                    weight.scale_by(most)


def drop_wide_weights(layers: Iterable[nn.Module]) -> None:
    """Frees the memory of gathered parameters, which nothing reads."""
    for layer in layers:
        storage = layer.weight.untyped_storage()  # type: ignore[operator]
        if storage.nbytes():
            storage.resize_(0)
