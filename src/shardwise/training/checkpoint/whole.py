"""FullTensor tensors of a checkpoint, read one by one; a checkpoint of whole tensors; the same state in other files."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.interop.companions import has_companions, keep_companions
from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes
from shardwise.training.checkpoint.boxes import Box
from shardwise.training.checkpoint.folder import CheckpointFolder, kept_companions
from shardwise.training.checkpoint.load import problems_of
from shardwise.training.checkpoint.manifest import FullTensor, Manifest, SavedPiece, Shard, read_manifest, weight_keys
from shardwise.training.checkpoint.shards import NAMES, Entry, ShardReader, shard_name, write_shard

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_ATTEMPT = "whole"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file: its shape and type are known, its numbers are read by ``read``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def full_tensors(folder: Path, manifest: Manifest, keys: Sequence[str]) -> dict[str, LazyTensor]:
    """Tensors of a checkpoint whatever pieces they were saved in; a piece is read from a mapped file."""
    reader = ShardReader(folder)

    def lazily(whole: FullTensor, key: str) -> LazyTensor:
        return LazyTensor(whole.shape, _DTYPES[whole.dtype], lambda: _joined(whole, key, reader))

    return {key: lazily(manifest.tensors[key], key) for key in keys}


def _joined(whole: FullTensor, key: str, reader: ShardReader) -> Tensor:
    tensor = torch.empty(whole.shape, dtype=_DTYPES[whole.dtype])
    found = 0
    for piece in whole.pieces:
        everything = tuple(slice(0, size) for size in piece.box.shape)
        part = reader.slice_of(piece.file, piece.entry, piece.box.shape, everything)
        tensor[piece.box.inside(Box((0,) * len(whole.shape), whole.shape))] = part
        found += piece.box.elements
    if found != tensor.numel():
        raise SpecError(str(reader.folder), f"lacks a part of {key}", "take another checkpoint")
    return tensor


@dataclass(frozen=True)
class Described:
    """What a checkpoint says beside its tensors."""

    step: int
    job: dict[str, Any]
    numbers: dict[str, Any]


def write_checkpoint(
    folder: CheckpointFolder,
    about: Described,
    tensors: Mapping[str, LazyTensor],
    shards: int,
    progress: Callable[[int], None] = lambda size: None,
) -> Path:
    """Writes a checkpoint of whole tensors in ``shards`` files of about equal size, one tensor in memory at a time.

    Raises SpecError, and leaves nothing behind, where there is one of that step, no space, or no right to write.
    """
    if shards > len(tensors):
        raise SpecError("--shards", f"{shards} files for {len(tensors)} tensors", "use fewer: a tensor stays whole")
    if folder.of_step(about.step).exists():
        raise SpecError(str(folder.of_step(about.step)), "is already there", "name another folder")
    require_space(folder.path, sum(one.size for one in tensors.values()))
    with folder.locked():
        folder.clear_unfinished()  # of an earlier try that was killed
        part = folder.unfinished(about.step, _ATTEMPT)
        try:
            part.mkdir()
            manifest = _write_files(part, about, tensors, _shared_out(tensors, shards), progress)
            return folder.commit_new(about.step, _ATTEMPT, manifest.to_bytes())
        except OSError as error:
            raise SpecError(str(folder.path), f"cannot be written ({error.strerror})", "free space there") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)


def require_space(folder: Path, needed: int) -> None:
    """Raises SpecError if a disk has less than that many bytes left."""
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        problem = f"has {readable_bytes(free)} left, and {readable_bytes(needed)} are to be written"
        raise SpecError(str(existing), problem, "free space, or choose another disk")


def _shared_out(tensors: Mapping[str, LazyTensor], shards: int) -> list[list[str]]:
    """The largest first, each to the file with the least; within a file in the order they were given."""
    files: list[list[str]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    for key in sorted(tensors, key=lambda one: -tensors[one].size):
        smallest = min(range(shards), key=lambda one: (sizes[one], len(files[one])))
        files[smallest].append(key)
        sizes[smallest] += tensors[key].size
    order = {key: number for number, key in enumerate(tensors)}
    return [sorted(keys, key=order.__getitem__) for keys in files]


def _write_files(
    part: Path,
    about: Described,
    tensors: Mapping[str, LazyTensor],
    files: Sequence[Sequence[str]],
    progress: Callable[[int], None],
) -> Manifest:
    written: dict[str, Shard] = {}
    wholes: dict[str, FullTensor] = {}
    for number, keys in enumerate(files):
        name = shard_name(number)
        entries = []
        for key in keys:
            one = tensors[key]
            start = (0,) * len(one.shape)
            entries.append(Entry(f"{key}@{','.join(map(str, start))}", one.dtype, one.shape))
            piece = SavedPiece(name, entries[-1].name, Box(start, one.shape))
            wholes[key] = FullTensor(one.shape, NAMES[one.dtype], (piece,))
        written[name] = write_shard(part / name, entries, read_in_turn([tensors[key] for key in keys], progress))
    ordered = {key: wholes[key] for key in tensors}
    return Manifest(about.step, about.job, about.numbers, ordered, written)


def read_in_turn(tensors: Sequence[LazyTensor], progress: Callable[[int], None]) -> Iterator[Tensor]:
    """Each tensor when the one before it is done with."""
    for one in tensors:
        yield one.read().contiguous()
        progress(one.size)


# -- reshard ---------------------------------------------------------------------------------------
#
# The same state in another number of files.


def reshard(
    source: Path,
    out: CheckpointFolder,
    shards: int,
    *,
    weights_only: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> Path:
    """Writes the checkpoint's state as whole tensors into ``shards`` files.

    With ``weights_only`` a run can start from it, but none can resume. Raises SpecError for a damaged
    source before anything is written.
    """
    for problem in problems_of(source):
        raise SpecError("", problem, "take another checkpoint")
    manifest = read_manifest(source)
    keys = weight_keys(manifest) if weights_only else list(manifest.tensors)
    about = Described(manifest.step, manifest.job, {} if weights_only else manifest.numbers)
    made = write_checkpoint(out, about, full_tensors(source, manifest, keys), shards, progress)
    if has_companions(kept_companions(source)):
        keep_companions(kept_companions(source), out.path)
    return made
