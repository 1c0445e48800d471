"""The models' Triton kernels; each takes one pass over memory.

`read` and `write` move the numbers of a block, in fp32 and in the format of their tensor. A block that is ``WHOLE``
needs no mask, so that a thread moves 16 bytes at a time.
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


# -- The backward pass of an RMS norm, together with the gradient of the path around it ------------
# y = x · w / rms(x), so with n = x / rms(x) and g = dy · w: dx = (g − n · mean(g · n)) / rms(x), dw = Σ dy · n
# (Zhang and Sennrich, arXiv 1910.07467). A program takes every so many rows, and sums its part of dw as it goes.


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


# -- The backward pass of SwiGLU (arXiv 2002.05202), which makes its output again on the way -------


GATED_BLOCK = 2048  # elements of a program
GATED_WARPS = 4


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


# -- Sums of the rows of a matrix that belong to the same token, in an order that never changes ----


ROWS, FEATURES = 8, 1024  # that a program reads at a time: a token that is a fifth of a text has thousands of rows
ROW_WARPS = 4


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


# -- Softmax, cross-entropy and its gradient: 16-bit logits are overwritten by their gradient ------
# Sums run along the row as it is read (online softmax, Milakov and Gimelshein, arXiv 1805.02867); all arithmetic is
# fp32.


LOGITS_BLOCK = 4096  # logits of a token that a program reads at a time
LOGITS_WARPS = 8


@triton.jit
def whole(
    logits, labels, factors, lost, stride, columns, softcap, CAPPED: tl.constexpr, DIFFERENTIATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The cross-entropy of each token times its factor; logits are replaced by their gradient."""
    token = tl.program_id(0).to(tl.int64)
    row, label, factor = logits + token * stride, tl.load(labels + token), tl.load(factors + token)
    right = _capped(tl.load(row + label).to(tl.float32), softcap, CAPPED)  # before it is written over
    largest, total = _summed(row, columns, softcap, CAPPED, BLOCK)
    tl.store(lost + token, (tl.log(total) + largest - right) * factor)
    if DIFFERENTIATED:
        _differentiate(row, label, largest, factor / total, factor, columns, columns, softcap, CAPPED, BLOCK)


@triton.jit
def statistics(logits, labels, sums, tokens, stride, present, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Of each token: the largest logit, the sum of exponentials relative to it, the label's logit (0: label is -1)."""
    token = tl.program_id(0).to(tl.int64)
    row, label = logits + token * stride, tl.load(labels + token)
    right = _capped(tl.load(row + label, mask=label >= 0, other=0.0).to(tl.float32), softcap, CAPPED)
    largest, total = _summed(row, present, softcap, CAPPED, BLOCK)
    tl.store(sums + token, largest)
    tl.store(sums + tokens + token, total)
    tl.store(sums + 2 * tokens + token, tl.where(label >= 0, right, 0.0))


@triton.jit
def differentiate(
    logits, labels, factors, largest, total, stride, present, columns, softcap, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces logits by their gradient, from the largest logit and the sum of exponentials relative to it."""
    token = tl.program_id(0).to(tl.int64)
    row, label, factor = logits + token * stride, tl.load(labels + token), tl.load(factors + token)
    highest, share = tl.load(largest + token), factor / tl.load(total + token)
    _differentiate(row, label, highest, share, factor, present, columns, softcap, CAPPED, BLOCK)


@triton.jit
def _summed(row, present, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    largest = tl.full((), -3.0e38, tl.float32)  # finite: a rank may have no column at all
    total = tl.full((), 0.0, tl.float32)
    column = tl.arange(0, BLOCK)
    whole_blocks = present // BLOCK * BLOCK
    for start in range(0, whole_blocks, BLOCK):  # without a mask, so that a thread reads 16 bytes at a time
        values = _capped(tl.load(row + start + column).to(tl.float32), softcap, CAPPED)
        larger = tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), axis=0)
        largest = larger
    if whole_blocks < present:
        there = whole_blocks + column < present
        values = tl.load(row + whole_blocks + column, mask=there, other=0.0).to(tl.float32)
        values = tl.where(there, _capped(values, softcap, CAPPED), -float("inf"))
        larger = tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), axis=0)
        largest = larger
    return largest, total


@triton.jit
def _differentiate(
    row, label, largest, share, factor, present, columns, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    whole_blocks = present // BLOCK * BLOCK
    for start in range(0, whole_blocks, BLOCK):
        values = _capped(tl.load(row + start + column).to(tl.float32), softcap, CAPPED)
        gradient = _gradient(values, start + column == label, largest, share, factor, softcap, CAPPED)
        tl.store(row + start + column, gradient.to(row.dtype.element_ty))
    for start in range(whole_blocks, columns, BLOCK):
        there = start + column < present
        values = _capped(tl.load(row + start + column, mask=there, other=0.0).to(tl.float32), softcap, CAPPED)
        gradient = _gradient(values, start + column == label, largest, share, factor, softcap, CAPPED)
        gradient = tl.where(there, gradient, 0.0).to(row.dtype.element_ty)
        tl.store(row + start + column, gradient, mask=start + column < columns)


@triton.jit
def _gradient(values, is_label, largest, share, factor, softcap, CAPPED: tl.constexpr):
    """The probability, less one at the label, times the factor."""
    gradient = tl.exp(values - largest) * share - tl.where(is_label, factor, 0.0)
    if CAPPED:
        gradient *= 1.0 - (values / softcap) * (values / softcap)
    return gradient


@triton.jit
def _capped(logit, softcap, CAPPED: tl.constexpr):
    if CAPPED:  # softcap x tanh(logit / softcap)
        logit = softcap * (2.0 * tl.sigmoid(2.0 * logit / softcap) - 1.0)
    return logit


@triton.jit
def scaled(tensor, factor, result, elements, BLOCK: tl.constexpr):
    """The product with a number in the format of the result."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    there = place < elements - start
    values = tl.load(tensor + start + place, mask=there, other=0.0) * tl.load(factor)
    tl.store(result + start + place, values.to(result.dtype.element_ty), mask=there)


# -- Weights made of codes and scales (see `weight_formats`), in the arithmetic of its `decode` ----

INT8_BLOCK = 2048  # elements of a row
NF4_SCALES = 64  # of a program, each for 64 elements


@triton.jit
def made_of_bytes(
    codes, scales, result, rows, columns, tiles, scale_columns, STEP: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile with one scale. ``tiles``: rows of them in a matrix; ``STEP``: scales from a tile to the next in a row."""
    tile = tl.program_id(0)
    row = tile % tiles * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = ((tile // tiles).to(tl.int64) * rows + row)[:, None] * columns + column[None, :]
    scale = tl.load(scales + tile.to(tl.int64) * scale_columns + tl.program_id(1) * STEP)
    values = tl.load(codes + place, mask=inside).to(tl.float32) * scale
    tl.store(result + place, values.to(result.dtype.element_ty), mask=inside)


@triton.jit
def made_of_nf4(
    codes, scales, result, code, scale_code, nested, offset, count, rows, width, across, first_row, first_column,
    groups, DOUBLE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """``count`` blocks of 64, ``width`` of them in a row here and ``across`` in one of the whole matrix."""
    place = tl.program_id(0) * SCALES + tl.arange(0, SCALES)
    there = place < count
    if DOUBLE:
        row = place // width
        whole_row = (first_row + row % rows).to(tl.int64)
        group = row // rows * groups + (whole_row * across + first_column + place % width) // 256
        narrow = tl.load(scales + place, mask=there, other=0).to(tl.int32)
        around = tl.load(offset + row // rows, mask=there, other=0.0)
        scale = tl.load(scale_code + narrow) * tl.load(nested + group, mask=there, other=0.0) + around
    else:
        scale = tl.load(scales + place, mask=there, other=0.0)
    block = place.to(tl.int64)[:, None]
    pairs = tl.load(codes + block * 32 + tl.arange(0, 32)[None, :], mask=there[:, None], other=0).to(tl.int32)
    apart = tl.join(tl.load(code + (pairs >> 4)), tl.load(code + (pairs & 15)))
    values = tl.reshape(apart, (SCALES, 64)) * scale[:, None]
    to = result + block * 64 + tl.arange(0, 64)[None, :]
    tl.store(to, values.to(result.dtype.element_ty), mask=there[:, None])


# -- Dropout of the inputs of adapters: `models.dropout.dropped` -----------------------------------


DROPPED_FEATURES = 1024  # that a program handles


@triton.jit
def mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def drop(inputs, keys, left, features, first_feature, bound, kept, FEATURES: tl.constexpr):
    column = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = column < features
    key = tl.load(keys + tl.program_id(0)).to(tl.uint32, bitcast=True)
    bits = mixed(key + (column + first_feature).to(tl.uint32) * 0x9E3779B9) & 0x7FFFFFFF
    place = tl.program_id(0).to(tl.int64) * features + column
    values = tl.load(inputs + place, mask=inside, other=0.0).to(tl.float32) / kept
    values = tl.where(bits >= bound, values, 0.0)
    tl.store(left + place, values.to(left.dtype.element_ty), mask=inside)
