"""Triton kernels of the optimizer: AdamW of many tensors in one launch, and the squares of their gradients.

AdamW reads and writes each element of gradient, value and moments once. The formula (Loshchilov and Hutter, arXiv
1711.05101) and its order of operations are those of PyTorch's fused AdamW.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048  # elements of a program
WARPS = 4
FIELDS = 7  # of a row of the table of tensors: five addresses, the size in elements, the first of its programs
SCALARS = 6


@triton.jit
def step_scalars(
    scalars, step, divisor, bad, learning_rate, WEIGHT_DECAY: tl.constexpr, LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr, HAS_DIVISOR: tl.constexpr, HAS_BAD: tl.constexpr,
):  # fmt: skip
    """What all elements share: 1 unless the step is skipped, 1 / divisor, lr x decay, lr / (1 - b1^t),
    1 / sqrt(1 - b2^t), t."""
    wide_one = tl.full((), 1.0, tl.float64)
    rate = wide_one * tl.load(learning_rate)
    number = tl.load(step).to(tl.float64)
    # In fp64: 1 - 0.999 has four digits in fp32.
    correction1 = wide_one - tl.exp2(number * tl.full((), LOG_BETA1, tl.float64))
    correction2 = wide_one - tl.exp2(number * tl.full((), LOG_BETA2, tl.float64))
    tl.store(scalars, 1.0 - tl.load(bad) if HAS_BAD else 1.0)
    tl.store(scalars + 1, 1.0 / tl.load(divisor) if HAS_DIVISOR else 1.0)
    tl.store(scalars + 2, (rate * tl.full((), WEIGHT_DECAY, tl.float64)).to(tl.float32))
    tl.store(scalars + 3, (rate / correction1).to(tl.float32))
    tl.store(scalars + 4, (wide_one / tl.sqrt(correction2)).to(tl.float32))
    tl.store(scalars + 5, tl.load(step).to(tl.float32))


@triton.jit
def adamw(
    tensors, owners, scalars, beta1, rest1, beta2, rest2, epsilon, GRADIENT: tl.constexpr, VALUE: tl.constexpr,
    MOMENT: tl.constexpr, WEIGHT: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """``tensors`` is the table, ``owners`` the row of each program. ``WEIGHT`` is None where values are the weights.

    ``SPLIT``: the weight is the upper half of the master and the value its lower half, both as int16. ``SHARED`` is the
    number of elements that share a scale of their moments (`eight_bits`); 1 where moments have no scales.
    """
    program = tl.program_id(0)
    if tl.load(scalars) != 0:
        row = tensors + tl.load(owners + program) * FIELDS
        start = (program - tl.load(row + 6)) * BLOCK
        left = tl.load(row + 5) - start
        if left >= BLOCK:  # without a mask, so that a thread moves 16 bytes at a time
            _move(row, start, left, scalars, beta1, rest1, beta2, rest2, epsilon, GRADIENT, VALUE, MOMENT, WEIGHT,
                  SPLIT, SHARED, ALIGNED, True, BLOCK)  # fmt: skip
        else:
            _move(row, start, left, scalars, beta1, rest1, beta2, rest2, epsilon, GRADIENT, VALUE, MOMENT, WEIGHT,
                  SPLIT, SHARED, ALIGNED, False, BLOCK)  # fmt: skip


@triton.jit
def _move(
    row, start, left, scalars, beta1, rest1, beta2, rest2, epsilon, GRADIENT: tl.constexpr, VALUE: tl.constexpr,
    MOMENT: tl.constexpr, WEIGHT: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inverse, decayed = tl.load(scalars + 1), tl.load(scalars + 2)
    rate, root = tl.load(scalars + 3), tl.load(scalars + 4)
    if SHARED == 1:
        place = tl.arange(0, BLOCK)
    else:  # a row for each scale
        place = tl.arange(0, BLOCK // SHARED)[:, None] * SHARED + tl.arange(0, SHARED)[None, :]
    there = place < left
    gradient = address(row, 0, GRADIENT, ALIGNED) + start
    value = address(row, 1, VALUE, ALIGNED) + start
    g = read(gradient, place, there, WHOLE).to(tl.float32) * inverse
    if SHARED == 1:
        first = address(row, 2, MOMENT, ALIGNED) + start
        second = address(row, 3, MOMENT, ALIGNED) + start
        m = read(first, place, there, WHOLE).to(tl.float32)
        v = read(second, place, there, WHOLE).to(tl.float32)
    else:
        m, v = read_moments(row, start, place, there, ALIGNED, WHOLE, BLOCK, SHARED)
    p = read(value, place, there, WHOLE)
    if SPLIT:
        upper = read(address(row, 4, WEIGHT, ALIGNED) + start, place, there, WHOLE)
        p = ((upper.to(tl.int32) << 16) + p.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = p.to(tl.float32)
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    p -= decayed * p
    p -= rate * m / (tl.sqrt(v) * root + epsilon)
    if SHARED == 1:
        write(first, place, there, m.to(MOMENT), WHOLE)
        write(second, place, there, v.to(MOMENT), WHOLE)
    else:
        write_moments(row, start, place, there, m, v, tl.load(scalars + 5), ALIGNED, WHOLE, BLOCK, SHARED)
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        upper = (bits + 32767 + ((bits >> 16) & 1)) >> 16  # to the nearest, of two to the even one
        write(value, place, there, tl.minimum(bits - (upper << 16), 32767).to(tl.int16), WHOLE)
        write(address(row, 4, WEIGHT, ALIGNED) + start, place, there, upper.to(tl.int16), WHOLE)
    else:
        write(value, place, there, p.to(VALUE), WHOLE)
        if WEIGHT is not None:
            write(address(row, 4, WEIGHT, ALIGNED) + start, place, there, p.to(WEIGHT), WHOLE)


# -- blocks of elements, and moments in 8 bits (`eight_bits` says what their codes mean) ------------------


@triton.jit
def address(row, FIELD: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + FIELD).to(tl.pointer_type(TYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def read(pointer, place, there, WHOLE: tl.constexpr):
    if WHOLE:
        values = tl.load(pointer + place)
    else:
        values = tl.load(pointer + place, mask=there, other=0)
    return values


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


# -- Sums of squares of many tensors in one launch, which reads each element once ------------------


NORM_BLOCK = 8192  # elements of a program
NORM_WARPS = 8


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
