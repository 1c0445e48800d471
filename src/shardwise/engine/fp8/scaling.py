"""What FP8 scales by: one number for a tensor, for each row, or for each block of 128; casts in plain PyTorch.

Scales are "current": the largest element of the very tensor that is cast becomes the largest number of the format.

| scaling | inputs and weights | gradients | a scale for | source |
|---|---|---|---|---|
| tensor | e4m3 | e5m2 | all of a matrix | Transformer Engine's "hybrid"; torchao's ``tensorwise`` |
| row | e4m3 | e4m3 | a row of either operand; powers of two | torchao's ``rowwise`` |
| block | e4m3 | e4m3 | 1×128 elements, 128×128 of weights | DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) |

A matmul sums along the rows of both operands, as the hardware requires. So each matrix has two forms: plain, and turned
(transposed) for the matmul that sums along its other dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.spec.training import FP8_BLOCK

Scaling = Literal["tensor", "row", "block"]
BLOCK = FP8_BLOCK
SMALLEST = 1e-12  # of a largest element, so that zeros have a scale (torchao's EPS)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def format_of(scaling: str, gradient: bool) -> torch.dtype:
    return E5M2 if gradient and scaling == "tensor" else E4M3


@dataclass(frozen=True)
class Form:
    """A matrix in FP8, whose elements are ``values`` times their scale."""

    values: Tensor
    scales: Tensor
    """One number; [rows]; [blocks, rows] for blocks of a row; or for square blocks [blocks of rows, blocks of a row,
    rounded up to a multiple of 4], as cuBLAS requires."""
    square: bool = False  # blocks are 128 by 128

    def rows(self, start: int, stop: int) -> Form:
        """Some of the rows; square blocks are cut between blocks only."""
        if self.square:
            return Form(self.values[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)], True)
        if self.scales.dim() == 1 and self.scales.numel() == self.values.shape[0]:
            return Form(self.values[start:stop], self.scales[start:stop])
        scales = self.scales[:, start:stop] if self.scales.dim() == 2 else self.scales
        return Form(self.values[start:stop], scales)

    def wide(self) -> Tensor:
        """The elements themselves, in fp32."""
        rows, columns = self.values.shape
        scales = self.scales
        if self.square:
            scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        elif scales.dim() == 2:
            scales = scales.T.repeat_interleave(BLOCK, 1)[:, :columns]
        elif scales.dim() == 1:
            scales = scales[:, None]
        return self.values.float() * scales


def scale_shape(rows: int, columns: int, scaling: str, square: bool) -> tuple[int, ...]:
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return (rows,)
    blocks = -(-columns // BLOCK)
    return (-(-rows // BLOCK), -(-blocks // 4) * 4) if square else (blocks, rows)


def cast(matrix: Tensor, largest: Tensor | None, scaling: str, dtype: torch.dtype, square: bool) -> Form:
    """The plain form of a matrix; ``largest`` is its largest magnitude, or that of each row, unless blocks find it."""
    wide, most = matrix.float().contiguous(), LARGEST[dtype]
    if scaling == "block":
        return _cast_blocks(wide, most, dtype, square)
    assert largest is not None
    inverse = most / largest.float().clamp(min=SMALLEST)
    if scaling == "row":
        inverse = power_of_two(inverse)
    scaled = wide * (inverse[:, None] if scaling == "row" else inverse)
    return Form(scaled.clamp(-most, most).to(dtype).contiguous(), inverse.reciprocal())


def power_of_two(number: Tensor) -> Tensor:
    """The largest power of two that is no larger: the fraction bits are cleared."""
    return (number.view(torch.int32) & 0x7F800000).view(torch.float32)


def _cast_blocks(wide: Tensor, most: float, dtype: torch.dtype, square: bool) -> Form:
    rows, columns = wide.shape
    padded = F.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK if square else 0))
    height = BLOCK if square else 1
    blocks = padded.view(padded.shape[0] // height, height, -1, BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    inverse = most / largest.clamp(min=SMALLEST)
    values = (blocks * inverse).clamp(-most, most).to(dtype).view(padded.shape)[:rows, :columns].contiguous()
    scales = inverse.reciprocal()[:, 0, :, 0]
    scales = F.pad(scales, (0, -scales.shape[1] % 4)) if square else scales.T
    return Form(values, scales.contiguous(), square)


def whole_shape(parts: Sequence[Tensor], stacked: bool) -> tuple[int, int]:
    """Rows and columns of matrices above each other (``stacked``), or side by side."""
    rows, columns = parts[0].shape
    if stacked:
        return sum(part.shape[0] for part in parts), columns
    return rows, sum(part.shape[1] for part in parts)


def whole_matrix(parts: Sequence[Tensor], stacked: bool) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 0 if stacked else 1)
