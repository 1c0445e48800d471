"""The files of the page, read once and compressed once; nothing else of the machine is ever served."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).with_name("static")
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """A file as it is sent: compressed, with its type and a tag that changes with its content."""

    kind: str
    compressed: bytes
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """By the name in the address; a name that is not here does not exist."""
    return {path.name: _asset(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}


def _asset(path: Path) -> Asset:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return Asset(_KINDS[path.suffix], gzip.compress(content, 9, mtime=0), tag)
