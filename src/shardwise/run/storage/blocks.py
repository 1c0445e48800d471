"""Ranges of an object, read in whole blocks; a cache of a bounded number of bytes keeps those used last.

Blocks that have a checksum are compared with it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shardwise.run.storage.place import AHEAD, RemotePlace
from shardwise.run.storage.stores import Content, fresh_bytes
from shardwise.spec.errors import SpecError


def block_sum(content: Content) -> str:
    """The checksum of a block of data; CPUs without instructions for SHA-256 compute this one as fast."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class BlockCache:
    """Blocks of any objects, by object and number; the one used longest ago goes first."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._blocks: OrderedDict[tuple[str, int], Content] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> Content | None:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def keep(self, key: tuple[str, int], block: Content) -> None:
        with self._lock:
            if key in self._blocks or len(block) > self.limit_bytes:
                return
            self._blocks[key] = block
            self.held_bytes += len(block)
            while self.held_bytes > self.limit_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self.held_bytes -= len(oldest)


class BlockReader:
    """``read(first, last)`` of one object of ``size`` bytes; ``sums`` are the checksums of its blocks, if known."""

    def __init__(
        self, place: RemotePlace, size: int, block_bytes: int, cache: BlockCache, sums: Sequence[str] | None = None
    ) -> None:
        self.place, self.size, self.block_bytes, self.cache, self.sums = place, size, block_bytes, cache, sums

    def read(self, first: int, last: int) -> memoryview:
        """Blocks that are not in the cache are requested at the same time; the answer is the caller's own."""
        last = min(last, self.size)
        if first >= last:
            return memoryview(b"")
        numbers = range(first // self.block_bytes, (last - 1) // self.block_bytes + 1)
        if len(numbers) == 1:
            blocks = [self._block(numbers[0])]
        else:
            with ThreadPoolExecutor(min(AHEAD, len(numbers))) as threads:
                blocks = list(threads.map(self._block, numbers))
        content, at = fresh_bytes(last - first), 0
        for number, block in zip(numbers, blocks):
            part = memoryview(block)[max(0, first - number * self.block_bytes) : last - number * self.block_bytes]
            content[at : at + len(part)] = part
            at += len(part)
        return content

    def _block(self, number: int) -> Content:
        key = (str(self.place), number)
        block = self.cache.get(key)
        if block is None:
            block = self._checked(number)
            self.cache.keep(key, block)
        return block

    def _checked(self, number: int) -> Content:
        """Asks once more for a block that differs from its checksum: it may have been damaged on the way."""
        first = number * self.block_bytes
        for _ in range(2):
            block = self.place.read_range(first, min(first + self.block_bytes, self.size))
            if self.sums is None or block_sum(block) == self.sums[number]:
                return block
        raise SpecError(str(self.place), f"is damaged near byte {first:,}", "copy or build it again")
