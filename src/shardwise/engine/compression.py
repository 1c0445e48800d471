"""Compressed sums of gradients, equal on every rank: as codes of fewer bits, or as low-rank factors.

A number that is not finite makes its block not finite, so that all ranks skip the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.collectives.reductions import Pending, all_gather, all_reduce_bytes, all_reduce_sum
from shardwise.engine.labels import Called
from shardwise.engine.profiler_ranges import sent
from shardwise.spec.less_communication import SCALE_BYTES, Compression, low_rank

# A codec encodes fp32 [blocks, block] as uint8 [blocks, bytes_per_block], and decodes them to the same numbers on every
# rank that has the same bytes.


class Rounded:
    """Each element in 16 bits, a block of its own: off by 2^-9 of itself in bf16, by 2^-12 in fp16 (above 6e-5)."""

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.bytes_per_block = dtype, dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.view(self.dtype).float()


class Scaled:
    """Eight bits per element, relative to the block's largest one.

    An element of int8 is off by at most 1/254 of the largest of its block; one of fp8 (e4m3) by 1/16 of itself, or
    where that is more by 2^-10/448 of the largest.
    """

    def __init__(self, block: int, dtype: torch.dtype) -> None:
        self.block, self.dtype, self.bytes_per_block = block, dtype, block + SCALE_BYTES
        self.largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max

    def encode(self, values: Tensor) -> Tensor:
        scale = values.abs().amax(dim=1, keepdim=True) / self.largest
        parts = (values / torch.where(scale > 0, scale, 1.0)).clamp(-self.largest, self.largest)
        if self.dtype == torch.int8:
            parts = torch.where(torch.isfinite(scale), parts.round(), 1.0)
        return _with_scale(parts.to(self.dtype).view(torch.uint8), scale)

    def decode(self, encoded: Tensor) -> Tensor:
        codes, scale = _without_scale(encoded)
        return codes.view(self.dtype).float() * scale


class Signs:
    """One bit per element: the sign, times the mean magnitude of the block's elements (Karimireddy et al. 2019)."""

    def __init__(self, block: int) -> None:
        self.block, self.bytes_per_block = block, block // 8 + SCALE_BYTES

    def encode(self, values: Tensor) -> Tensor:
        scale = values.abs().mean(dim=1, keepdim=True)
        bits = (values >= 0).view(-1, self.block // 8, 8)
        places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=values.device)
        return _with_scale((bits * places).sum(dim=2, dtype=torch.uint8), scale)

    def decode(self, encoded: Tensor) -> Tensor:
        codes, scale = _without_scale(encoded)
        places = torch.arange(8, dtype=torch.uint8, device=encoded.device)
        bits = (codes.unsqueeze(2) >> places) & 1
        return (bits.view(-1, self.block).float() * 2 - 1) * scale


Codec = Rounded | Scaled | Signs


def codec_of(compression: Compression) -> Codec:
    """Of every method that sends element by element."""
    method, block = compression.method, compression.block
    if method in ("1bit", "1bit-adam"):
        return Signs(block)
    if method in ("bf16", "fp16"):
        return Rounded(torch.bfloat16 if method == "bf16" else torch.float16)
    return Scaled(block, torch.int8 if method == "int8" else torch.float8_e4m3fn)


def _with_scale(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([codes, scale.view(torch.uint8)], dim=1)


def _without_scale(encoded: Tensor) -> tuple[Tensor, Tensor]:
    codes = encoded[:, :-SCALE_BYTES].contiguous()
    scale = encoded.new_empty(len(encoded), SCALE_BYTES).copy_(encoded[:, -SCALE_BYTES:])  # aligned
    return codes, scale.view(torch.float32)


class ExchangedSum:
    """The sums of one bucket of ``elements``, step after step: ``start`` begins a sum, ``wait`` writes it.

    Every rank decodes its piece of all ranks' gradients, adds them in fp32 and sends the sum as codes. All ranks decode
    the same bytes, so they have the same sum to the last bit. ``states`` hold the error feedback from one sum to the
    next: the rounding errors of this rank's own codes, and of the codes of its piece of the sum. ``sent_bytes`` counts
    what this rank has sent.
    """

    def __init__(
        self, codec: Codec, elements: int, group: dist.ProcessGroup, device: torch.device, *, error_feedback: bool
    ) -> None:
        self.codec, self.elements, self.group = codec, elements, group
        self.ranks = group.size()
        blocks = -(-elements // codec.block)
        self.blocks_each = -(-blocks // self.ranks)
        self.states: dict[str, Tensor] = {}
        if error_feedback:
            rows = (self.ranks * self.blocks_each, codec.block)
            self.states["own"] = torch.zeros(rows, device=device)
            self.states["sum"] = torch.zeros(self.blocks_each, codec.block, device=device)
        self.sent_bytes = 0

    def start(self, flat: Tensor) -> Pending:
        """``flat`` has to stay allocated until `wait`, which makes it the sum over all ranks."""
        self.flat = flat
        values = flat.new_zeros(self.ranks * self.blocks_each * self.codec.block, dtype=torch.float32)
        values[: self.elements].copy_(flat.view(-1))
        self.codes = self._encoded("own", values.view(-1, self.codec.block))
        self.received = torch.empty_like(self.codes)
        with sent("dp", Called.GRADIENT_CODES, self.codes):
            self.work = dist.all_to_all_single(self.received, self.codes, group=self.group, async_op=True)
        return self

    def wait(self) -> None:
        self.work.wait()
        self._count(self.codes)
        first, *others = self.received.view(self.ranks, self.blocks_each, -1)
        total = self.codec.decode(first)
        for part in others:
            total.add_(self.codec.decode(part))
        summed = self._encoded("sum", total)
        whole = self.received  # its pieces have been added
        with sent("dp", Called.CODES_OF_SUMS, whole):
            all_gather(whole.view(-1), summed.view(-1), self.group)
        self._count(whole)
        self.flat.view(-1).copy_(self.codec.decode(whole).view(-1)[: self.elements])
        del self.flat, self.codes, self.received, self.work

    def _encoded(self, name: str, values: Tensor) -> Tensor:
        """The codes of the gradient plus the error feedback; the new rounding error is kept for the next step."""
        error = self.states.get(name)
        if error is None:
            return self.codec.encode(values)
        values = values + error
        codes = self.codec.encode(values)
        torch.sub(values, self.codec.decode(codes), out=error)
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # a skipped step leaves no error
        return codes

    def _count(self, whole: Tensor) -> None:
        """All but this rank's own piece leaves it."""
        self.sent_bytes += whole.numel() * (self.ranks - 1) // self.ranks


class MomentumSum:
    """1-bit Adam: like `ExchangedSum`, but ranks exchange momentum instead of gradients.

    The errors of compressed momentum never reach the second moments (Tang et al. 2021, arXiv 2102.02888, algorithm 1):
    after some exact steps these are frozen, every rank moves the common momentum by its own gradient, and the mean of
    the results, as signs, is the next momentum. Here the optimizer is given the gradient that leads to that momentum,
    so that everything linear in gradients (sums over tensor-parallel ranks, tied ends) needs no change. Call `follow`
    before the first sum.
    """

    def __init__(self, exchanged: ExchangedSum) -> None:
        self.exchanged = exchanged
        self.states = exchanged.states
        self.momenta: Sequence[Tensor] = ()
        self.kept = 0.0

    @property
    def sent_bytes(self) -> int:
        return self.exchanged.sent_bytes

    def follow(self, momenta: Sequence[Tensor], kept: float) -> None:
        """Sets the optimizer's ``momenta``, of which ``kept`` (its beta1) is left after a step."""
        self.momenta, self.kept = momenta, kept

    def start(self, flat: Tensor) -> Pending:
        self.flat = flat
        self.moved = self._kept_momentum().div_(self.exchanged.ranks)
        self.moved.add_(flat.view(-1), alpha=1 - self.kept)
        self.exchanged.start(self.moved)
        return self

    def wait(self) -> None:
        self.exchanged.wait()
        gradient = self.moved.sub_(self._kept_momentum()).div_(1 - self.kept)
        self.flat.view(-1).copy_(gradient)
        del self.flat, self.moved

    def _kept_momentum(self) -> Tensor:
        return torch.cat([momentum.view(-1) for momentum in self.momenta]).mul_(self.kept)


# -- PowerSGD: every matrix as a product of two low-rank factors, by one power iteration -----------
# Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727, algorithm 1; an iteration starts from the last step's result.
# All matrices of a bucket are summed together. What is not a matrix, or would not be smaller as two factors, is summed
# uncompressed together with the first factors.


class LowRankSum:
    """The sums of one bucket, whose tensors have ``shapes``; used like `ExchangedSum`.

    The sum is the same to the last bit on all ranks with the same kind of device.
    """

    def __init__(
        self,
        rank: int,
        shapes: Sequence[torch.Size],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        error_feedback: bool,
    ) -> None:
        self.shapes, self.group, self.ranks = list(shapes), group, group.size()
        self.widths = [int(low_rank(rank, shape[-2], shape[-1])) if len(shape) >= 2 else 0 for shape in self.shapes]
        self.states: dict[str, Tensor] = {}
        random = torch.Generator().manual_seed(0)  # the same on all ranks
        for number, (shape, width) in enumerate(zip(self.shapes, self.widths)):
            if width:
                first = torch.randn(shape[:-2].numel(), shape[-1], width, generator=random)
                self.states[f"right_{number}"] = first.to(device)
                if error_feedback:
                    self.states[f"error_{number}"] = torch.zeros(shape, device=device)
        self.sent_bytes = 0

    @torch.no_grad()
    def start(self, flat: Tensor) -> Pending:
        """As in `ExchangedSum`: `wait` makes ``flat`` the sum over all ranks."""
        self.places = _cut(flat.view(-1), self.shapes)
        self.matrices: dict[int, Tensor] = {}
        for number, place in enumerate(self.places):
            if self.widths[number]:
                error = self.states.get(f"error_{number}")
                matrix = place.float() if error is None else place.float() + error
                self.matrices[number] = matrix.reshape(-1, *place.shape[-2:])
        lefts = [matrix @ self.states[f"right_{number}"] for number, matrix in self.matrices.items()]
        plain = [place.float() for number, place in enumerate(self.places) if not self.widths[number]]
        self.first, self.work = self._summed(Called.FIRST_FACTORS, [*lefts, *plain])
        return self

    @torch.no_grad()
    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        left_shapes = [(*matrix.shape[:-1], self.widths[number]) for number, matrix in self.matrices.items()]
        plain = [number for number, width in enumerate(self.widths) if not width]
        sums = _cut(self.first, [*left_shapes, *(tuple(self.shapes[number]) for number in plain)])
        lefts = {number: torch.linalg.qr(left).Q for number, left in zip(self.matrices, sums)}
        for number, whole in zip(plain, sums[len(lefts) :]):
            self.places[number].copy_(whole)
        rights = [matrix.transpose(1, 2) @ lefts[number] for number, matrix in self.matrices.items()]
        second, work = self._summed(Called.SECOND_FACTORS, rights)
        if work is not None:
            work.wait()
        for number, right in zip(self.matrices, _cut(second, [tuple(right.shape) for right in rights])):
            whole = lefts[number] @ right.transpose(1, 2)
            self._keep(number, whole, right)
            self.places[number].copy_(whole.view(self.shapes[number]))
        del self.places, self.matrices, self.first, self.work

    def _keep(self, number: int, whole: Tensor, right: Tensor) -> None:
        """The start of the next iteration, and the error of this rank's share; nothing from a skipped step."""
        self.states[f"right_{number}"].copy_(right.nan_to_num(0.0, 0.0, 0.0))
        error = self.states.get(f"error_{number}")
        if error is not None:
            torch.sub(self.matrices[number], whole / self.ranks, out=error.view(whole.shape))
            error.nan_to_num_(0.0, 0.0, 0.0)

    def _summed(self, what: str, tensors: list[Tensor]) -> tuple[Tensor, Pending | None]:
        if not tensors:
            return torch.empty(0), None
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with sent("dp", what, flat):
            work = all_reduce_sum(flat, self.group, async_op=True)
        self.sent_bytes += all_reduce_bytes(flat, self.ranks)
        return flat, work


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    pieces = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


# -- Which kind a strategy asks for ----------------------------------------------------------------


CompressedSum = LowRankSum | ExchangedSum | MomentumSum  # of the same bucket, step after step


def compressed_sum(
    compression: Compression, shapes: Sequence[torch.Size], group: dist.ProcessGroup, device: torch.device
) -> CompressedSum | None:
    """The sum of a bucket that holds tensors of these shapes one after the other; None without compression."""
    if not compression.is_used:
        return None
    if compression.method == "powersgd":
        return LowRankSum(compression.rank, shapes, group, device, error_feedback=compression.error_feedback)
    elements = sum(shape.numel() for shape in shapes)
    codec = codec_of(compression)
    exchanged = ExchangedSum(codec, elements, group, device, error_feedback=compression.error_feedback)
    return MomentumSum(exchanged) if compression.compresses_momentum else exchanged
