"""Folders that a run writes into, held open from its start, so that it notices when one is moved or replaced."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError

_REMEDY = "move it back, or name where it is now (--run-folder), and start it again: it resumes"


class HeldFolders:
    """Open folders: as long as one is open, no new folder can get its inode number."""

    def __init__(self, *paths: Path) -> None:
        self._held = {path.absolute(): os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths if path.is_dir()}

    @classmethod
    def of_run(cls, folder: RunFolder) -> HeldFolders:
        """The run's folder, and that of its checkpoints if it is on a disk."""
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
    except OSError:  # a network disk that does not answer now
        return True
