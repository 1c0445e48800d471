"""AdamW of many tensors in one launch: each element of gradient, value and moments is read and written once.

The formula (Loshchilov and Hutter, arXiv 1711.05101) and its order of operations are those of PyTorch's fused AdamW.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwise.engine.optim.moments_kernel import address, read, read_moments, write, write_moments

BLOCK = 2048  # elements of a program
WARPS = 4
FIELDS = 7  # of a row of the table of tensors: five addresses, the size in elements, the first of its programs
SCALARS = 6


@triton.jit
def step_scalars(
    scalars, step, divisor, bad, learning_rate, WEIGHT_DECAY: tl.constexpr, LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr, HAS_DIVISOR: tl.constexpr, HAS_BAD: tl.constexpr,
):  # fmt: skip
    """What all elements share: whether they move, 1 / divisor, lr x decay, lr / (1 - b1^t), 1 / sqrt(1 - b2^t), t."""
    one = tl.full((), 1.0, tl.float64)
    rate = one * tl.load(learning_rate)
    number = tl.load(step).to(tl.float64)
    # In fp64: 1 - 0.999 has four digits in fp32.
    correction1 = one - tl.exp2(number * tl.full((), LOG_BETA1, tl.float64))
    correction2 = one - tl.exp2(number * tl.full((), LOG_BETA2, tl.float64))
    tl.store(scalars, 1.0 - tl.load(bad) if HAS_BAD else 1.0)
    tl.store(scalars + 1, 1.0 / tl.load(divisor) if HAS_DIVISOR else 1.0)
    tl.store(scalars + 2, (rate * tl.full((), WEIGHT_DECAY, tl.float64)).to(tl.float32))
    tl.store(scalars + 3, (rate / correction1).to(tl.float32))
    tl.store(scalars + 4, (one / tl.sqrt(correction2)).to(tl.float32))
    tl.store(scalars + 5, tl.load(step).to(tl.float32))


@triton.jit
def adamw(
    tensors, owners, scalars, beta1, rest1, beta2, rest2, epsilon, GRADIENT: tl.constexpr, VALUE: tl.constexpr,
    MOMENT: tl.constexpr, WEIGHT: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """``tensors`` is the table, ``owners`` the row of each program. ``WEIGHT`` is None where values are the weights.

    ``SPLIT``: the weight is the upper half of the master, the value the rest of it, both as int16. ``SHARED`` elements
    have a scale of their moments (`eight_bits`); 1 where they are as they are.
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
