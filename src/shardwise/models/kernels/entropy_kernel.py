"""Softmax, cross-entropy and its gradient in one launch: 16-bit logits are read, and overwritten by their gradient.

Sums run along the row as it is read (online softmax, Milakov and Gimelshein, arXiv 1805.02867); all arithmetic is fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # logits of a token that a program reads at a time
WARPS = 8


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
