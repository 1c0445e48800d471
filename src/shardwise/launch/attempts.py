"""The folders of attempts: what each process of each start has said. The last few are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shardwise.spec.errors import SpecError

KEPT = 10
ROOM_BYTES = 2**18
_NAME = re.compile(r"attempt-(\d+)")


def new_folder(folder: Path) -> Path:
    """A folder for one attempt that nothing else has used; the oldest go."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            used = sorted(int(match[1]) for one in folder.iterdir() if (match := _NAME.fullmatch(one.name)))
            own = folder / _name(used[-1] + 1 if used else 1)
            try:
                own.mkdir()
            except FileExistsError:  # another run in the same folder was quicker
                continue
            for number in used[: -(KEPT - 1)]:
                shutil.rmtree(folder / _name(number), ignore_errors=True)
            _require_room(own)
            return own.resolve()
    except OSError as error:
        raise SpecError("", f"cannot write to {folder}: {error.strerror}", "name another folder") from None


def _name(number: int) -> str:
    return f"attempt-{number:04d}"


def _require_room(folder: Path) -> None:
    """Raises OSError where the disk has no place left for what the ranks will have to say."""
    probe = folder / "room"
    try:
        probe.write_bytes(bytes(ROOM_BYTES))
    finally:
        probe.unlink(missing_ok=True)
