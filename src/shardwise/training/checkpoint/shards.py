"""The files of a checkpoint: safetensors, written as one stream with its checksum, read piece by piece.

The format is https://huggingface.co/docs/safetensors: a JSON header and plain numbers. It is written here because the
library computes no checksum while writing and needs all tensors of a file at once. Blocks bypass the page cache where
the disk allows it (O_DIRECT): a checkpoint is not read again soon, would evict training data from the cache, and
copying it there takes more CPU time than its checksum. Files in an object store are read by ranges of bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.run.checkpoint.manifest import Box, Shard
from shardwise.run.storage.place import BlockCache, BlockReader, Place, RemotePlace
from shardwise.run.storage.stores import Content, StoreError
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json

BLOCK_BYTES = 8 * 2**20
BLOCKS = 4  # in memory: one is being filled while the others wait for checksum and disk
ALIGNED_BYTES = 4096  # O_DIRECT: of a block's address in memory, its offset in the file, and its length
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on every system

Bytes = NDArray[np.uint8]
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
CHUNK_BYTES = 8 * 2**20


def write_stream(path: Path, content: Iterable[Bytes]) -> Shard:
    """Writes all of ``content``, each part requested when its turn comes, and syncs it to disk."""
    checksum = hashlib.sha256()  # CPUs have instructions for it: at least twice as fast as BLAKE2b
    size = 0
    in_flight: deque[tuple[Future[None], Future[None]]] = deque()
    # Checksum, copying and writing all release the GIL.
    with _opened(path) as file, ThreadPoolExecutor(1) as summing, ThreadPoolExecutor(1) as writing:
        for array, length in blocks_of(content):
            padded = -(-length // ALIGNED_BYTES) * ALIGNED_BYTES  # more only for the last block; cut off below
            block = array.data
            in_flight.append(
                (summing.submit(checksum.update, block[:length]), writing.submit(write_block, file, block[:padded]))
            )
            size += length
            if len(in_flight) == BLOCKS:  # the next reuses the oldest
                _wait_for(in_flight.popleft())
        while in_flight:
            _wait_for(in_flight.popleft())
        os.ftruncate(file, size)
        os.fsync(file)
    return Shard(size, checksum.hexdigest())


def write_block(file: int, block: memoryview) -> None:
    """Writes all of a block, through the page cache where the disk does not support O_DIRECT."""
    while block:
        try:
            block = block[os.write(file, block) :]
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)


def blocks_of(content: Iterable[Bytes]) -> Iterator[tuple[Bytes, int]]:
    """Blocks, all full but the last, and the number of bytes in each; the same few are reused."""
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
    for future in pair:
        future.result()


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


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def entry_name(key: str, box: Box) -> str:
    """The name under which a box is stored: the tensor's, and the box's first element."""
    return f"{key}@{','.join(map(str, box.start))}"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, as its header lists it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shard(
    path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> Shard:
    """Writes contiguous CPU tensors, each requested when its turn comes, and syncs them to disk."""
    return write_stream(path, shard_content(entries, tensors, metadata))


def shard_content(
    entries: Sequence[Entry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[Bytes]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.size]
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8)
    for entry, tensor in zip(entries, tensors, strict=True):
        assert tensor.is_contiguous() and tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape
        yield tensor.flatten().view(torch.uint8).numpy()


def content_problem(path: Place, wanted: Shard, progress: Callable[[int], None] = lambda size: None) -> str | None:
    """What is wrong with a file; None if it is intact. ``progress`` gets the bytes read.

    Raises StoreError if a store does not deliver it, which says nothing about the file.
    """
    if problem := size_problem(path, wanted):
        return problem
    try:
        checksum = hashlib.sha256()
        chunks: Iterator[Content] = path.blocks() if isinstance(path, RemotePlace) else _chunks(path)
        for chunk in chunks:
            checksum.update(chunk)
            progress(len(chunk))
    except StoreError:
        raise
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if checksum.hexdigest() == wanted.checksum else "is damaged: its checksum differs"


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def size_problem(path: Place, wanted: Shard) -> str | None:
    """What is wrong with a file's existence or size; None if nothing is."""
    try:
        if path.is_symlink() or not path.is_file():
            return "is missing" if not path.is_symlink() else "is a link"
        size = path.stat().st_size
    except StoreError:
        raise
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if size == wanted.size else f"has {size:,} bytes instead of {wanted.size:,}"


def header_problem(path: Place, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """The first entry of a file that is missing or differs in type or shape from the manifest; None if all agree."""
    try:
        file = _opened_shard(path, BlockCache(CACHE_BYTES))
        there = file.names()
        for entry, described in wanted.items():
            if entry not in there:
                return f"has no {entry}"
            if file.described(entry) != described:
                return f"{entry} has another type or shape than the manifest says"
    except StoreError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read ({error})"
    return None


class ShardReader:
    """Slices of the entries of a checkpoint's files, which stay open, and mapped where they are on a disk."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._cache = BlockCache(CACHE_BYTES)
        self._open: dict[str, _MappedFile | _RemoteFile] = {}

    def slice_of(self, file: str, entry: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = _opened_shard(path, self._cache)
            if self._open[file].described(entry)[1] != shape:
                problem = f"{entry} has another shape than the manifest says"
                raise SpecError(str(path), problem, "take another checkpoint")
            return self._open[file].slice_of(entry, index)
        except (SpecError, StoreError):
            raise
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise SpecError(str(path), f"{entry} cannot be read ({error})", "take another checkpoint") from None

    def close(self) -> None:
        self._open.clear()


class _MappedFile:
    """A safetensors file on a disk."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(str(path), "pt")

    def names(self) -> set[str]:
        return set(self._file.keys())

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        stored = self._file.get_slice(name)
        return stored.get_dtype(), tuple(stored.get_shape())

    def slice_of(self, name: str, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._file.get_slice(name)[index] if index else self._file.get_tensor(name)
        return part


# -- files in an object store --------------------------------------------------------------------------


CACHE_BYTES = 16 * BLOCK_BYTES
MOST_HEADER_BYTES = 100 * 2**20  # safetensors' own limit
_LENGTH = struct.Struct("<Q")


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
        """Raises ValueError for an invalid header."""
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

    def names(self) -> set[str]:
        return set(self.entries)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.entries[name].dtype, self.entries[name].shape

    def slice_of(self, name: str, index: tuple[slice, ...]) -> Tensor:
        entry = self.entries[name]
        item = DTYPES[entry.dtype].itemsize
        if not entry.shape or 0 in entry.shape:
            raw, shape, index = self.reader.read(entry.first, entry.last), entry.shape, ()
        else:
            rows, row_bytes = index[0], math.prod(entry.shape[1:]) * item
            raw = self.reader.read(entry.first + rows.start * row_bytes, entry.first + rows.stop * row_bytes)
            shape, index = (rows.stop - rows.start, *entry.shape[1:]), (slice(None), *index[1:])
        flat = torch.from_numpy(np.frombuffer(raw, np.uint8)).view(DTYPES[entry.dtype])
        return flat.reshape(shape)[index]


def _entry(description: Any, begin: int, size: int) -> _StoredEntry:
    first, last = (int(offset) + begin for offset in description["data_offsets"])
    shape = tuple(int(length) for length in description["shape"])
    if not begin <= first <= last <= size or last - first != math.prod(shape) * DTYPES[description["dtype"]].itemsize:
        raise ValueError("an entry does not lie within the file")
    return _StoredEntry(description["dtype"], shape, first, last)


def _opened_shard(path: Place, cache: BlockCache) -> _MappedFile | _RemoteFile:
    return _RemoteFile(path, cache) if isinstance(path, RemotePlace) else _MappedFile(path)
