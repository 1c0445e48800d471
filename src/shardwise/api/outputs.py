"""Output files of a command, checked before it starts."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.spec.errors import SpecError


def require_writable(path: Path, flag: str) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise SpecError(flag, f"{path} cannot be written", "give another name")
