"""The casts to FP8 as Triton kernels: a matrix is read once and both its forms are written.

A tile of 128 by 128 is also a block of block scaling, so its largest elements are found in the same reading; the other
scalings have to know them before (`largest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.engine.fp8.scaling import BLOCK, LARGEST, scale_shape, whole_shape

# As measured on an H200 (bench/fp8.py casts): more warps wait for each other where they look for a block's largest.
_WARPS, _WARPS_OF_BLOCKS = 8, 4


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
    rows, columns = whole_shape(parts, stacked)

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
        common: dict[str, Any] = {"PLAIN": plain, "TURNED": turned, "EVEN": _is_even(part)}
        places: tuple[Any, ...] = (part, _step(part), *part.shape, row, column)
        forms = (values, _step(values), values_turned, _step(values_turned), scales, scales_turned)
        if scaling == "block":
            steps, warps = (_step(scales), _step(scales_turned)), _WARPS if stacked else _WARPS_OF_BLOCKS
            _cast_blocks[grid](*places, *forms, *steps, LARGEST[dtype], SQUARE=stacked, num_warps=warps, **common)
        else:
            by_row, by_column = largest if scaling == "row" else (largest[0], largest[0])
            _cast[grid](
                *places, *forms, by_row, by_column, LARGEST[dtype], ROWS=scaling == "row", num_warps=_WARPS, **common
            )
        row, column = (row + part.shape[0], 0) if stacked else (0, column + part.shape[1])
    return values, scales, values_turned, scales_turned


def _step(matrix: Tensor) -> int:
    """Elements from one row to the next."""
    return matrix.stride()[0]


def _is_even(matrix: Tensor) -> bool:
    return all(size % BLOCK == 0 for size in matrix.shape)


def _in_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride()[-1] == 1 else matrix.contiguous()


def largest_of(parts: Sequence[Tensor], stacked: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each row and of each column of all parts together."""
    sizes = whole_shape(parts, stacked)
    by_row, by_column = (torch.zeros(size, dtype=torch.float32, device=parts[0].device) for size in sizes)
    row = column = 0
    for part in parts:
        part = _in_rows(part)
        grid = (triton.cdiv(part.shape[0], BLOCK), triton.cdiv(part.shape[1], BLOCK))
        _largest[grid](
            part,
            _step(part),
            *part.shape,
            row,
            column,
            by_row,
            by_column,
            EVEN=_is_even(part),
            num_warps=_WARPS_OF_BLOCKS,
        )
        row, column = (row + part.shape[0], 0) if stacked else (0, column + part.shape[1])
    return by_row, by_column


# -- the kernels: one program for a tile of 128 by 128; EVEN where no tile sticks out ------------------


@triton.jit  # type: ignore[untyped-decorator]
def _read(matrix, stride, rows, columns, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile, in fp32."""
    row, column = tl.arange(0, 128), tl.arange(0, 128)
    first_row, first_column = tl.program_id(0) * 128, tl.program_id(1) * 128
    place = matrix + first_row.to(tl.int64) * stride + first_column + row[:, None] * stride + column[None, :]
    if EVEN:
        tile = tl.load(place)
    else:
        inside = (first_row + row < rows)[:, None] & (first_column + column < columns)[None, :]
        tile = tl.load(place, mask=inside, other=0.0)
    return tile.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _write(values, stride, first_row, first_column, tile, rows, columns, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of a form, from the given row and column on; ``rows`` and ``columns`` of it are inside."""
    row, column = tl.arange(0, 128), tl.arange(0, 128)
    place = values + first_row.to(tl.int64) * stride + first_column + row[:, None] * stride + column[None, :]
    if EVEN:
        tl.store(place, tile)
    else:
        tl.store(place, tile, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(largest, most, POWER: tl.constexpr):  # type: ignore[no-untyped-def]
    """What elements are multiplied by; a power of two by leaving out the fraction of the number."""
    inverse = most / tl.maximum(largest.to(tl.float32), 1e-12)
    if POWER:
        inverse = (inverse.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return inverse


@triton.jit  # type: ignore[untyped-decorator]
def _cast(  # type: ignore[no-untyped-def]
    matrix, stride, rows, columns, first_row, first_column, plain, plain_stride, turned, turned_stride,
    scales, scales_turned, by_row, by_column, most,
    ROWS: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = _read(matrix, stride, rows, columns, EVEN)
    row, column = tl.program_id(0) * 128, tl.program_id(1) * 128
    index = tl.arange(0, 128)
    to_row, to_column = first_row + row, first_column + column
    if PLAIN:
        if ROWS:
            inside = index < rows - row
            inverse = _inverse(tl.load(by_row + to_row + index, mask=inside, other=1.0), most, True)
            scaled = tile * inverse[:, None]
            if column == 0:
                tl.store(scales + to_row + index, 1.0 / inverse, mask=inside)
        else:
            inverse = _inverse(tl.load(by_row), most, False)
            scaled = tile * inverse
            if row + column == 0:
                tl.store(scales, 1.0 / inverse)
        narrow = scaled.to(plain.dtype.element_ty)
        _write(plain, plain_stride, to_row, to_column, narrow, rows - row, columns - column, EVEN)
    if TURNED:
        if ROWS:
            inside = index < columns - column
            inverse = _inverse(tl.load(by_column + to_column + index, mask=inside, other=1.0), most, True)
            scaled = tile * inverse[None, :]
            if row == 0:
                tl.store(scales_turned + to_column + index, 1.0 / inverse, mask=inside)
        else:
            inverse = _inverse(tl.load(by_column), most, False)
            scaled = tile * inverse
            if row + column == 0:
                tl.store(scales_turned, 1.0 / inverse)
        narrow = tl.trans(scaled.to(turned.dtype.element_ty))
        _write(turned, turned_stride, to_column, to_row, narrow, columns - column, rows - row, EVEN)


@triton.jit  # type: ignore[untyped-decorator]
def _cast_blocks(  # type: ignore[no-untyped-def]
    matrix, stride, rows, columns, first_row, first_column, plain, plain_stride, turned, turned_stride,
    scales, scales_turned, scales_stride, turned_scales_stride, most,
    SQUARE: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = _read(matrix, stride, rows, columns, EVEN)
    row, column = tl.program_id(0) * 128, tl.program_id(1) * 128
    index = tl.arange(0, 128)
    to_row, to_column = first_row + row, first_column + column
    row_block, column_block = to_row // 128, to_column // 128
    if SQUARE:
        inverse = _inverse(tl.max(tl.max(tl.abs(tile), 1), 0), most, False)
    if PLAIN:
        if SQUARE:
            scaled = tile * inverse
            tl.store(scales + row_block * scales_stride + column_block, 1.0 / inverse)
        else:
            by_row = _inverse(tl.max(tl.abs(tile), 1), most, False)
            scaled = tile * by_row[:, None]
            tl.store(scales + column_block * scales_stride + to_row + index, 1.0 / by_row, mask=index < rows - row)
        narrow = scaled.to(plain.dtype.element_ty)
        _write(plain, plain_stride, to_row, to_column, narrow, rows - row, columns - column, EVEN)
    if TURNED:
        if SQUARE:
            scaled = tile * inverse
            tl.store(scales_turned + column_block * turned_scales_stride + row_block, 1.0 / inverse)
        else:
            tile = _read(matrix, stride, rows, columns, EVEN)  # from the cache: two scaled tiles fill the registers
            by_column = _inverse(tl.max(tl.abs(tile), 0), most, False)
            scaled = tile * by_column[None, :]
            place = scales_turned + row_block * turned_scales_stride + to_column + index
            tl.store(place, 1.0 / by_column, mask=index < columns - column)
        narrow = tl.trans(scaled.to(turned.dtype.element_ty))
        _write(turned, turned_stride, to_column, to_row, narrow, columns - column, rows - row, EVEN)


@triton.jit  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    matrix, stride, rows, columns, first_row, first_column, by_row, by_column, EVEN: tl.constexpr
):
    size = tl.abs(_read(matrix, stride, rows, columns, EVEN))
    row, column, index = tl.program_id(0) * 128, tl.program_id(1) * 128, tl.arange(0, 128)
    tl.atomic_max(by_row + first_row + row + index, tl.max(size, 1), mask=index < rows - row)
    tl.atomic_max(by_column + first_column + column + index, tl.max(size, 0), mask=index < columns - column)
