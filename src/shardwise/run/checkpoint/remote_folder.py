"""A folder of checkpoints in an object store, where nothing can be renamed: the manifest, written last, commits.

Every save has shards of its own names, so that no late writer touches what a manifest names; one that replaces another
of the same step puts its manifest over the other's, in one request. A store has no locks either: whoever started last
owns the folder, and an earlier run that is still alive finds out before it commits.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from shardwise.interop.companions import KEPT_IN, companions
from shardwise.run.checkpoint.folder import INNER, CheckpointFolder
from shardwise.run.checkpoint.manifest import NAME
from shardwise.run.storage.limits import Limit
from shardwise.run.storage.place import RemotePlace
from shardwise.run.storage.probe import refused
from shardwise.run.storage.stores import ObjectFacts
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json

OWNER = ".owner"
_OBJECT = re.compile(r"step-(\d{8,})/([^/]+)")


class RemoteCheckpointFolder(CheckpointFolder):
    """``run`` is the local folder of the run that writes here; it remembers who owns the checkpoints."""

    path: RemotePlace

    def __init__(self, path: RemotePlace, run: Path | None = None) -> None:
        self.path, self._run = path, run

    def within(self, limit: Limit) -> RemoteCheckpointFolder:
        return RemoteCheckpointFolder(self.path.within(limit), self._run)

    def of_step(self, step: int) -> RemotePlace:
        return self.path / f"step-{step:08d}"

    def _objects(self) -> dict[int, dict[str, ObjectFacts]]:
        """The objects of every step, by their names."""
        by_step: dict[int, dict[str, ObjectFacts]] = {}
        for name, facts in self.path.objects().items():
            if match := _OBJECT.fullmatch(name):
                by_step.setdefault(int(match[1]), {})[match[2]] = facts
        return by_step

    def present(self) -> list[int]:
        return sorted(self._objects(), reverse=True)

    def committed(self) -> list[int]:
        return sorted((step for step, names in self._objects().items() if NAME in names), reverse=True)

    def written_ns(self, step: int) -> int:
        try:
            return (self.of_step(step) / NAME).stat().st_mtime_ns
        except OSError:
            return 0

    def seal(self, step: int, manifest: bytes, keeps: set[str], *, replace: bool = True) -> RemotePlace:
        """All shards are there: the manifest makes a checkpoint of them. What else has its step goes.

        Raises SpecError if another run owns the folder by now.
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
        """Takes the folder over; on this machine a run that is alive keeps others out, as with local checkpoints."""
        with nullcontext() if self._run is None else CheckpointFolder(self._run / INNER).locked():
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
            return  # somebody cleared it: nobody else claims it
        if not mine:
            other = f"{owner.get('folder')} on {owner.get('host')}"
            problem = f"belongs to the run in {other} now, which was started later"
            raise SpecError(str(self.path), problem, "let one run write there: run.checkpoints.folder")
