"""Sums of the rows of a matrix that belong to the same token, in an order that never changes."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS, FEATURES = 8, 1024  # that a program reads at a time: a token that is a fifth of a text has thousands of rows
WARPS = 4


@triton.jit
def row_sums(gradient, ordered, order, sums, tokens, features, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """``ordered`` are the tokens in rising order, ``order`` their places; the first of its kind sums for all."""
    place = tl.program_id(0)
    token = tl.load(ordered + place)
    before = tl.load(ordered + place - 1, mask=place > 0, other=-1)
    if token != before:
        column = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
        inside = column < features
        total = tl.zeros((FEATURES,), tl.float32)
        places = place + tl.arange(0, ROWS)
        alike = tl.load(ordered + places, mask=places < tokens, other=-1) == token
        left = tl.sum(alike.to(tl.int32), 0)
        while left > 0:
            row = tl.load(order + places, mask=alike, other=0).to(tl.int64) * features
            both = alike[:, None] & inside[None, :]
            total += tl.sum(tl.load(gradient + row[:, None] + column[None, :], mask=both, other=0.0).to(tl.float32), 0)
            places += ROWS
            alike = tl.load(ordered + places, mask=places < tokens, other=-1) == token
            left = tl.sum(alike.to(tl.int32), 0)
        tl.store(sums + token.to(tl.int64) * features + column, total.to(sums.dtype.element_ty), mask=inside)
