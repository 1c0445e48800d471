"""Folders that a run writes into, held from its start: nothing is written to one that was moved or replaced."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError

_REMEDY = "move it back, or name where it is now (--run-folder), and start it again: it resumes"


class HeldFolders:
    """Open until the process ends: so no new folder gets the identity of one that was removed."""

    def __init__(self, *paths: Path) -> None:
        self._held = {path.absolute(): os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths if path.is_dir()}

    @classmethod
    def of_run(cls, folder: RunFolder) -> HeldFolders:
        """Its own, and that of its checkpoints where they are on a disk."""
        checkpoints = folder.checkpoints.path
        return cls(folder.path, *([checkpoints] if isinstance(checkpoints, Path) else []))

    def require(self) -> None:
        """Raises SpecError for a folder that is not where it was."""
        for path, file in self._held.items():
            if not _is_at(path, file):
                raise SpecError(str(path), "was moved, removed or replaced while the run went on", _REMEDY)

    def close(self) -> None:
        for file in self._held.values():
            os.close(file)
        self._held = {}


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a disk over the network that does not answer now
        return True
