"""Saving: each box of each tensor is written by one of the ranks that hold it; rank 0 commits once all are on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.trainer import Trainer
from shardwise.run.checkpoint.checkpoint_folder import RemoteCheckpointFolder
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import Box, FullTensor, Index, Manifest, SavedPiece, Shard
from shardwise.run.storage.keeper_store import KEEPER, KeeperStore
from shardwise.run.storage.place import Place, RemotePlace
from shardwise.run.storage.stores import CLEANUP, CLEANUP_SECONDS, register_store
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.shards import (
    NAMES,
    Entry,
    blocks_of,
    entry_name,
    shard_content,
    shard_name,
    write_shard,
)
from shardwise.training.checkpoint.state import StateTensor, numbers, state_tensors

# -- A draft: a checkpoint that several processes are writing --------------------------------------
# Ranks notify each other through small files beside the shards, never by a collective: a slow disk on one rank cannot
# make communication time out, and writing can continue in a thread during training.

_logger = logging.getLogger("shardwise.training")

ReadTensors = Callable[[], Iterable[Tensor]]  # each call yields all tensors of a shard again


class Draft(Protocol):
    """What the writers of a checkpoint do; all of them use the same step and name."""

    poll_seconds: float

    def file_name(self, number: int) -> str:
        """The name of a shard's file."""

    def write(self, name: str, entries: Sequence[Entry], tensors: ReadTensors) -> Shard:
        """Writes a shard, which is durable when this returns."""

    def announce(self, rank: int, outcome: Shard | OSError) -> None:
        """Tells the others that a rank's shard is written, or why it is not."""

    def announced(self, rank: int) -> Shard | str | None:
        """A rank's shard, why there is none, or None as long as the rank has announced nothing."""

    def commit(self, manifest: Manifest, *, replace: bool = True) -> Place: ...

    def discard(self) -> None:
        """Removes what was not committed."""


class LocalDraft:
    """In a folder with a temporary name."""

    poll_seconds = 0.02

    def __init__(self, folder: CheckpointFolder, step: int, name: str) -> None:
        self.folder, self.step, self.name, self.part = folder, step, name, folder.unfinished(step, name)

    def file_name(self, number: int) -> str:
        return shard_name(number)

    def write(self, name: str, entries: Sequence[Entry], tensors: ReadTensors) -> Shard:
        self.part.parent.mkdir(exist_ok=True)  # without parents: a run's folder that is gone stays gone
        self.part.mkdir(exist_ok=True)
        return write_shard(self.part / name, entries, tensors())

    def announce(self, rank: int, outcome: Shard | OSError) -> None:
        notice = self.part / f"rank-{rank}"
        if isinstance(outcome, Shard):
            unfinished = notice.with_suffix(".part")
            unfinished.write_text(_spelled(outcome), encoding="utf-8")
            unfinished.rename(notice)
            return
        # As the name of an empty file, which works on a full disk; if that fails too, rank 0 runs into its time limit.
        with contextlib.suppress(OSError):
            notice.with_name(f"{notice.name}.failed-{outcome.errno or 0}").touch()
            (self.part / shard_name(rank)).unlink()

    def announced(self, rank: int) -> Shard | str | None:
        notice = self.part / f"rank-{rank}"
        if notice.is_file():
            return _read(notice.read_bytes())
        failed = next(self.part.glob(f"{notice.name}.failed-*"), None)
        return None if failed is None else os.strerror(int(failed.name.rpartition("-")[2]))

    def commit(self, manifest: Manifest, *, replace: bool = True) -> Place:
        for notice in self.part.glob("rank-*"):
            notice.unlink()
        return self.folder.commit(self.step, self.name, manifest.to_bytes(), replace=replace)

    def discard(self) -> None:
        shutil.rmtree(self.part, ignore_errors=True)  # a committed checkpoint has another name


class RemoteDraft:
    """Beside the committed files, under names of its own."""

    poll_seconds = 0.2

    def __init__(self, folder: RemoteCheckpointFolder, step: int, name: str, seconds: float) -> None:
        self._folder, self.step = folder, step
        self.own = name  # eight hexadecimal digits and a number, as `manifest.py` expects
        self._deadline = time.monotonic() + seconds

    @property
    def folder(self) -> RemoteCheckpointFolder:
        """The folder, limited to the time that is left, or to enough of it to report that none is."""
        late = time.monotonic() + CLEANUP_SECONDS > self._deadline
        return self._folder.within(CLEANUP if late else replace(self._folder.path.limit, deadline=self._deadline))

    @property
    def place(self) -> RemotePlace:
        return self.folder.of_step(self.step)

    def file_name(self, number: int) -> str:
        return shard_name(number).replace(".", f".{self.own}.", 1)

    def write(self, name: str, entries: Sequence[Entry], tensors: ReadTensors) -> Shard:
        sent = [Shard(0, "")]

        def blocks() -> Iterator[memoryview]:
            checksum, size = hashlib.sha256(), 0
            for array, length in blocks_of(shard_content(entries, tensors())):
                block = array.data[:length]
                checksum.update(block)
                size += length
                yield block
            sent[0] = Shard(size, checksum.hexdigest())

        place = self.place / name
        place.store.upload(str(place), blocks)
        return sent[0]

    def announce(self, rank: int, outcome: Shard | OSError) -> None:
        if isinstance(outcome, Shard):
            self._notice(rank).write_bytes(_spelled(outcome).encode())
            return
        with contextlib.suppress(OSError):  # the store is gone: rank 0 runs into its time limit
            self._notice(rank).write_bytes(json.dumps({"failed": _reason(outcome)}).encode())

    def announced(self, rank: int) -> Shard | str | None:
        try:
            return _read(self._notice(rank).read_bytes())
        except FileNotFoundError:
            return None

    def _notice(self, rank: int) -> Place:
        return self.place / f"rank-{rank}.{self.own}"

    def commit(self, manifest: Manifest, *, replace: bool = True) -> Place:
        return self.folder.seal(self.step, manifest.to_bytes(), set(manifest.files), replace=replace)

    def discard(self) -> None:
        """Deletes the notices and shards of this save, unless it is committed: that has deleted all but its shards."""
        place = self.place
        try:
            if not (place / "manifest.json").is_file():
                names = [name for name in place.objects() if f".{self.own}" in name]
                place.store.delete(str(place / name) for name in names)
        except OSError as error:
            _logger.warning("%s: what was not committed is left there (%s)", place, _reason(error))


def draft_of(folder: CheckpointFolder, step: int, name: str, seconds: float = math.inf) -> Draft:
    """A new draft; all writers of a checkpoint give the same name, which is unique to the save.

    A store has ``seconds`` for the whole save.
    """
    if isinstance(folder, RemoteCheckpointFolder):
        return RemoteDraft(folder, step, name, seconds)
    return LocalDraft(folder, step, name)


def _spelled(shard: Shard) -> str:
    return json.dumps({"bytes": shard.size, "sha256": shard.checksum})


def _read(notice: bytes) -> Shard | str:
    document = json.loads(notice)
    return str(document["failed"]) if "failed" in document else Shard(document["bytes"], document["sha256"])


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# -- The tensors of a trainer, copied and written --------------------------------------------------


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
