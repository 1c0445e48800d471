"""A place that a user names: a path of this machine, or an object in a store that a URI names.

`RemotePlace` has the part of `Path` that checkpoints and data need, so that one code reads both. Local paths never come
here: ``file://`` is a `Path` too.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from shardwise.run.storage.limits import LIMIT_SECONDS, USUAL, Limit
from shardwise.run.storage.stores import Content, ObjectFacts, ObjectStore, store_of
from shardwise.spec.errors import SpecError, shown

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
READ_BYTES = 8 * 2**20  # a request: large enough that its latency does not count
AHEAD = 4  # requests in flight of one that reads from begin to end


@dataclass(frozen=True)
class RemotePlace:
    """An object, or the prefix of several; ``uri`` has no slash at its end. ``limit``: of every call to its store."""

    uri: str
    limit: Limit = field(default=USUAL, compare=False)

    def within(self, limit: Limit) -> RemotePlace:
        return replace(self, limit=limit)

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> RemotePlace:
        return replace(self, uri=f"{self.uri}/{name}")

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> RemotePlace:
        return replace(self, uri=self.uri.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePlace:
        return self.parent / name

    @property
    def store(self) -> ObjectStore:
        return store_of(self.uri).within(self.limit)

    def stat(self) -> ObjectFacts:
        return self.store.facts(self.uri)

    def is_file(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return bool(self.objects())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """A store has no links."""
        return False

    def objects(self) -> dict[str, ObjectFacts]:
        """All objects below it, by their names from here on."""
        return self.store.listed(self.uri)

    def read_bytes(self) -> bytes:
        return bytes(self.store.read(self.uri))

    def read_range(self, first: int, last: int) -> Content:
        return self.store.read(self.uri, first, last)

    def write_bytes(self, content: bytes) -> None:
        self.store.put(self.uri, content)

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedReader:
        """From begin to end, several requests ahead."""
        return io.BufferedReader(_Stream(self.blocks()), READ_BYTES)

    def blocks(self) -> Iterator[Content]:
        """The same as it comes, without another copy."""
        size = self.stat().st_size
        with ThreadPoolExecutor(AHEAD) as threads:
            waiting: deque[Future[Content]] = deque()
            for first in range(0, size, READ_BYTES):
                waiting.append(threads.submit(self.read_range, first, min(first + READ_BYTES, size)))
                if len(waiting) == AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


class _Stream(io.RawIOBase):
    """Blocks as a file."""

    def __init__(self, blocks: Iterator[Content]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


Place = Path | RemotePlace


def scheme_of(text: str | PathLike[str]) -> str | None:
    """The scheme of a URI that names no path of this machine; None for a path."""
    match = _URI.match(str(text))
    return None if match is None or match[1].lower() in _LOCAL else match[1].lower()


def place_of(text: str | PathLike[str], limit_seconds: float = LIMIT_SECONDS) -> Place:
    """Where ``text``, a path or a URI, leads; ``limit_seconds`` is the longest wait for an answer of its store."""
    text = str(text)
    if (scheme := scheme_of(text)) is not None:
        if not text.removeprefix(f"{scheme}://").strip("/"):
            raise SpecError("", f"{shown(text)} names no bucket", f"write it like {scheme}://bucket/run")
        return RemotePlace(text.rstrip("/"), Limit(limit_seconds))
    return Path(unquote(urlsplit(text).path)) if _URI.match(text) else Path(text)


def read_range(place: Place, first: int, last: int) -> Content:
    """The bytes from ``first`` up to ``last``."""
    if isinstance(place, RemotePlace):
        return place.read_range(first, last)
    with place.open("rb") as file:
        file.seek(first)
        return file.read(last - first)


def absolute(text: str) -> str:
    """The same place as seen from any folder."""
    place = place_of(text)
    return str(place.resolve()) if isinstance(place, Path) else str(place)
