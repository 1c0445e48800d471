"""A shuffle that needs no memory: a keyed permutation of the whole numbers below n, computed one by one.

A Feistel network over the next even number of bits, walked again for what falls outside (Black and Rogaway 2002,
"Ciphers with arbitrary finite domains"). The state of a shuffle is its key.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

ROUNDS = 6  # four mix well for statistics (Luby and Rackoff 1988); two more cost little
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio in 64 bits (Knuth, multiplicative hashing)
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Permutation:
    """``permutation(indices)``: where each index below ``number`` goes; the same for the same ``key``, everywhere."""

    def __init__(self, number: int, *key: int) -> None:
        assert number >= 1
        self.number = number
        self.half_bits = max(1, ((number - 1).bit_length() + 1) // 2)
        seed = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(seed, "<u8")

    def __call__(self, indices: Numbers) -> Numbers:
        values = np.asarray(indices).astype(np.uint64)
        assert values.size == 0 or int(values.max()) < self.number
        values = self._mixed(values)
        outside = values >= np.uint64(self.number)
        while outside.any():  # at most three of four fall outside: a few rounds
            values[outside] = self._mixed(values[outside])
            outside = values >= np.uint64(self.number)
        return values.astype(np.int64)

    def _mixed(self, values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        bits = np.uint64(self.half_bits)
        low = np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & low
        for key in self.keys:
            mixed = (right ^ key) * _MULTIPLIER  # wraps around, as it should
            mixed ^= mixed >> np.uint64(29)
            mixed *= _MULTIPLIER
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low)
        return (left << bits) | right
