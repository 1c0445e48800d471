"""Weights that a run starts from, read a box at a time, whatever wrote them; and the fingerprint of a frozen base.

A run that freezes weights saves only what it trains. Its checkpoints name the rest by a fingerprint, so that no adapter
is put beside weights that it was not trained with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwise.models.huggingface import open_folder
from shardwise.run.checkpoint.folder import huggingface_at, start_at
from shardwise.run.checkpoint.manifest import BASE, Box, FullTensor, Manifest, read_manifest
from shardwise.run.storage.place import Place, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.training.checkpoint.shards import DTYPES, ShardReader


class WeightSource(Protocol):
    """Whole tensors of a model by our names, of which any box may be read."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def slice(self, name: str, slices: Sequence[slice]) -> Tensor: ...


class HuggingFaceSource:
    def __init__(self, path: Path) -> None:
        self.path = path

    def shape(self, name: str) -> tuple[int, ...]:
        return open_folder(self.path).naming.places[name].shape

    def slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        return open_folder(self.path).slice(name, slices)


class CheckpointSource:
    """A checkpoint of ours with all weights of its model."""

    def __init__(self, folder: Place) -> None:
        self.folder, self.manifest, self.reader = folder, read_manifest(folder), ShardReader(folder)
        require_whole(self.manifest, folder)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._full(name).shape

    def slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        full = self._full(name)
        bounds = [part.indices(size) for part, size in zip(slices, full.shape)]
        bounds += [(0, size, 1) for size in full.shape[len(bounds) :]]
        wanted = Box(tuple(first for first, _, _ in bounds), tuple(stop - first for first, stop, _ in bounds))
        result = torch.empty(wanted.shape, dtype=DTYPES[full.dtype])
        for piece in full.pieces:
            common = piece.box.common(wanted)
            if common is not None:
                part = self.reader.slice_of(piece.file, piece.entry, piece.box.shape, common.inside(piece.box))
                result[common.inside(wanted)] = part
        return result

    def _full(self, name: str) -> FullTensor:
        for kind in ("weight", "buffer"):
            if f"{kind}/{name}" in self.manifest.tensors:
                return self.manifest.tensors[f"{kind}/{name}"]
        raise SpecError(str(self.folder), f"has no weight of {name}", "use the model that was trained")


def source_of(source: Place) -> WeightSource:
    """What a path holds: a Hugging Face folder, a checkpoint, or a folder of these, whose newest is taken."""
    start = start_at(source)
    huggingface = huggingface_at(start)
    return CheckpointSource(start) if huggingface is None else HuggingFaceSource(huggingface)


def require_whole(manifest: Manifest, folder: Place) -> None:
    """Raises SpecError for a checkpoint that holds only what was trained beside frozen weights."""
    if BASE in manifest.numbers:
        problem = "holds only what was trained beside frozen weights"
        remedy = "convert it with ⟨to=huggingface⟩, and start from that"
        raise SpecError(str(folder), problem, remedy)


# -- the fingerprint ---------------------------------------------------------------------------------

DRAWN = "seed"  # begins the fingerprint of weights that are in no folder
ROWS = 4  # of every tensor, evenly spread: two trainings of one model differ in nearly every row


def fingerprint_of(job: Job, names: Iterable[str]) -> str:
    """Of the weights ``names`` that the job starts from: those in its folder, or those that its seed draws."""
    if job.run.start_from is None:
        return f"{DRAWN} {job.run.seed} on {job.run_device}"
    return fingerprint_at(place_of(job.run.start_from, job.run.timeouts.checkpoint), names)


def fingerprint_at(place: Place, names: Iterable[str]) -> str:
    """Of the weights ``names`` at a path.

    Values are rounded to bf16, so that a copy of the base in another format is the same base.
    """
    digest, source = hashlib.sha256(), source_of(place)
    for name in sorted(names):
        size = source.shape(name)[0]
        digest.update(name.encode())
        for row in sorted({size * number // ROWS for number in range(ROWS)}):
            values = source.slice(name, (slice(row, row + 1),)).to(torch.bfloat16).contiguous()
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def require_base(saved: str | None, now: str | None, folder: Place, job: Job) -> None:
    """Raises SpecError if a checkpoint was trained beside other frozen weights than those of this job, or with none."""
    if saved == now:
        return
    if now is None or saved is None:
        which = ("only what was trained beside frozen weights", "all weights")
        problem = f"holds {which[saved is None]}, and this job trains {('some of them', 'all of them')[now is None]}"
        raise SpecError(str(folder), problem, "resume with the adapters and trained parts that it was saved with")
    problem = f"was trained beside other weights than those of {job.run.start_from or f'seed {job.run.seed}'}"
    raise SpecError(str(folder), problem, "start from its own base: run.start_from")
