"""The files of the page, read once and compressed once; nothing else of the machine is ever served."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardwise.report.html import asset as report_asset

_FOLDER = Path(__file__).with_name("static")
_CHARTS = ("chart.umd.min.js", "charts.js", "charts.css")  # of the report: both draw the same pictures
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
    own = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}
    drawing = {name: report_asset(name).encode() for name in _CHARTS}
    return {name: _asset(name, content) for name, content in (own | drawing).items()}


def _asset(name: str, content: bytes) -> Asset:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return Asset(_KINDS[Path(name).suffix], gzip.compress(content, 9, mtime=0), tag)
