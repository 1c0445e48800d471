"""Sums of squares of many tensors in one launch, which reads each element once."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 8192  # elements of a program
WARPS = 8


@triton.jit
def squares(
    rows, owners, weights, sums, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A sum of each program. A row: the place of the tensor's weight, its address, its size, its first program."""
    program = tl.program_id(0)
    row = rows + tl.load(owners + program) * 4
    address = tl.load(row + 1).to(tl.pointer_type(GRADIENT))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    start = (program - tl.load(row + 3)) * BLOCK
    left = tl.load(row + 2) - start
    place = tl.arange(0, BLOCK)
    weight = tl.load(weights + tl.load(row))
    if left >= BLOCK:  # without a mask, so that a thread reads 16 bytes at a time
        values = tl.load(address + start + place).to(tl.float32)
        tl.store(sums + program, tl.sum(values * values, axis=0) * weight)
    else:
        values = tl.load(address + start + place, mask=place < left, other=0).to(tl.float32)
        tl.store(sums + program, tl.sum(values * values, axis=0) * weight)
