"""The full tensors of a checkpoint, read one by one, and checkpoints written from full tensors."""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardwise.interop.companions import has_companions
from shardwise.run.checkpoint.folder import CheckpointFolder, kept_companions
from shardwise.run.checkpoint.manifest import BASE, Box, FullTensor, Manifest, SavedPiece, Shard, weight_keys
from shardwise.run.storage.place import Place
from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes
from shardwise.training.checkpoint.load import require_intact
from shardwise.training.checkpoint.save import Draft, draft_of
from shardwise.training.checkpoint.shards import DTYPES, NAMES, Entry, ShardReader, entry_name


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose shape and type are known, and whose numbers ``read`` loads."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def full_tensors(folder: Place, manifest: Manifest, keys: Sequence[str]) -> dict[str, LazyTensor]:
    """Tensors of a checkpoint, however they were split; pieces are read from mapped files."""
    reader = ShardReader(folder)

    def lazily(full: FullTensor) -> LazyTensor:
        return LazyTensor(full.shape, DTYPES[full.dtype], lambda: _assembled(full, reader))

    return {key: lazily(manifest.tensors[key]) for key in keys}


def _assembled(full: FullTensor, reader: ShardReader) -> Tensor:
    """A tensor from its pieces, which fill it: `read_manifest` has checked that."""
    tensor = torch.empty(full.shape, dtype=DTYPES[full.dtype])
    for piece in full.pieces:
        everything = tuple(slice(0, size) for size in piece.box.shape)
        part = reader.slice_of(piece.file, piece.entry, piece.box.shape, everything)
        tensor[piece.box.inside(Box((0,) * len(full.shape), full.shape))] = part
    return tensor


def write_checkpoint(
    folder: CheckpointFolder,
    about: Manifest,
    tensors: Mapping[str, LazyTensor],
    shards: int,
    progress: Callable[[int], None] = lambda size: None,
) -> Place:
    """Writes a checkpoint of full tensors into ``shards`` files of similar size, with one tensor in memory at a time.

    Step, job and numbers are those of ``about``. Raises SpecError, and leaves nothing behind, if that step already has
    a checkpoint, or the folder cannot be written.
    """
    if shards > len(tensors):
        raise SpecError("⟨shards⟩", f"{shards} files for {len(tensors)} tensors", "use fewer: a tensor stays whole")
    if folder.of_step(about.step).exists():
        raise SpecError(str(folder.of_step(about.step)), "is already there", "name another folder")
    if isinstance(folder.path, Path):
        require_space(folder.path, sum(tensor.size for tensor in tensors.values()))
    with folder.locked():
        folder.clear_unfinished()  # of an earlier attempt that was killed
        draft = draft_of(folder, about.step, f"{secrets.token_hex(4)}-1")
        try:
            manifest = _write_files(draft, about, tensors, _balanced(tensors, shards), progress)
            return draft.commit(manifest, replace=False)
        except OSError as error:
            raise SpecError(str(folder.path), f"cannot be written ({error.strerror})", "free space there") from None
        finally:
            draft.discard()


def require_space(folder: Path, needed: int) -> None:
    """Raises SpecError if a disk has less than that many bytes left."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        problem = f"has {readable_bytes(free)} left, and {readable_bytes(needed)} are to be written"
        raise SpecError(str(existing), problem, "free space, or choose another disk")


def _balanced(tensors: Mapping[str, LazyTensor], shards: int) -> list[list[str]]:
    """Which tensors go into each file: the largest first, each to the file that is smallest so far; then in order."""
    files: list[list[str]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    for key in sorted(tensors, key=lambda key: -tensors[key].size):
        smallest = min(range(shards), key=lambda file: (sizes[file], len(files[file])))
        files[smallest].append(key)
        sizes[smallest] += tensors[key].size
    order = {key: number for number, key in enumerate(tensors)}
    return [sorted(keys, key=order.__getitem__) for keys in files]


def _write_files(
    draft: Draft,
    about: Manifest,
    tensors: Mapping[str, LazyTensor],
    files: Sequence[Sequence[str]],
    progress: Callable[[int], None],
) -> Manifest:
    written: dict[str, Shard] = {}
    saved: dict[str, FullTensor] = {}
    for number, keys in enumerate(files):
        name = draft.file_name(number)
        entries = []
        for key in keys:
            tensor = tensors[key]
            box = Box((0,) * len(tensor.shape), tensor.shape)
            entries.append(Entry(entry_name(key, box), tensor.dtype, tensor.shape))
            saved[key] = FullTensor(tensor.shape, NAMES[tensor.dtype], (SavedPiece(name, entries[-1].name, box),))
        chosen = [tensors[key] for key in keys]
        written[name] = draft.write(name, entries, partial(read_in_turn, chosen, progress))
    return replace(about, tensors={key: saved[key] for key in tensors}, files=written)


def read_in_turn(tensors: Sequence[LazyTensor], progress: Callable[[int], None]) -> Iterator[Tensor]:
    """Reads each tensor once the previous one has been used."""
    for tensor in tensors:
        yield tensor.read().contiguous()
        progress(tensor.size)


def reshard(
    source: Place,
    out: CheckpointFolder,
    shards: int,
    *,
    weights_only: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> Place:
    """Writes the state of a checkpoint as full tensors into ``shards`` files.

    With ``weights_only`` a run can start from the result, but not resume. Raises SpecError for a damaged source before
    anything is written.
    """
    manifest = require_intact(source)
    keys = weight_keys(manifest) if weights_only else list(manifest.tensors)
    numbers = {name: value for name, value in manifest.numbers.items() if name == BASE or not weights_only}
    about = replace(manifest, numbers=numbers)
    made = write_checkpoint(out, about, full_tensors(source, manifest, keys), shards, progress)
    if has_companions(kept_companions(source)):
        out.keep_companions(kept_companions(source))
    return made
