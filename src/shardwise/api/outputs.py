"""Files that a command writes: checked before it starts, and written with one line of error."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.spec.errors import SpecError, shown


def require_writable(path: Path, flag: str) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise SpecError(flag, f"{path} cannot be written", "give another name")


def write_text(path: str | Path, text: str, flag: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise not_written(path, error, flag) from None


def not_written(path: str | Path, error: Exception, flag: str) -> SpecError:
    reason = getattr(error, "strerror", None) or "not a path"
    return SpecError(flag, f"{shown(str(path), 300)} cannot be written ({reason})", "give another name")
