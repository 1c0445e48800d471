"""Dropout of the inputs of adapters, which every layout draws alike.

A generator would draw other numbers wherever ranks hold other tokens. Here what is dropped follows from the token, the
linear layer and the feature by a hash, so that the backward pass draws it again instead of keeping it, and recompute
needs no state.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models import kernels


def mixed(bits: Tensor) -> Tensor:
    """A hash of each int32: Wellons' lowbias32 (https://github.com/skeeto/hash-prospector)."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def keys_of_tokens(seed: int, step: Tensor | int, rows: range, of_rows: int, seq: int, device: torch.device) -> Tensor:
    """A random int32 of each token [rows, seq]: of some ``rows`` of a step's global batch, which has ``of_rows``."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None] + step * of_rows
    number = row * seq + torch.arange(seq, device=device)
    return mixed(number.int() ^ mixed((number >> 32).int() ^ _signed(seed & 0xFFFFFFFF)))


def keys_in_layer(keys: Tensor, layer: int) -> Tensor:
    """The keys of tokens in one layer. Linear layers add their salts, so that equal layers share a compiled graph."""
    return mixed(keys ^ salt_of(f"layers.{layer}"))


def salt_of(name: str) -> int:
    return _signed(zlib.crc32(name.encode()))


class TokenKeys:
    """Where the adapters of a layer find the keys of the tokens in its current pass; None: nothing is dropped."""

    now: Tensor | None = None


@dataclass
class InputDropout:
    """What an adapter drops of its inputs, of which a rank may hold some features, or its part of the sequence."""

    share: float
    salt: int  # of the linear layer, the same in every layer
    tokens: TokenKeys
    first_feature: int = 0
    part: tuple[int, int] = (0, 1)  # of the sequence, and of how many; for layers that see no more

    def narrow(self, inputs: Tensor, matrix: Tensor) -> Tensor | None:
        """What is left of the ``inputs`` [batch, seq, features] times a narrow matrix; None: nothing is dropped."""
        keys = self.tokens.now
        if keys is None:
            return None
        if inputs.shape[1] < keys.shape[1]:
            number, parts = self.part
            keys = torch.unflatten(keys, 1, (parts, -1))[:, number]
        own = mixed(keys ^ self.salt)
        narrow: Tensor = _NarrowOfDropped.apply(inputs, matrix, own, self.first_feature, self.share)  # type: ignore[no-untyped-call]
        return narrow


class _NarrowOfDropped(torch.autograd.Function):
    """Of the inputs, which others keep too, nothing else is kept; autograd would keep what is left and a mask."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        inputs, matrix, keys, first_feature, share = given  # one parameter: see `models.mlp._Projected`
        ctx.save_for_backward(inputs, matrix, keys)
        ctx.drawn = first_feature, share
        return F.linear(dropped(inputs, keys, *ctx.drawn), matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, matrix, keys = ctx.saved_tensors
        of_inputs = dropped(gradient @ matrix, keys, *ctx.drawn, again=True) if ctx.needs_input_grad[0] else None
        of_matrix = None
        if ctx.needs_input_grad[1]:
            of_matrix = gradient.flatten(0, -2).T @ dropped(inputs, keys, *ctx.drawn, again=True).flatten(0, -2)
        return of_inputs, of_matrix, None, None, None


GOLDEN = 0x9E3779B9 - 2**32  # 2^32 over the golden ratio: keeps features apart (Knuth, volume 3, section 6.4)


def dropped(inputs: Tensor, keys: Tensor, first_feature: int, share: float, *, again: bool = False) -> Tensor:
    """``inputs`` [..., features] without a ``share`` of them, the rest scaled so that the mean stays.

    ``again``: the same, in words that the compiler does not take for the same. It would keep what the first time gave.
    """
    if kernels.run_on(inputs.device) and not torch.compiler.is_compiling():
        return _by_kernel(inputs.contiguous(), keys.contiguous(), first_feature, share)
    features = torch.arange(inputs.shape[-1], device=inputs.device, dtype=torch.int32) + first_feature
    tokens, columns = keys[..., None], features * GOLDEN
    bits = mixed(columns + tokens if again else tokens + columns) & 0x7FFFFFFF
    return torch.where(bits >= _bound(share), inputs, 0.0) / (1 - share)


def _by_kernel(inputs: Tensor, keys: Tensor, first_feature: int, share: float) -> Tensor:
    from shardwise.models.triton_kernels import DROPPED_FEATURES, drop

    left, features = torch.empty_like(inputs), inputs.shape[-1]
    grid = (keys.numel(), -(-features // DROPPED_FEATURES))
    drop[grid](inputs, keys, left, features, first_feature, _bound(share), 1 - share, DROPPED_FEATURES)
    return left


def _bound(share: float) -> int:
    return int(share * 2**31)


def _signed(bits: int) -> int:
    """The int32 of 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits
