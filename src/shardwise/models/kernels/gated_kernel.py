"""The backward pass of SwiGLU (arXiv 2002.05202) in one pass over memory, which makes its output again on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from shardwise.models.kernels.access import read, write

BLOCK = 2048  # elements of a program
WARPS = 4


@triton.jit
def gated_gradients(gradient, gate, up, of_gate, of_up, output, elements, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """``WHOLE``: BLOCK divides the number of elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    dy = read(gradient, place, inside, WHOLE)
    g = read(gate, place, inside, WHOLE)
    u = read(up, place, inside, WHOLE)
    share = 1.0 / (1.0 + tl.exp(-g))
    activated = g * share
    write(of_gate, place, inside, dy * u * (share + activated * (1.0 - share)), WHOLE)
    write(of_up, place, inside, dy * activated, WHOLE)
    write(output, place, inside, activated * u, WHOLE)
