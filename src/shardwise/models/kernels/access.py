"""Numbers of a block, read into fp32 and written in the format of their tensor.

A block that is ``WHOLE`` needs no mask, so that a thread moves 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(address, place, inside, WHOLE: tl.constexpr):
    if WHOLE:
        values = tl.load(address + place)
    else:
        values = tl.load(address + place, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def write(address, place, inside, values, WHOLE: tl.constexpr):
    values = values.to(address.dtype.element_ty)
    if WHOLE:
        tl.store(address + place, values)
    else:
        tl.store(address + place, values, mask=inside)
