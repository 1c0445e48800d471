"""The backward pass of SwiGLU (arXiv 2002.05202) in one pass over memory, which makes its output again on the way."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048  # elements of a program
WARPS = 4


@triton.jit
def gated_gradients(gradient, gate, up, of_gate, of_up, output, elements, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """``WHOLE``: BLOCK divides the number of elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    dy = _read(gradient, place, inside, WHOLE)
    g = _read(gate, place, inside, WHOLE)
    u = _read(up, place, inside, WHOLE)
    share = 1.0 / (1.0 + tl.exp(-g))
    activated = g * share
    _write(of_gate, place, inside, dy * u * (share + activated * (1.0 - share)), WHOLE)
    _write(of_up, place, inside, dy * activated, WHOLE)
    _write(output, place, inside, activated * u, WHOLE)


@triton.jit
def _read(address, place, inside, WHOLE: tl.constexpr):
    if WHOLE:
        found = tl.load(address + place)
    else:
        found = tl.load(address + place, mask=inside, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _write(address, place, inside, values, WHOLE: tl.constexpr):
    values = values.to(address.dtype.element_ty)
    if WHOLE:
        tl.store(address + place, values)
    else:
        tl.store(address + place, values, mask=inside)
