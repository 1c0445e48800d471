"""A folder of checkpoints: what is committed, what may go, who may write; on a disk, and in an object store.

A checkpoint is a folder ``step-NNNNNNNN``. On a disk it has a temporary name while it is written, and a single rename
commits it. An object store has no rename: there the manifest, written last, commits. Every save names its shards
differently, so that a late writer never touches what a manifest lists; a save that replaces another of the same step
overwrites its manifest in one request. A store has no locks either: whoever started last owns the folder, and an
earlier run that is still alive notices before it commits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.interop.companions import KEPT_IN, companions, keep_companions
from shardwise.run.checkpoint.manifest import NAME
from shardwise.run.storage.place import Place, RemotePlace
from shardwise.run.storage.stores import Limit, ObjectFacts, refused
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json

_COMMITTED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.part-.*")
_OBJECT = re.compile(r"step-(\d{8,})/([^/]+)")
LOCK, OWNER = ".lock", ".owner"
INNER = "checkpoints"  # in a run's folder


class CheckpointFolder:
    """On a disk of this machine, or on one that all ranks mount."""

    path: Place

    def __init__(self, path: Path) -> None:
        self.path = self._here = path

    def of_step(self, step: int) -> Place:
        return self.path / f"step-{step:08d}"

    def within(self, limit: Limit) -> CheckpointFolder:
        """The same folder with a limit on every call to its store; calls to a disk cannot be abandoned."""
        return self

    def _of_step(self, step: int) -> Path:
        return self._here / self.of_step(step).name

    def unfinished(self, step: int, attempt: str) -> Path:
        """Where a checkpoint is being written; ``attempt`` is unique to this save."""
        return self._here / f"step-{step:08d}.part-{attempt}"

    def present(self) -> list[int]:
        """Steps that have a folder, intact or damaged, newest first."""
        if not self._here.is_dir():
            return []
        matches = (_COMMITTED.fullmatch(path.name) for path in self._here.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def committed(self) -> list[int]:
        """Steps that have a committed checkpoint, newest first."""
        return [step for step in self.present() if (self.of_step(step) / NAME).is_file()]

    def written_ns(self, step: int) -> int:
        """When the checkpoint of a step was finished; 0 if it has just been removed."""
        try:
            return (self.of_step(step) / NAME).stat().st_mtime_ns
        except OSError:
            return 0

    def commit(self, step: int, attempt: str, manifest: bytes, *, replace: bool = True) -> Path:
        """Writes the manifest and gives the folder its final name; all shards must be on disk.

        Without ``replace`` the rename fails (OSError) if that step already has a checkpoint.
        """
        part, target = self._sealed(step, attempt, manifest), self._of_step(step)
        if replace and target.is_symlink():
            target.unlink()
        elif replace and target.exists():  # from an earlier attempt at the same step, damaged or rolled back
            shutil.rmtree(target)
        part.rename(target)
        sync_folder(self._here)
        return target

    def _sealed(self, step: int, attempt: str, manifest: bytes) -> Path:
        """The checkpoint, complete but for its name; tests inject faults before the rename."""
        part = self.unfinished(step, attempt)
        with (part / NAME).open("wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part)
        return part

    def clear_unfinished(self) -> None:
        """Removes what earlier starts of the run left behind; the caller must hold the lock."""
        if self._here.is_dir():
            for path in self._here.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def retain(self, newest: int, every: int | None = None, *, newest_step: int | None = None) -> None:
        """Keeps the ``newest`` checkpoints, and those whose step is a multiple of ``every``.

        Checkpoints after ``newest_step`` are damaged, since the run resumed before them: they are left alone.
        """
        ours = [step for step in self.committed() if newest_step is None or step <= newest_step]
        for step in ours[newest:]:
            if every is None or step % every:
                doomed = self.unfinished(step, "removed")
                shutil.rmtree(doomed, ignore_errors=True)
                self._of_step(step).rename(doomed)  # so that no half-removed checkpoint looks complete
                shutil.rmtree(doomed, ignore_errors=True)

    def remove_all(self) -> None:
        shutil.rmtree(self._here, ignore_errors=True)

    def keep_companions(self, source: Path | None) -> None:
        """Keeps the small Hugging Face files of ``source``, where the weights come from, beside the checkpoints."""
        keep_companions(source, self._here)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks this folder; raises SpecError if another run has it. The kernel unlocks it when the process ends."""
        try:
            self._here.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._here / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SpecError(str(self._here), f"cannot be written ({error.strerror})", "choose another folder") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                other = os.read(handle, 32).decode(errors="replace").strip()
                problem = f"{f'process {other}' if other else 'another process'} is training in it"
                raise SpecError(str(self._here), problem, "wait for it, or choose another folder") from None
            with contextlib.suppress(OSError):  # on a full disk the lock is held all the same
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)


class RemoteCheckpointFolder(CheckpointFolder):
    """In an object store; ``run`` is the local folder of the run that writes here, which keeps the owner's token."""

    path: RemotePlace

    def __init__(self, path: RemotePlace, run: Path | None = None) -> None:
        self.path, self._run = path, run

    def within(self, limit: Limit) -> RemoteCheckpointFolder:
        return RemoteCheckpointFolder(self.path.within(limit), self._run)

    def of_step(self, step: int) -> RemotePlace:
        return self.path / f"step-{step:08d}"

    def _objects(self) -> dict[int, dict[str, ObjectFacts]]:
        """The objects of every step, by name."""
        by_step: dict[int, dict[str, ObjectFacts]] = {}
        for name, facts in self.path.objects().items():
            if match := _OBJECT.fullmatch(name):
                by_step.setdefault(int(match[1]), {})[match[2]] = facts
        return by_step

    def present(self) -> list[int]:
        return sorted(self._objects(), reverse=True)

    def committed(self) -> list[int]:
        return sorted((step for step, names in self._objects().items() if NAME in names), reverse=True)

    def seal(self, step: int, manifest: bytes, keeps: set[str], *, replace: bool = True) -> RemotePlace:
        """Writes the manifest, which commits the shards it lists, and deletes what else that step has.

        Raises SpecError if another run has taken the folder over.
        """
        target = self.of_step(step)
        self._require_owned()
        if not replace and (target / NAME).is_file():
            raise FileExistsError(0, "is already there", str(target))
        (target / NAME).write_bytes(manifest)
        self._delete(step, target.objects().keys() - keeps - {NAME})
        return target

    def clear_unfinished(self) -> None:
        for step, names in self._objects().items():
            if NAME not in names:
                self._delete(step, names)

    def retain(self, newest: int, every: int | None = None, *, newest_step: int | None = None) -> None:
        objects = self._objects()
        ours = sorted((step for step, names in objects.items() if NAME in names), reverse=True)
        ours = [step for step in ours if newest_step is None or step <= newest_step]
        for step in ours[newest:]:
            if every is None or step % every:
                self._delete(step, [NAME])  # first, so that no half-removed checkpoint looks complete
                self._delete(step, objects[step].keys() - {NAME})

    def _delete(self, step: int, names: Iterator[str] | set[str] | list[str] | dict[str, ObjectFacts]) -> None:
        self.path.store.delete(str(self.of_step(step) / name) for name in names)

    def remove_all(self) -> None:
        for step, names in self._objects().items():
            self._delete(step, [NAME])
            self._delete(step, names)

    def keep_companions(self, source: Path | None) -> None:
        kept = self.path / KEPT_IN
        self.path.store.delete(str(kept / name) for name in kept.objects())
        for name, file in (companions(source) if source is not None else {}).items():
            (kept / name).write_bytes(file.read_bytes())

    # -- who may write ---------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Takes the folder over; a run that is alive on this machine still keeps others out, by its local lock."""
        with contextlib.nullcontext() if self._run is None else CheckpointFolder(self._run / INNER).locked():
            token = secrets.token_hex(8)
            owner = {"token": token, "host": socket.gethostname(), "process": os.getpid(), "folder": str(self._run)}
            try:
                (self.path / OWNER).write_bytes(json.dumps(owner).encode())
            except OSError as error:
                raise refused(str(self.path), "it", "cannot be written to", error) from None
            if self._run is not None:
                self._token_file().write_text(token, encoding="utf-8")
            yield

    def _token_file(self) -> Path:
        assert self._run is not None
        return self._run / INNER / OWNER

    def _require_owned(self) -> None:
        """Raises SpecError if another run has taken the folder over."""
        if self._run is None or not self._token_file().is_file():
            return
        try:
            owner = parse_json((self.path / OWNER).read_bytes())
            mine = owner["token"] == self._token_file().read_text(encoding="utf-8")
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return  # cleared: nobody else claims it
        if not mine:
            other = f"{owner.get('folder')} on {owner.get('host')}"
            problem = f"belongs to the run in {other} now, which was started later"
            raise SpecError(str(self.path), problem, "let one run write there: run.checkpoints.folder")


def step_of(folder: Place) -> int | None:
    """The step that a checkpoint's folder is named after; it may have been given another name."""
    match = _COMMITTED.fullmatch(folder.name)
    return int(match[1]) if match else None


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
