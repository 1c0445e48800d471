"""Where a run begins, how far it is, and when it saves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.parameters import stored_weights
from shardwise.engine.trainer import Trainer
from shardwise.models.huggingface import open_folder
from shardwise.run.checkpoint.folder import CheckpointFolder, huggingface_at, require_same_shapes, start_at
from shardwise.run.storage.place import Place, place_of
from shardwise.run.storage.stores import CLEANUP, CLEANUP_SECONDS
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Run
from shardwise.training.checkpoint.base import fingerprint_of, source_of
from shardwise.training.checkpoint.load import frozen_names, load, newest_intact, require_intact
from shardwise.training.checkpoint.save import SaveError, Saver
from shardwise.training.checkpoint.state import first_tensors

# -- the beginning: the newest intact checkpoint, given weights, or nothing --------------------------


@dataclass(frozen=True)
class Position:
    """How far a run is in steps and in data; roll-backs make the two differ."""

    step: int = 0  # steps done
    batch: int = 0  # number of the next global batch
    left_out: frozenset[int] = frozenset()  # batches skipped after a roll-back

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
    losses: tuple[float, ...] = ()  # recent ones, for detecting spikes
    saved: bool = False  # it was loaded from a checkpoint of the run, not from a copy in memory


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
    fill_stored(trainer, source)
    trainer.begin_adapters()


def fill_stored(trainer: Trainer[Any], source: Place) -> None:
    """Quantises frozen weights on the way; each rank reads the whole blocks around what it holds."""
    held = list(stored_weights(trainer.stages.values()))
    if held:
        weights = source_of(source)
        for codes in held:
            codes.fill(weights.slice)


def begin(trainer: Trainer[Any]) -> None:
    """Loads the weights that a job starts from, if it names any, and notes which base its frozen weights are."""
    job = trainer.job
    if job.run.start_from is not None:
        start_from(trainer, place_of(job.run.start_from, job.run.timeouts.checkpoint))
    if job.training.freezes:
        agreed: list[Any] = [fingerprint_of(job, frozen_names(job)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(agreed)
        trainer.base = agreed[0]


@torch.no_grad()
def _load_huggingface(trainer: Trainer[Any], folder: Path) -> None:
    """Each rank reads the boxes it holds, one tensor at a time."""
    require_same_shapes(trainer.job.model, open_folder(folder).model, folder)
    for state in first_tensors(trainer):
        _, _, name = state.key.partition("/")
        tensor = state.read()
        for place in state.places:
            box = tuple(slice(first, first + size) for first, size in zip(place.box.start, place.box.shape))
            value = open_folder(folder).slice(name, box)
            tensor[place.local] = value.to(tensor.device, tensor.dtype)
        state.write(tensor)
    trainer.on_weights_loaded()


# -- checkpoints: begun at the same step on all ranks, written during training, settled later --------
# Ranks exchange the outcome in a group of its own, whose time limit is that of a checkpoint: a slow disk on one rank
# must not break the others' communication. (The rendezvous store would grow with every save.)

_logger = logging.getLogger("shardwise.training")


class CheckpointManager:
    """Saves checkpoints when due; rank 0 calls ``on_settled(step, problem)`` for each committed or failed one."""

    def __init__(
        self,
        trainer: Trainer[Any],
        run: Run,
        folder: CheckpointFolder,
        on_settled: Callable[[int, str], None] = lambda step, problem: None,
    ) -> None:
        self.run, self.folder, self.on_settled = run, folder, on_settled
        self.saver = Saver(trainer, folder, timeout_seconds=run.timeouts.checkpoint)
        self._last_at = time.monotonic()
        self.last_begun: int | None = None  # the step of the newest, unless it failed
        self._unsettled: int | None = None
        # Other ranks may still write when this one has given up, and then a store that is gone is cleaned up.
        self.limit_seconds = run.timeouts.checkpoint + 3 * CLEANUP_SECONDS
        self._group = None
        if self.saver.world > 1:
            limit = timedelta(seconds=self.limit_seconds)
            self._group = dist.new_group(backend="gloo", timeout=limit, group_desc="checkpoint")

    def due_at(self, step: int) -> bool:
        """Whether this many steps call for a checkpoint, by count."""
        every = self.run.checkpoints.steps
        return every is not None and step % every == 0

    @property
    def due_by_time(self) -> bool:
        """Whether a checkpoint is due by the clock; since clocks differ, rank 0 decides."""
        seconds = self.run.checkpoints.seconds
        return seconds is not None and self._unsettled is None and time.monotonic() - self._last_at > seconds

    def save(self, step: int, further: dict[str, Any], *, wait: bool = False) -> None:
        """Keeps the state after ``step`` steps; returns when it is copied, or with ``wait`` when it is on disk."""
        self.settle()
        wait = wait or not self.run.checkpoints.asynchronous
        self.saver.save(step, further, wait=wait)
        self._unsettled = self.last_begun = step
        self._last_at = time.monotonic()
        if wait:
            self.settle()

    @property
    def unsettled(self) -> bool:
        return self._unsettled is not None

    def settle(self) -> None:
        """Waits for the save in flight on all ranks; raises SpecError if it failed and the policy is to stop."""
        if self._unsettled is None:
            return
        step, self._unsettled = self._unsettled, None
        problem = self._ended(step)
        if problem:
            self.last_begun = None
        if problem and self.run.checkpoints.disk_full == "stop":
            remedy = f"{self._mend}: the run continues from the one before"
            raise SpecError(str(self.folder.of_step(step)), problem, remedy)

    def require(self, step: int) -> None:
        """Raises SpecError if the checkpoint of ``step``, the last of a run, was not written."""
        if self.last_begun != step:
            remedy = f"{self._mend} and start it again: it resumes from the checkpoint before"
            raise SpecError(str(self.folder.of_step(step)), "could not be written, so the run is not done", remedy)

    @property
    def _mend(self) -> str:
        return "make room" if isinstance(self.folder.path, Path) else "check the store"

    def _ended(self, step: int) -> str:
        """Why the checkpoint of ``step`` was not written, according to rank 0; empty if it was."""
        problem = ""
        try:
            self.saver.finish()
        except SaveError as error:
            problem = str(error)
            _logger.warning("the checkpoint of step %d was not written: %s", step, problem)
        if self._group is not None:  # a file that a rank still writes cannot be removed
            dist.barrier(self._group)
        if self.saver.rank == 0:
            self._clear_up(step, failed=bool(problem))
            self.on_settled(step, problem)
        of_rank_0: list[Any] = [problem]
        if self._group is not None:
            dist.broadcast_object_list(of_rank_0, group=self._group)
        return str(of_rank_0[0])

    def _clear_up(self, step: int, *, failed: bool) -> None:
        """Removes old or unfinished checkpoints; what fails is removed after the next save, or at the next start."""
        folder, kept = self.folder.within(CLEANUP), self.run.checkpoints
        try:
            if failed:
                folder.clear_unfinished()
            else:
                folder.retain(kept.keep, kept.keep_every, newest_step=step)
        except OSError as error:
            _logger.warning("%s: what is not kept could not be removed: %s", self.folder.path, error.strerror or error)
