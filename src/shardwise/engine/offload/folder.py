"""The file that offloading to a disk uses. It has no name, so it disappears with the process that has it open."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO

from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

FIELD = "strategy.offload.folder"


def folder_of(folder: str | None) -> Path:
    return Path(folder or tempfile.gettempdir())


def nameless_file(folder: Path) -> IO[bytes]:
    """Raises SpecError if none can be made."""
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)
    except OSError as error:
        raise SpecError(FIELD, f"{folder}: {error.strerror or error}", "make it, or name another folder") from None


def may_offload(job: Job) -> bool:
    """Whether ranks need a store: a share of `auto` may start to be offloaded later."""
    return job.strategy.offload.any or "optimizer" in job.run.automatic


def require_folder(job: Job) -> None:
    """Raises SpecError if a rank could not make its file; call before any process starts."""
    offload = job.strategy.offload
    if may_offload(job) and offload.target == "nvme":
        nameless_file(folder_of(offload.folder)).close()
