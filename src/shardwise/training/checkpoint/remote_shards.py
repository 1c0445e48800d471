"""Files of a checkpoint in an object store: headers and slices, by ranges of bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.run.storage.blocks import BlockCache, BlockReader
from shardwise.run.storage.place import RemotePlace
from shardwise.run.storage.stores import StoreError
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json

BLOCK_BYTES = 8 * 2**20
CACHE_BYTES = 16 * BLOCK_BYTES
MOST_HEADER_BYTES = 100 * 2**20  # safetensors' own limit
_LENGTH = struct.Struct("<Q")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _StoredEntry:
    dtype: str
    shape: tuple[int, ...]
    first: int  # byte of the file
    last: int


class _RemoteFile:
    """A safetensors file (https://huggingface.co/docs/safetensors) in a store."""

    def __init__(self, place: RemotePlace, cache: BlockCache) -> None:
        self.place = place
        self.reader = BlockReader(place, place.stat().st_size, BLOCK_BYTES, cache)

    @cached_property
    def entries(self) -> dict[str, _StoredEntry]:
        """Raises ValueError for a header that is not one."""
        (length,) = _LENGTH.unpack(bytes(self.reader.read(0, _LENGTH.size)).ljust(_LENGTH.size, b"\xff"))
        begin = _LENGTH.size + length
        if length > MOST_HEADER_BYTES or begin > self.reader.size:
            raise ValueError("its header is longer than the file")
        header = parse_json(bytes(self.reader.read(_LENGTH.size, begin)), "header", most_values=IN_BULK)
        return {
            name: _entry(description, begin, self.reader.size)
            for name, description in header.items()
            if name != "__metadata__"
        }

    def slice_of(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Reads the rows that the slice touches."""
        entry = self.entries[name]
        item = _DTYPES[entry.dtype].itemsize
        if not entry.shape or 0 in entry.shape:
            raw, shape, index = self.reader.read(entry.first, entry.last), entry.shape, ()
        else:
            rows, row_bytes = index[0], math.prod(entry.shape[1:]) * item
            raw = self.reader.read(entry.first + rows.start * row_bytes, entry.first + rows.stop * row_bytes)
            shape, index = (rows.stop - rows.start, *entry.shape[1:]), (slice(None), *index[1:])
        flat = torch.from_numpy(np.frombuffer(raw, np.uint8)).view(_DTYPES[entry.dtype])
        return flat.reshape(shape)[index]


def _entry(description: Any, begin: int, size: int) -> _StoredEntry:
    first, last = (int(offset) + begin for offset in description["data_offsets"])
    shape = tuple(int(length) for length in description["shape"])
    if not begin <= first <= last <= size or last - first != math.prod(shape) * _DTYPES[description["dtype"]].itemsize:
        raise ValueError("an entry does not lie within the file")
    return _StoredEntry(description["dtype"], shape, first, last)


def remote_header_problem(place: RemotePlace, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """As `shards.header_problem`."""
    try:
        there = _RemoteFile(place, BlockCache(CACHE_BYTES)).entries
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read ({error})"
    for entry, (dtype, shape) in wanted.items():
        stored = there.get(entry)
        if stored is None:
            return f"has no {entry}"
        if (stored.dtype, stored.shape) != (dtype, shape):
            return f"{entry} has another type or shape than the manifest says"
    return None


class RemoteShardReader:
    """As `shards.ShardReader`: slices of the entries of a checkpoint's files."""

    def __init__(self, folder: RemotePlace) -> None:
        self.folder = folder
        self._cache = BlockCache(CACHE_BYTES)
        self._open: dict[str, _RemoteFile] = {}

    def slice_of(self, file: str, entry: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        place = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = _RemoteFile(place, self._cache)
            if self._open[file].entries[entry].shape != shape:
                problem = f"{entry} has another shape than the manifest says"
                raise SpecError(str(place), problem, "take another checkpoint")
            return self._open[file].slice_of(entry, index)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, (SpecError, StoreError)):
                raise
            raise SpecError(str(place), f"{entry} cannot be read ({error})", "take another checkpoint") from None

    def close(self) -> None:
        self._open.clear()
