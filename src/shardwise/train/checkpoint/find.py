"""Which checkpoints a path means: one, those of a folder, or those of a run."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.errors import SpecError
from shardwise.train.checkpoint.folder import CheckpointFolder
from shardwise.train.checkpoint.manifest import NAME

_REMEDY = "name a checkpoint (step-...), a folder of them, or a run's folder"


def checkpoints_at(path: Path) -> list[Path]:
    """All that are there, whole or damaged, the newest first; raises SpecError where there is none."""
    if (path / NAME).is_file():
        return [path]
    folder = _folder_at(path)
    found = [folder.of_step(step) for step in folder.present()]
    if not found:
        raise SpecError(str(path), "holds no checkpoint" if path.is_dir() else "is no folder", _REMEDY)
    return found


def newest_at(path: Path) -> Path:
    """The newest that was committed; raises SpecError where there is none."""
    if (path / NAME).is_file():
        return path
    folder = _folder_at(path)
    for step in folder.committed():
        return folder.of_step(step)
    raise SpecError(str(path), "holds no checkpoint" if path.is_dir() else "is no folder", _REMEDY)


def _folder_at(path: Path) -> CheckpointFolder:
    inner = path / "checkpoints"
    return CheckpointFolder(inner if inner.is_dir() else path)
