"""Where a run begins: at its newest intact checkpoint, with given weights, or from scratch; and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.engine.trainer import Trainer
from shardwise.models.huggingface import open_folder
from shardwise.run.checkpoint.folder import CheckpointFolder, huggingface_at, require_same_shapes, start_at
from shardwise.run.storage.place import Place
from shardwise.spec.job import Job
from shardwise.training.checkpoint.load import load, newest_intact, require_intact
from shardwise.training.checkpoint.state import state_tensors


@dataclass(frozen=True)
class Position:
    """How far a run is in steps and in data; roll-backs make the two differ."""

    step: int = 0
    """Steps done."""
    batch: int = 0
    """Number of the next global batch."""
    left_out: frozenset[int] = frozenset()
    """Batches skipped after a roll-back."""

    def after_step(self) -> Position:
        return replace(self, step=self.step + 1, batch=self._next(self.batch + 1))

    def without(self, batches: frozenset[int]) -> Position:
        """The same position, with more batches left out."""
        wider = replace(self, left_out=self.left_out | batches)
        return replace(wider, batch=wider._next(self.batch))

    def _next(self, batch: int) -> int:
        while batch in self.left_out:
            batch += 1
        return batch

    def to_numbers(self, sequences: int) -> dict[str, Any]:
        """Plain data for a checkpoint; ``sequences`` is the size of a global batch."""
        return {"batch": self.batch, "left_out": sorted(self.left_out), "sequences": sequences}

    @classmethod
    def from_numbers(cls, step: int, numbers: Mapping[str, Any], sequences: int) -> Position:
        """From a checkpoint; if the batch size has changed, at the first whole batch that was not begun."""
        if numbers["sequences"] == sequences:
            return cls(step, int(numbers["batch"]), frozenset(numbers["left_out"]))
        return cls(step, -(-int(numbers["batch"]) * int(numbers["sequences"]) // sequences))


@dataclass(frozen=True)
class State:
    """What a run keeps besides its tensors."""

    position: Position = Position()
    losses: tuple[float, ...] = ()
    """Recent ones, for detecting spikes."""
    saved: bool = False
    """It was loaded from a checkpoint of the run, not from a copy in memory."""


def state_numbers(state: State, job: Job) -> dict[str, Any]:
    """Plain data to keep in a checkpoint."""
    return {"data": state.position.to_numbers(job.sequences), "losses": list(state.losses)}


def load_newest(
    trainer: Trainer[Any],
    folder: CheckpointFolder,
    on_damaged: Callable[[str], None] = lambda text: None,
    *,
    memory: CheckpointFolder | None = None,
) -> State | None:
    """Fills the trainer from the newest intact checkpoint, in ``memory`` or in ``folder``; None if there is none."""
    place = newest_intact([folder] if memory is None else [memory, folder], on_damaged)
    if place is None:
        return None
    manifest = load(trainer, place)
    position = Position.from_numbers(manifest.step, manifest.numbers["data"], trainer.job.sequences)
    return State(position, tuple(float(loss) for loss in manifest.numbers["losses"]), saved=place.parent == folder.path)


def start_from(trainer: Trainer[Any], source: Place) -> None:
    """Loads the weights of a Hugging Face folder, of a checkpoint, or of the newest in a folder, in any layout."""
    source = start_at(source)
    huggingface = huggingface_at(source)
    if huggingface is not None:
        _load_huggingface(trainer, huggingface)
    else:
        require_intact(source, "run.start_from")
        load(trainer, source, weights_only=True)


@torch.no_grad()
def _load_huggingface(trainer: Trainer[Any], folder: Path) -> None:
    """Each rank reads the boxes it holds, one tensor at a time."""
    require_same_shapes(trainer.job.model, open_folder(folder).model, folder)
    for state in state_tensors(trainer):
        kind, _, name = state.key.partition("/")
        if kind not in ("weight", "buffer"):
            continue
        tensor = state.read()
        for place in state.places:
            box = tuple(slice(first, first + size) for first, size in zip(place.box.start, place.box.shape))
            value = open_folder(folder).slice(name, box)
            tensor[place.local] = value.to(tensor.device, tensor.dtype)
        state.write(tensor)
    trainer.on_weights_loaded()
