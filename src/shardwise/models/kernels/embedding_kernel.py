"""Sums of the rows of a matrix that belong to the same token, in the order of the rows."""

from __future__ import annotations

import triton
import triton.language as tl

FEATURES = 1024  # that a program sums
WARPS = 4


@triton.jit
def row_sums(gradient, ordered, order, sums, tokens, features, FEATURES: tl.constexpr):
    """``ordered`` are the tokens in rising order, ``order`` their places; the first of its kind sums for all."""
    place = tl.program_id(0)
    token = tl.load(ordered + place)
    before = tl.load(ordered + place - 1, mask=place > 0, other=-1)
    if token != before:
        column = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
        inside = column < features
        total = tl.zeros((FEATURES,), tl.float32)
        alike = token
        while alike == token:
            row = tl.load(order + place).to(tl.int64) * features
            total += tl.load(gradient + row + column, mask=inside, other=0.0).to(tl.float32)
            place += 1
            alike = tl.load(ordered + place, mask=place < tokens, other=-1)
        tl.store(sums + token.to(tl.int64) * features + column, total.to(sums.dtype.element_ty), mask=inside)
