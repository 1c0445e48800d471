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
    _require_limit(_bytes_of(prefixes), limit_bytes)
    return [_copied(prefix, _root(where)) for prefix in prefixes]


def require_staging(prefixes: Sequence[Path], built_bytes: int, where: str, limit_bytes: float) -> None:
    """Before a process starts: raises SpecError for shards, with ``built_bytes`` not built yet, that have no room."""
    if where == "none":
        return
    _require_limit(_bytes_of(prefixes) + built_bytes, limit_bytes)
    root = _root(where)
    copied = _bytes_of([one for one in prefixes if not _folder(one, root).exists()]) + built_bytes
    free = shutil.disk_usage(root.parent).free
    if copied > free:
        problem = f"{readable_bytes(copied)} of shards, and {readable_bytes(free)} are free in {root.parent}"
        raise SpecError("run.data.stage", problem, "stage: none, or make room")


def _require_limit(needed_bytes: int, limit_bytes: float) -> None:
    if needed_bytes > limit_bytes:
        allowed = readable_bytes(limit_bytes)
        problem = f"{readable_bytes(needed_bytes)} of shards, more than stage_limit allows ({allowed})"
        raise SpecError("run.data.stage", problem, "stage: none, or a higher stage_limit")


def _bytes_of(prefixes: Sequence[Path]) -> int:
    return sum(path.stat().st_size for prefix in prefixes for path in _files(prefix))


def _root(where: str) -> Path:
    place = _MEMORY if where == "memory" and _MEMORY.is_dir() else Path(tempfile.gettempdir())
    return place / f"shardwise-{os.getuid()}"


def _files(prefix: Path) -> list[Path]:
    paths = [prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES]
    return [path for path in paths if path.is_file()]


def _folder(prefix: Path, root: Path) -> Path:
    """Where the copy of a pair is, as long as the pair does not change."""
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(prefix)]
    return root / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _copied(prefix: Path, root: Path) -> Path:
    files, folder = _files(prefix), _folder(prefix, root)
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
