"""Arrays in an object store that read like mapped files: ``array[start:stop]`` fetches the blocks it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from shardwise.run.storage.blocks import BlockCache, BlockReader
from shardwise.run.storage.place import RemotePlace
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json

BLOCK_BYTES = 2**20  # where there are no checksums, which have a length of their own
MOST_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RemoteArray:
    """Numbers of one type, end to end in an object."""

    reader: BlockReader
    dtype: Any

    def __len__(self) -> int:
        return self.reader.size // int(np.dtype(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        return self.reader.size

    def __getitem__(self, index: slice) -> np.ndarray[Any, np.dtype[Any]]:
        first, last, _ = index.indices(len(self))
        item = int(np.dtype(self.dtype).itemsize)
        return np.frombuffer(self.reader.read(first * item, last * item), self.dtype)


@cache
def cache_of(limit_bytes: float) -> BlockCache:
    """One for all arrays of this process."""
    return BlockCache(limit_bytes)


def remote_array(place: RemotePlace, size: int, dtype: Any, sums: RemoteSums, limit_bytes: float) -> RemoteArray:
    """An object of ``size`` bytes as an array; every block is compared with its checksum, if there are any."""
    suffix = f".{place.name.rpartition('.')[2]}"
    block_bytes, own = sums.block_bytes, sums.files.get(suffix)
    if own is not None and len(own) != -(-size // block_bytes):
        raise SpecError(str(place), f"has {size:,} bytes, its checksums are of another size", "copy it again")
    limit = max(limit_bytes, 2 * block_bytes)
    return RemoteArray(BlockReader(place, size, block_bytes, cache_of(limit), own), dtype)


@dataclass(frozen=True)
class RemoteSums:
    """The checksums of a pair's files, by suffix, of every block of ``block_bytes``."""

    block_bytes: int
    files: Mapping[str, Sequence[str]]


def remote_sums(sidecar: RemotePlace) -> RemoteSums:
    """From the file beside a pair; none if there is no such file."""
    try:
        document = parse_json(sidecar.read_bytes(), str(sidecar), most_values=IN_BULK)
        block_bytes, files = (
            int(document["chunk_bytes"]),
            {str(suffix): list(of) for suffix, of in document["files"].items()},
        )
    except FileNotFoundError:
        return RemoteSums(BLOCK_BYTES, {})
    except (KeyError, ValueError, TypeError, AttributeError):
        raise SpecError(str(sidecar), "holds no checksums", "copy all files of the pair again") from None
    if not 0 < block_bytes <= MOST_BLOCK_BYTES:
        raise SpecError(str(sidecar), f"has blocks of {block_bytes:,} bytes", "copy all files of the pair again")
    return RemoteSums(block_bytes, files)
