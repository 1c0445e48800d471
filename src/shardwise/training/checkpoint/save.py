"""Saving: each box of each tensor is written by one of the ranks that hold it; rank 0 commits once all are on disk.

Writing can continue in a thread during training, see `draft.py`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.trainer import Trainer
from shardwise.run.checkpoint.checkpoint_folder import RemoteCheckpointFolder
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import Box, FullTensor, Index, Manifest, SavedPiece, Shard
from shardwise.run.storage.keeper_store import KEEPER, KeeperStore
from shardwise.run.storage.place import RemotePlace
from shardwise.run.storage.stores import register_store
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.draft import Draft, ReadTensors, draft_of
from shardwise.training.checkpoint.shards import NAMES, Entry, entry_name, shard_name
from shardwise.training.checkpoint.state import StateTensor, numbers, state_tensors


class SaveError(Exception):
    """A checkpoint was not written; earlier ones are untouched."""


@dataclass(frozen=True)
class _OwnBox:
    """A box of a tensor of this rank, which the rank writes."""

    entry: Entry
    tensor: StateTensor
    local: Index

    def read(self) -> Tensor:
        return self.tensor.read()[self.local].detach()


class Saver:
    """Saves a trainer's state into ``folder``; all ranks make one together, since they agree on who writes what.

    `save` returns once the tensors are copied, unless ``wait``; `finish` raises if the last save failed. Rank 0 calls
    ``on_commit`` with the step of each committed checkpoint.
    """

    def __init__(
        self,
        trainer: Trainer[Any],
        folder: CheckpointFolder,
        *,
        timeout_seconds: float = 600,
        on_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.trainer, self.folder, self.timeout_seconds, self.on_commit = trainer, folder, timeout_seconds, on_commit
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.boxes, self.tensors = _assigned(state_tensors(trainer), self.rank, self.world)
        self._name = _agreed_name()
        self._saves = 0  # counted, since a step may be saved again after a failure or a roll-back
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: list[Tensor] = []

    def save(self, step: int, further: dict[str, Any], *, wait: bool = False) -> None:
        """Saves the state after ``step`` steps with ``further``, plain data that is equal on all ranks.

        With ``wait`` nothing is copied, and training is blocked. `finish` raises failures.
        """
        self.finish()
        self._saves += 1
        written = {**numbers(self.trainer), **further}
        if wait:
            self._guarded(step, lambda: (box.read().to("cpu").contiguous() for box in self.boxes), written)
            return
        copies = self._copied()
        self._thread = threading.Thread(target=self._guarded, args=(step, lambda: copies, written), name="checkpoint")
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the save in flight; raises SaveError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @torch.no_grad()
    def _copied(self) -> list[Tensor]:
        """Copies into CPU buffers that are reused, since allocating pages takes longer than copying."""
        if not self._copies:
            self._copies = [torch.empty(box.entry.shape, dtype=box.entry.dtype) for box in self.boxes]
        for copy, box in zip(self._copies, self.boxes):
            copy.copy_(box.read())
        return self._copies

    def _guarded(self, step: int, tensors: ReadTensors, written: dict[str, Any]) -> None:
        try:
            self._write(step, tensors, written)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, tensors: ReadTensors, written: dict[str, Any]) -> None:
        draft = draft_of(self.folder, step, f"{self._name}-{self._saves}", self.timeout_seconds)
        try:
            shard = draft.write(draft.file_name(self.rank), [box.entry for box in self.boxes], tensors)
            draft.announce(self.rank, shard)
        except OSError as error:
            draft.announce(self.rank, error)
            raise SaveError(f"rank {self.rank} could not write its part: {_reason(error)}") from error
        if self.rank == 0:
            self._commit(step, draft, written)

    def _commit(self, step: int, draft: Draft, written: dict[str, Any]) -> None:
        try:
            files = self._all_written(draft)
            names = {shard_name(rank): draft.file_name(rank) for rank in range(self.world)}
            manifest = Manifest(step, self.trainer.job.to_dict(), written, _renamed(self.tensors, names), files)
            draft.commit(manifest)
            self.on_commit(step)
        except OSError as error:
            raise SaveError(f"could not be committed: {_reason(error)}") from error
        finally:
            draft.discard()

    def _all_written(self, draft: Draft) -> dict[str, Shard]:
        files: dict[str, Shard] = {}
        deadline = time.monotonic() + self.timeout_seconds
        for rank in range(self.world):
            while (written := draft.announced(rank)) is None:
                if time.monotonic() > deadline:
                    raise SaveError(f"rank {rank} did not write its part within {self.timeout_seconds:g} s")
                time.sleep(draft.poll_seconds)
            if isinstance(written, str):
                raise SaveError(f"rank {rank} could not write its part: {written}")
            files[draft.file_name(rank)] = written
        return files


def _agreed_name() -> str:
    """Eight hexadecimal digits, drawn by rank 0, so that no two starts of a run use the same names."""
    drawn: list[Any] = [secrets.token_hex(4)]
    dist.broadcast_object_list(drawn)
    return str(drawn[0])


def _renamed(tensors: dict[str, FullTensor], names: dict[str, str]) -> dict[str, FullTensor]:
    """The same tensors with files renamed; in a local folder names stay as they are."""
    if all(name == other for name, other in names.items()):
        return tensors
    return {
        key: replace(full, pieces=tuple(replace(piece, file=names[piece.file]) for piece in full.pieces))
        for key, full in tensors.items()
    }


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _assigned(mine: Sequence[StateTensor], rank: int, world: int) -> tuple[list[_OwnBox], dict[str, FullTensor]]:
    """What this rank writes, and where everything will be: each box is written by its least loaded holder."""
    own = [
        (tensor.saved_as, tensor.shape, NAMES[tensor.dtype], [place.box for place in tensor.places]) for tensor in mine
    ]
    lists: list[Any] = [None] * world
    dist.all_gather_object(lists, own)
    holders: dict[tuple[str, Box], list[int]] = {}
    tensors: dict[str, FullTensor] = {}
    for other, held in enumerate(lists):
        for key, shape, dtype, boxes in held:
            tensors[key] = FullTensor(shape, dtype, ())
            for box in boxes:
                holders.setdefault((key, box), []).append(other)
    load = [0] * world
    pieces: dict[str, list[SavedPiece]] = {key: [] for key in tensors}
    writes: set[tuple[str, Box]] = set()
    for (key, box), ranks in holders.items():
        writer = min(ranks, key=lambda holder: load[holder])
        load[writer] += box.elements
        if writer == rank:
            writes.add((key, box))
        pieces[key].append(SavedPiece(shard_name(writer), entry_name(key, box), box))
    own_boxes = []
    for tensor in mine:
        for place in tensor.places:
            if (tensor.saved_as, place.box) in writes:
                writes.remove((tensor.saved_as, place.box))  # a tied parameter may be here twice
                entry = Entry(entry_name(tensor.saved_as, place.box), tensor.dtype, place.box.shape)
                own_boxes.append(_OwnBox(entry, tensor, place.local))
    return own_boxes, {key: replace(full, pieces=tuple(pieces[key])) for key, full in tensors.items()}


# -- copies in the memory of nodes, every few steps, made while training continues -------------------
# The idea is Gemini's (Wang et al., SOSP 2023): checkpoints in the CPU memory of the own machine and of a peer. A copy
# is an ordinary checkpoint in a special store (`keeper_store.py`). It is written beside the previous copy, which is
# deleted once the new one is committed, so that a failure never interrupts the only copy.

_logger = logging.getLogger("shardwise.training")


def memory_folder(keepers: Path, node: int) -> RemoteCheckpointFolder:
    """The checkpoints in the memory of nodes, as a rank on ``node`` sees them; the file ``keepers`` lists the nodes."""
    if not keepers.is_file():
        problem = "no process keeps copies in memory here"
        raise SpecError("run.checkpoints.memory", problem, "start the run by `shardwise train`, or leave it out")
    register_store(KEEPER, KeeperStore(keepers, node))
    return RemoteCheckpointFolder(RemotePlace(f"{KEEPER}://nodes/checkpoints"))


class MemoryCopies:
    """Copies the state of all ranks every ``steps`` steps; rank 0 calls ``on_commit(step)`` in a thread."""

    def __init__(
        self,
        trainer: Trainer[Any],
        folder: RemoteCheckpointFolder,
        steps: int,
        timeout_seconds: float,
        on_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.folder, self.steps, self.stall_seconds = folder, steps, 0.0

        def committed(step: int) -> None:
            folder.retain(1, newest_step=step)
            on_commit(step)

        self.saver = Saver(trainer, folder, timeout_seconds=timeout_seconds, on_commit=committed)

    def due_at(self, step: int) -> bool:
        return step % self.steps == 0

    def save(self, step: int, further: dict[str, Any]) -> None:
        """Returns when the tensors are copied; ``stall_seconds`` is how long that took."""
        began = time.perf_counter()
        self.finish()
        self.saver.save(step, further)
        self.stall_seconds = time.perf_counter() - began

    def finish(self) -> None:
        """Waits for the copy in flight; if it failed, the previous copy stays, and the run continues."""
        try:
            self.saver.finish()
        except SaveError as error:
            _logger.warning("a copy in memory was not made: %s", error)
