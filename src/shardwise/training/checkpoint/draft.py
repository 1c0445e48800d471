"""A checkpoint that several processes are writing: its files, who has finished, and the commit.

Ranks notify each other through small files beside the shards, never by a collective: a slow disk on one rank cannot
make communication time out, and writing can continue in a thread during training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from shardwise.run.checkpoint.checkpoint_folder import RemoteCheckpointFolder
from shardwise.run.checkpoint.folder import CheckpointFolder
from shardwise.run.checkpoint.manifest import Manifest, Shard
from shardwise.run.storage.place import Place, RemotePlace
from shardwise.run.storage.stores import CLEANUP, CLEANUP_SECONDS
from shardwise.training.checkpoint.shards import Entry, blocks_of, shard_content, shard_name, write_shard

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
