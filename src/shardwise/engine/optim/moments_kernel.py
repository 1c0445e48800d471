"""Reading and writing of a block of elements, and of moments in 8 bits (`eight_bits` says what their codes mean)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def address(row, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + FIELD).to(tl.pointer_type(TYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def read(pointer, place, there, WHOLE: tl.constexpr):
    if WHOLE:
        found = tl.load(pointer + place)
    else:
        found = tl.load(pointer + place, mask=there, other=0)
    return found


@triton.jit
def write(pointer, place, there, values, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer + place, values)
    else:
        tl.store(pointer + place, values, mask=there)


@triton.jit
def read_moments(row, start, place, there, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
                 SHARED: tl.constexpr):  # fmt: skip
    scales = _scales(row, 2, start, SHARED)
    share = read(address(row, 2, tl.int8, ALIGNED) + start, place, there, WHOLE).to(tl.float32) * (1 / 127)
    m = share * tl.abs(share) * _of_rows(scales, row, start, BLOCK, SHARED)[:, None]
    scales = _scales(row, 3, start, SHARED)
    share = read(address(row, 3, tl.uint8, ALIGNED) + start, place, there, WHOLE).to(tl.float32) * (1 / 255)
    share = share * share
    return m, share * share * _of_rows(scales, row, start, BLOCK, SHARED)[:, None]


@triton.jit
def write_moments(row, start, place, there, m, v, step, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
                  BLOCK: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    drawn = _spread((start + place).to(tl.uint32) ^ _spread(step.to(tl.uint32)))
    scale = tl.max(tl.abs(m), 1)
    share = tl.abs(m) * _inverse(scale)[:, None]
    lower = tl.minimum(tl.floor(tl.sqrt(share) * 127.0), 126.0)
    below, above = lower * (1 / 127), (lower + 1.0) * (1 / 127)
    code = _chosen(share, lower, below * below, above * above, drawn & 0xFFFF)
    codes = tl.where(m < 0, -code, code).to(tl.int8)
    write(address(row, 2, tl.int8, ALIGNED) + start, place, there, codes, WHOLE)
    _keep(_scales(row, 2, start, SHARED), row, start, scale, BLOCK, SHARED)
    scale = tl.max(v, 1)
    share = v * _inverse(scale)[:, None]
    lower = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(share)) * 255.0), 254.0)
    below, above = lower * (1 / 255), (lower + 1.0) * (1 / 255)
    below, above = below * below, above * above
    code = _chosen(share, lower, below * below, above * above, drawn >> 16)
    codes = tl.where(v > 0, tl.maximum(code, 1.0), 0.0).to(tl.uint8)
    write(address(row, 3, tl.uint8, ALIGNED) + start, place, there, codes, WHOLE)
    _keep(_scales(row, 3, start, SHARED), row, start, scale, BLOCK, SHARED)


@triton.jit
def _inverse(scale):
    """Zero of what is too small to divide by."""
    large = scale > 1e-37
    return tl.where(large, 1.0 / tl.where(large, scale, 1.0), 0.0)


@triton.jit
def _chosen(share, lower, below, above, drawn):
    """The lower code or the next, which is the more likely the nearer the share is to it."""
    return tl.where(share - below > drawn.to(tl.float32) * (1 / 65536) * (above - below), lower + 1.0, lower)


@triton.jit
def _scales(row, FIELD: tl.constexpr, start, SHARED: tl.constexpr):
    """The address of a program's first scale: they lie behind all codes, from a multiple of 16 bytes on."""
    behind = (tl.load(row + 5) + 15) // 16 * 16
    return (tl.load(row + FIELD) + behind).to(tl.pointer_type(tl.float32)) + start // SHARED


@triton.jit
def _of_rows(scales, row, start, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    number = tl.arange(0, BLOCK // SHARED)
    return tl.load(scales + number, mask=start + number * SHARED < tl.load(row + 5), other=0.0)


@triton.jit
def _keep(scales, row, start, scale, BLOCK: tl.constexpr, SHARED: tl.constexpr):
    number = tl.arange(0, BLOCK // SHARED)
    tl.store(scales + number, scale, mask=start + number * SHARED < tl.load(row + 5))


@triton.jit
def _spread(bits):
    """A hash of 32 bits: two rounds of shift and multiplication."""
    bits = ((bits >> 16) ^ bits) * 0x45D9F3B
    bits = ((bits >> 16) ^ bits) * 0x45D9F3B
    return (bits >> 16) ^ bits
