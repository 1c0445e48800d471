"""Manifests of checkpoints that were changed by someone with intent: the checksum is right, what it seals is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and gives it the checksum that belongs to it."""
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["checksum"]
    change(document)
    path.write_bytes(seal(document))


def seal(document: dict[str, Any]) -> bytes:
    text = json.dumps(document)
    return f'{text[:-1]}, "checksum": "{hashlib.sha256(text.encode()).hexdigest()}"}}'.encode()
