"""The casts to FP8 as Triton kernels: a matrix is read once and both its forms are written.

A tile of 128 by 128 is also a block of block scaling, whose largest elements are thus found in the same reading; the
other scalings need them before (`largest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.engine.fp8.scaling import BLOCK, LARGEST, scale_shape

_WARPS = 8


def cast_forms(
    parts: Sequence[Tensor],
    largest: Sequence[Tensor],
    scaling: str,
    dtype: torch.dtype,
    stacked: bool,
    plain: bool,
    turned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values and scales of the plain form, then of the turned one; of a form that is not wanted, empty."""
    first = parts[0]
    rows = sum(one.shape[0] for one in parts) if stacked else first.shape[0]
    columns = first.shape[1] if stacked else sum(one.shape[1] for one in parts)

    def form(wanted: bool, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        shape = scale_shape(rows, columns, scaling, stacked) if wanted else (0,)
        make = torch.zeros if stacked and scaling == "block" else torch.empty  # square blocks have padding
        scales = make(shape, dtype=torch.float32, device=first.device)
        return torch.empty((rows, columns) if wanted else (0, 0), dtype=dtype, device=first.device), scales

    values, scales = form(plain, rows, columns)
    values_turned, scales_turned = form(turned, columns, rows)
    row = column = 0
    for part in parts:
        part = _in_rows(part)
        grid = (triton.cdiv(part.shape[0], BLOCK), triton.cdiv(part.shape[1], BLOCK))
        common: dict[str, Any] = {"PLAIN": plain, "TURNED": turned, "num_warps": _WARPS}
        places: tuple[Any, ...] = (part, _step(part), *part.shape, row, column)
        forms = (values, _step(values), values_turned, _step(values_turned), scales, scales_turned)
        if scaling == "block":
            steps = (_step(scales), _step(scales_turned))
            _cast_blocks[grid](*places, *forms, *steps, LARGEST[dtype], SQUARE=stacked, **common)
        else:
            by_row, by_column = largest if scaling == "row" else (largest[0], largest[0])
            _cast[grid](*places, *forms, by_row, by_column, LARGEST[dtype], ROWS=scaling == "row", **common)
        row, column = (row + part.shape[0], 0) if stacked else (0, column + part.shape[1])
    return values, scales, values_turned, scales_turned


def _step(matrix: Tensor) -> int:
    """Elements from one row to the next."""
    return matrix.stride()[0]


def _in_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride()[-1] == 1 else matrix.contiguous()


def largest_of(parts: Sequence[Tensor], stacked: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each row and of each column of all parts together."""
    first = parts[0]
    rows = sum(one.shape[0] for one in parts) if stacked else first.shape[0]
    columns = first.shape[1] if stacked else sum(one.shape[1] for one in parts)
    by_row, by_column = (torch.zeros(size, dtype=torch.float32, device=first.device) for size in (rows, columns))
    row = column = 0
    for part in parts:
        part = _in_rows(part)
        grid = (triton.cdiv(part.shape[0], BLOCK), triton.cdiv(part.shape[1], BLOCK))
        _largest[grid](part, _step(part), *part.shape, row, column, by_row, by_column, num_warps=_WARPS)
        row, column = (row + part.shape[0], 0) if stacked else (0, column + part.shape[1])
    return by_row, by_column


@triton.jit  # type: ignore[untyped-decorator]
def _tile(matrix, stride, rows, columns):  # type: ignore[no-untyped-def]
    """A tile of 128 by 128 in fp32, and its indices."""
    row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return tile, row, column, inside


@triton.jit  # type: ignore[untyped-decorator]
def _power_of_two(number):  # type: ignore[no-untyped-def]
    return (number.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _cast(  # type: ignore[no-untyped-def]
    matrix, stride, rows, columns, first_row, first_column, plain, plain_stride, turned, turned_stride,
    scales, scales_turned, by_row, by_column, most,
    ROWS: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    tile, row, column, inside = _tile(matrix, stride, rows, columns)
    to_row, to_column = row + first_row, column + first_column
    if PLAIN:
        if ROWS:
            inverse = _power_of_two(most / tl.maximum(tl.load(by_row + to_row, mask=row < rows, other=1.0), 1e-12))
            scaled = tile * inverse[:, None]
            if tl.program_id(1) == 0:
                tl.store(scales + to_row, 1.0 / inverse, mask=row < rows)
        else:
            inverse = most / tl.maximum(tl.load(by_row).to(tl.float32), 1e-12)
            scaled = tile * inverse
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(scales, 1.0 / inverse)
        to = plain + to_row[:, None] * plain_stride + to_column[None, :]
        tl.store(to, scaled.to(plain.dtype.element_ty), mask=inside)
    if TURNED:
        if ROWS:
            largest = tl.load(by_column + to_column, mask=column < columns, other=1.0)
            inverse = _power_of_two(most / tl.maximum(largest, 1e-12))
            scaled = tile * inverse[None, :]
            if tl.program_id(0) == 0:
                tl.store(scales_turned + to_column, 1.0 / inverse, mask=column < columns)
        else:
            inverse = most / tl.maximum(tl.load(by_column).to(tl.float32), 1e-12)
            scaled = tile * inverse
            if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
                tl.store(scales_turned, 1.0 / inverse)
        to = turned + to_column[:, None] * turned_stride + to_row[None, :]
        tl.store(to, tl.trans(scaled.to(turned.dtype.element_ty)), mask=tl.trans(inside))


@triton.jit  # type: ignore[untyped-decorator]
def _cast_blocks(  # type: ignore[no-untyped-def]
    matrix, stride, rows, columns, first_row, first_column, plain, plain_stride, turned, turned_stride,
    scales, scales_turned, scales_stride, turned_scales_stride, most,
    SQUARE: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    tile, row, column, inside = _tile(matrix, stride, rows, columns)
    to_row, to_column = row + first_row, column + first_column
    row_block, column_block = tl.program_id(0) + first_row // 128, tl.program_id(1) + first_column // 128
    size = tl.abs(tile)
    if SQUARE:
        inverse = most / tl.maximum(tl.max(tl.max(size, 1), 0), 1e-12)
        if PLAIN:
            tl.store(scales + row_block * scales_stride + column_block, 1.0 / inverse)
        if TURNED:
            tl.store(scales_turned + column_block * turned_scales_stride + row_block, 1.0 / inverse)
    if PLAIN:
        if SQUARE:
            scaled = tile * inverse
        else:
            by_row = most / tl.maximum(tl.max(size, 1), 1e-12)
            scaled = tile * by_row[:, None]
            tl.store(scales + column_block * scales_stride + to_row, 1.0 / by_row, mask=row < rows)
        to = plain + to_row[:, None] * plain_stride + to_column[None, :]
        tl.store(to, scaled.to(plain.dtype.element_ty), mask=inside)
    if TURNED:
        if SQUARE:
            scaled = tile * inverse
        else:
            by_column = most / tl.maximum(tl.max(size, 0), 1e-12)
            scaled = tile * by_column[None, :]
            place = scales_turned + row_block * turned_scales_stride + to_column
            tl.store(place, 1.0 / by_column, mask=column < columns)
        to = turned + to_column[:, None] * turned_stride + to_row[None, :]
        tl.store(to, tl.trans(scaled.to(turned.dtype.element_ty)), mask=tl.trans(inside))


@triton.jit  # type: ignore[untyped-decorator]
def _largest(matrix, stride, rows, columns, first_row, first_column, by_row, by_column):  # type: ignore[no-untyped-def]
    tile, row, column, _ = _tile(matrix, stride, rows, columns)
    size = tl.abs(tile)
    tl.atomic_max(by_row + row + first_row, tl.max(size, 1), mask=row < rows)
    tl.atomic_max(by_column + column + first_column, tl.max(size, 0), mask=column < columns)
