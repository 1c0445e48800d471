"""The files of a checkpoint: safetensors, written by one stream with its checksum, read piece by piece.

The format is https://huggingface.co/docs/safetensors: a JSON header and plain numbers; written here because the
library writes no checksum on the way and asks for all tensors of a file at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.manifest import Shard
from shardwise.training.checkpoint.stream import Bytes, write_stream

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
CHUNK_BYTES = 8 * 2**20


def shard_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, announced in its header before it is at hand."""

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
    """Writes contiguous tensors in CPU memory, each asked for when its turn comes, and has them on disk at the end."""
    return write_stream(path, _content(entries, tensors, metadata))


def _content(
    entries: Sequence[Entry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None
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


def checked(path: Path, wanted: Shard, progress: Callable[[int], None] = lambda size: None) -> str | None:
    """What is wrong with a file; None if it is as it was written. ``progress`` hears of the bytes that were read."""
    if problem := shortened(path, wanted):
        return problem
    try:
        checksum = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                checksum.update(chunk)
                progress(len(chunk))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if checksum.hexdigest() == wanted.checksum else "is damaged: its checksum differs"


def shortened(path: Path, wanted: Shard) -> str | None:
    """What is wrong with a file by its length; None if that is right."""
    try:
        if path.is_symlink() or not path.is_file():
            return "is missing" if not path.is_symlink() else "is a link"
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if size == wanted.size else f"has {size:,} bytes instead of {wanted.size:,}"


def mislabelled(path: Path, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """What in a file, whatever its checksum, is not of the type and shape that the manifest says; reads its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            there = set(file.keys())
            for entry, (dtype, shape) in wanted.items():
                if entry not in there:
                    return f"has no {entry}"
                found = file.get_slice(entry)
                if (found.get_dtype(), tuple(found.get_shape())) != (dtype, shape):
                    return f"{entry} has another type or shape than the manifest says"
    except (SafetensorError, OSError) as error:
        return f"cannot be read ({error})"
    return None


class ShardReader:
    """Slices of the entries of a checkpoint's files, which stay mapped while this is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}

    def slice_of(self, file: str, entry: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(path), "pt")
            found = self._open[file].get_slice(entry)
            if tuple(found.get_shape()) != shape:
                raise SpecError(
                    str(path), f"{entry} has another shape than the manifest says", "take another checkpoint"
                )
            if not shape:
                whole: Tensor = self._open[file].get_tensor(entry)
                return whole
            part: Tensor = found[index]
            return part
        except (SafetensorError, OSError) as error:
            raise SpecError(str(path), f"{entry} cannot be read ({error})", "take another checkpoint") from None

    def close(self) -> None:
        self._open.clear()
