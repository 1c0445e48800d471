"""Sums over a group of ranks: the backend's own collective, or a faster or more accurate one of ours.

gloo's reduce-scatter is an all-reduce whose result is mostly thrown away. Ours exchanges the pieces (all-to-all) and
adds them on the receiver, always in the order of the ranks: 2 to 3 times faster, and equal bits in every run. gloo's
all-reduce of fp32 is as fast as a reduce-scatter and an all-gather together (2 and 4 processes, 4 KiB to 64 MiB), so
it stays; of 16-bit numbers it rounds after every addition, so they take ours, which adds in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.profiler_ranges import Pending as Pending

NARROW = (torch.bfloat16, torch.float16)
TEMPORARY_BYTES = 64 * 2**20  # received pieces waiting to be added; a larger tensor is exchanged in parts

# The names of 2.13; the older ones warn there that they are deprecated.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Completion:
    """A collective that is over when ``wait`` returns; by default there is nothing left to wait for."""

    wait: Callable[[], object] = lambda: None


def all_reduce_bytes(tensor: torch.Tensor, ranks: int) -> int:
    """Bytes that each rank sends in a bandwidth-optimal all-reduce."""
    return 2 * tensor.numel() * tensor.element_size() * (ranks - 1) // ranks


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``flat`` in the shapes of ``tensors``, one after the other."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors)]


def reduce_scatter_sum(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
    *,
    in_fp32: bool = False,
) -> Pending | None:
    """Piece ``rank`` of the sum of all ranks' ``input`` (equal contiguous pieces, in the order of the ranks).

    With ``async_op`` the sum is written by ``wait``; ``input`` has to stay as it is until then. ``in_fp32``: 16-bit
    numbers are added in fp32 on every backend, at the price of a second ``input`` in memory.
    """
    if not _is_ours(group, input, in_fp32):
        work: Pending | None = _reduce_scatter(output, input, group=group, async_op=async_op)
        return work
    world, rank = group.size(), group.rank()
    if world == 1:
        output.copy_(input.detach().view_as(output))
        return Completion() if async_op else None
    pieces, flat = input.detach().reshape(world, -1), output.detach().view(-1)
    if async_op or input.device.type != "cpu":
        exchange = _ExchangedSum(flat, pieces, rank, group)
        if async_op:
            return exchange
        exchange.wait()
        return None
    elements = max(1, TEMPORARY_BYTES // (world * input.element_size()))
    for start in range(0, max(1, flat.numel()), elements):
        part = pieces[:, start : start + elements].contiguous()
        _ExchangedSum(flat[start : start + elements], part, rank, group).wait()
    return None


def all_reduce_sum(
    tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False, *, in_fp32: bool = False
) -> Pending | None:
    """``tensor`` becomes the sum over all ranks, with the same bits on each of them; ``in_fp32`` as above."""
    if group.size() == 1:
        return Completion() if async_op else None
    if tensor.dtype not in NARROW or not _is_ours(group, tensor, in_fp32):
        work: Pending | None = dist.all_reduce(tensor, group=group, async_op=async_op)
        return work
    reduced = _ScatteredAndGathered(tensor, group)
    if async_op:
        return reduced
    reduced.wait()
    return None


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Pending | None:
    """Gathers all ranks' ``input`` one after the other; ``input`` may already be its part of ``output``."""
    work: Pending | None
    if group.size() != 2 or not on_gloo(group, input.device.type):
        work = _all_gather(output, input, group=group, async_op=async_op)
        return work
    # Two ranks on gloo: half of the cost of its all-gather is copying a rank's own part, even onto itself.
    rank, parts = group.rank(), output.detach().view(2, -1)
    if parts[rank].data_ptr() != input.data_ptr() or not input.is_contiguous():
        parts[rank].copy_(input.detach().reshape(-1))
    splits = [0 if other == rank else input.numel() for other in range(2)]
    theirs, own = parts[1 - rank], parts[rank]
    output.parts = (theirs, own)  # type: ignore[attr-defined]  # kept alive: must not be freed on gloo's thread
    work = dist.all_to_all_single(theirs, own, splits, splits, group, async_op=async_op)
    return work


def on_gloo(group: dist.ProcessGroup, device: str) -> bool:
    """Whether gloo carries what ``group`` sends of tensors on ``device``."""
    return backend_of(group, device) == "gloo"


def _is_ours(group: dist.ProcessGroup, tensor: torch.Tensor, in_fp32: bool) -> bool:
    """Whether to use our own collective. Never on the fake backend, which shows what a GPU would send."""
    backend = backend_of(group, tensor.device.type)
    return backend == "gloo" or (backend == "nccl" and in_fp32 and tensor.dtype in NARROW)


def backend_of(group: dist.ProcessGroup, device: str) -> str:
    """The backend that carries what ``group`` sends of tensors on ``device``."""
    entries = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return next((name for kind, name in entries if kind == device), "")


class _ExchangedSum:
    """Row ``r`` of ``pieces`` goes to rank r; ``wait`` adds the rows that came, in the order of the ranks."""

    def __init__(self, output: torch.Tensor, pieces: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
        world, elements = pieces.shape
        self.output, self.own, self.rank = output, pieces[rank], rank
        if world == 2:  # the row that a rank keeps needs no copy
            self.received = _received(elements, pieces)
            splits = [elements if other != rank else 0 for other in range(world)]
            self.sent = pieces[1 - rank]
            self.work = dist.all_to_all_single(self.received, self.sent, splits, splits, group, async_op=True)
        else:
            self.received = _received(world * elements, pieces)
            self.sent = pieces.view(-1)
            self.work = dist.all_to_all_single(self.received, self.sent, group=group, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        if self.own.numel():
            rows = list(self.received.view(-1, self.own.numel()).unbind())
            if len(rows) == 1:
                rows.insert(self.rank, self.own)
            _add_rows(self.output, rows)
        if self.received.device.type == "cpu":
            SCRATCH.give_back(self.received)


def _received(elements: int, like: torch.Tensor) -> torch.Tensor:
    return SCRATCH.take(elements, like.dtype) if like.device.type == "cpu" else like.new_empty(elements)


def _add_rows(output: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """The sum, from the first row to the last; 16-bit rows are added in fp32 and rounded once."""
    in_place = output.dtype == rows[0].dtype and output.dtype not in NARROW
    total = torch.add(rows[0], rows[1], out=output) if in_place else rows[0].float().add_(rows[1])
    for row in rows[2:]:
        total.add_(row)
    if not in_place:
        output.copy_(total)


class _Scratch:
    """Memory for received pieces that is reused: fresh pages cost as much as the exchange."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self.lent: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    def lend(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Reclaimed once the returned tensor is freed; polled, since a callback could run on any thread."""
        if elements * dtype.itemsize > TEMPORARY_BYTES // 2:
            return torch.empty(elements, dtype=dtype)
        back = [buffer for lent, buffer in self.lent if lent() is None]
        self.lent = [loan for loan in self.lent if loan[0]() is not None]
        for buffer in back:
            self.give_back(buffer)
        buffer = self.take(elements, dtype)
        lent = buffer.view(-1)
        self.lent.append((weakref.ref(lent), buffer))
        return lent

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        needed = elements * dtype.itemsize
        fitting = [buffer for buffer in self.free if needed <= buffer.numel() <= 4 * needed]
        if not fitting:
            return torch.empty(elements, dtype=dtype)
        buffer = min(fitting, key=torch.Tensor.numel)
        self.free = [other for other in self.free if other is not buffer]
        return buffer[:needed].view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.free.append(buffer)
        while sum(buffer.numel() for buffer in self.free) > TEMPORARY_BYTES:
            self.free.pop(0)


SCRATCH = _Scratch()


class _ScatteredAndGathered:
    """An all-reduce of 16-bit numbers: the pieces are summed in fp32, rounded once, and gathered."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        world = group.size()
        self.tensor, self.group = tensor, group
        padded = -(-tensor.numel() // world) * world
        self.whole = tensor.new_zeros(padded)
        self.whole[: tensor.numel()] = tensor.detach().reshape(-1)
        self.piece = tensor.new_empty(padded // world)
        self.work = reduce_scatter_sum(self.piece, self.whole, group, async_op=True, in_fp32=True)

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        all_gather(self.whole, self.piece, self.group)
        self.tensor.copy_(self.whole[: self.tensor.numel()].view_as(self.tensor))
