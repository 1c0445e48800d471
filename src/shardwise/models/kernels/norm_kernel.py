"""The backward pass of an RMS norm in one pass over memory, together with the gradient of the path around it.

y = x · w / rms(x), so with n = x / rms(x) and g = dy · w: dx = (g − n · mean(g · n)) / rms(x), dw = Σ dy · n
(Zhang and Sennrich, arXiv 1910.07467). A program takes every so many rows, and sums its part of dw as it goes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwise.models.kernels.access import read, write


@triton.jit
def norm_gradients(
    gradient, around, inputs, weight, of_inputs, of_weight, outputs, rows, features, epsilon, AGAIN: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``of_weight`` [PROGRAMS, features] are partial sums. ``WHOLE``: WIDTH is the number of features.

    ``AGAIN``: the outputs of the norm are written as well.
    """
    column = tl.arange(0, WIDTH)
    inside = column < features
    scale = read(weight, column, inside, WHOLE)
    total = tl.zeros((WIDTH,), tl.float32)
    wide = tl.full((), 0, tl.int64)
    for row in range(tl.program_id(0), rows, PROGRAMS):
        start = (wide + row) * features
        x = read(inputs + start, column, inside, WHOLE)
        dy = read(gradient + start, column, inside, WHOLE)
        beside = read(around + start, column, inside, WHOLE)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / features + epsilon)
        normed = x * inverse
        of_normed = dy * scale
        dx = (of_normed - normed * (tl.sum(of_normed * normed, 0) / features)) * inverse + beside
        total += dy * normed
        write(of_inputs + start, column, inside, dx, WHOLE)
        if AGAIN:
            write(outputs + start, column, inside, normed * scale, WHOLE)
    tl.store(of_weight + tl.program_id(0) * features + column, total, mask=inside)
