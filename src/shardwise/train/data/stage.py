"""Shards copied to where reading is quick before training: to memory, or from a shared disk to a local one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes

_SUFFIXES = (".bin", ".mask", ".idx")  # the index last: it makes the pair
_MEMORY = Path("/dev/shm")


def staged(prefixes: Sequence[Path], where: str, limit_bytes: float) -> list[Path]:
    """The same pairs under names in the place that ``where`` says; copied by the first process that asks.

    Copies stay for the next start of the run: they are found again as long as the original does not change.
    """
    if where == "none":
        return list(prefixes)
    files = [path for prefix in prefixes for path in _files(prefix)]
    needed = sum(path.stat().st_size for path in files)
    if needed > limit_bytes:
        problem = f"{readable_bytes(needed)} of shards, more than stage_limit allows ({readable_bytes(limit_bytes)})"
        raise SpecError("run.data.stage", problem, "stage: none, or a higher stage_limit")
    root = _MEMORY if where == "memory" and _MEMORY.is_dir() else Path(tempfile.gettempdir())
    return [_copied(prefix, root / f"shardwise-{os.getuid()}") for prefix in prefixes]


def _files(prefix: Path) -> list[Path]:
    paths = [prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES]
    return [path for path in paths if path.is_file()]


def _copied(prefix: Path, root: Path) -> Path:
    files = _files(prefix)
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    folder = root / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in files:
                if not (folder / path.name).exists():
                    part = folder / f"{path.name}.part"
                    shutil.copyfile(path, part)
                    part.rename(folder / path.name)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        problem = f"{prefix} could not be copied to {root} ({error.strerror})"
        raise SpecError("run.data.stage", problem, "stage: none") from None
    return folder / prefix.name
