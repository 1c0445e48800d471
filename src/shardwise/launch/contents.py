"""What a run's data was when it began, kept in its folder: shards of the same name may become others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from shardwise.spec.job import Job
from shardwise.train.run_folder import RunFolder

_SUFFIXES = (".bin", ".idx", ".mask")
_BLOCKS, _BLOCK_BYTES = 64, 2**16


def contents_of_data(job: Job) -> dict[str, str]:
    """A checksum of each shard that is here: of its size and 64 blocks of 64 KiB, since all of it may be terabytes."""
    found = {}
    for name in job.run.data.shards:
        files = [path for suffix in _SUFFIXES if (path := Path(f"{name}{suffix}")).is_file()]
        if files:
            found[name] = _checksum(files)
    return found


def record_data(job: Job, folder: RunFolder) -> None:
    folder.data.write_text(json.dumps({"shards": contents_of_data(job)}, indent=1) + "\n", encoding="utf-8")


def recorded_data(folder: RunFolder) -> dict[str, str]:
    """Nothing where nothing was recorded, or the record is damaged."""
    try:
        found = json.loads(folder.data.read_text(encoding="utf-8"))["shards"]
        return {str(name): str(content) for name, content in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _checksum(files: list[Path]) -> str:
    checksum = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        checksum.update(f"{path.suffix} {size} ".encode())
        apart = max(_BLOCK_BYTES, size // _BLOCKS)
        with path.open("rb") as file:
            for at in range(0, size, apart):
                file.seek(at)
                checksum.update(file.read(_BLOCK_BYTES))
    return checksum.hexdigest()
