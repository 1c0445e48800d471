"""A file out of a stream of bytes: gathered in blocks, each summed and written beside the gathering of the next.

The blocks go past the page cache where the disk allows it (O_DIRECT). Nobody reads a checkpoint soon; in the cache it
would take the place of what training reads, and copying it there costs the processor more time than its checksum.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.training.checkpoint.manifest import Shard

BLOCK_BYTES = 8 * 2**20
BLOCKS = 4  # in memory: one is gathered, the others wait to be summed and written
ALIGNED_BYTES = 4096  # what O_DIRECT asks of a block's place in memory and in the file, and of its length
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every system

Bytes = NDArray[np.uint8]


def write_stream(path: Path, content: Iterable[Bytes]) -> Shard:
    """Writes all of ``content``, each part asked for when its turn comes, and has it on disk at the end."""
    checksum = hashlib.sha256()  # processors have instructions for it: twice as quick as BLAKE2b or more
    size = 0
    under_way: deque[tuple[Future[None], Future[None]]] = deque()
    # Checksum, copying and writing leave Python's lock to each other.
    with _opened(path) as file, ThreadPoolExecutor(1) as summing, ThreadPoolExecutor(1) as writing:
        for array, length in _gathered(content):
            padded = -(-length // ALIGNED_BYTES) * ALIGNED_BYTES  # only of the last one; cut off below
            block = array.data
            under_way.append(
                (summing.submit(checksum.update, block[:length]), writing.submit(write_block, file, block[:padded]))
            )
            size += length
            if len(under_way) == BLOCKS:  # the next one is gathered where the oldest lies
                _wait_for(under_way.popleft())
        while under_way:
            _wait_for(under_way.popleft())
        os.ftruncate(file, size)
        os.fsync(file)
    return Shard(size, checksum.hexdigest())


def write_block(file: int, block: memoryview) -> None:
    """Writes all of a block, through the page cache where the disk does not take it directly."""
    while block:
        try:
            block = block[os.write(file, block) :]
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)


def _gathered(content: Iterable[Bytes]) -> Iterator[tuple[Bytes, int]]:
    """Blocks with the number of bytes in them, full but the last; the same few are filled again and again."""
    blocks: list[Bytes] = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8) for _ in range(BLOCKS)]
    number = filled = 0
    for part in content:
        while len(part):
            taken = part[: BLOCK_BYTES - filled]
            blocks[number][filled : filled + len(taken)] = taken
            filled += len(taken)
            part = part[len(taken) :]
            if filled == BLOCK_BYTES:
                yield blocks[number], filled
                number, filled = (number + 1) % BLOCKS, 0
    if filled:
        yield blocks[number], filled


def _wait_for(pair: tuple[Future[Any], Future[Any]]) -> None:
    for one in pair:
        one.result()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        file = os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, flags, 0o666)
    try:
        yield file
    finally:
        os.close(file)
