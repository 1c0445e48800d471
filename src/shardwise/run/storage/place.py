"""A place that a user names: a path of this machine, or the URI of an object in a store.

`RemotePlace` has the part of `Path` that checkpoints and data need, so that the same code reads both. A ``file://`` URI
is a `Path`.
"""

from __future__ import annotations

import hashlib
import io
import re
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from shardwise.run.storage.fsspec_store import FsspecStore
from shardwise.run.storage.stores import (
    LIMIT_SECONDS,
    USUAL,
    Content,
    Limit,
    ObjectFacts,
    ObjectStore,
    fresh_bytes,
    refused,
    registered_store,
)
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.run import Run

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
READ_BYTES = 8 * 2**20  # of a request: large enough that its latency does not matter
AHEAD = 4  # requests in flight when an object is read from beginning to end


@dataclass(frozen=True)
class RemotePlace:
    """An object, or the prefix of several."""

    uri: str  # without a slash at its end
    limit: Limit = field(default=USUAL, compare=False)  # for every call to its store

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
        """All objects below it, by their names relative to it."""
        return self.store.listed(self.uri)

    def read_bytes(self) -> bytes:
        return bytes(self.store.read(self.uri))

    def read_range(self, first: int, last: int) -> Content:
        return self.store.read(self.uri, first, last)

    def write_bytes(self, content: bytes) -> None:
        self.store.put(self.uri, content)

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedReader:
        """A file that is read from beginning to end, several requests ahead."""
        return io.BufferedReader(_Stream(self.blocks()), READ_BYTES)

    def blocks(self) -> Iterator[Content]:
        """The content block by block, without another copy."""
        size = self.stat().st_size
        with ThreadPoolExecutor(AHEAD) as threads:
            waiting: deque[Future[Content]] = deque()
            for first in range(0, size, READ_BYTES):
                waiting.append(threads.submit(self.read_range, first, min(first + READ_BYTES, size)))
                if len(waiting) == AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def store_of(uri: str) -> ObjectStore:
    """The store that holds ``uri``; raises SpecError for an unknown scheme, or one whose package is not installed."""
    scheme, _, rest = uri.partition("://")
    return registered_store(scheme) or _fsspec_store(scheme, rest.partition("/")[0])


@lru_cache(maxsize=16)
def _fsspec_store(scheme: str, authority: str) -> ObjectStore:
    from shardwise.run.storage.fsspec_store import FsspecStore

    return FsspecStore(f"{scheme}://{authority}")


class _Stream(io.RawIOBase):
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
    """The place that a path or URI names; ``limit_seconds`` is the longest wait for an answer of its store."""
    text = str(text)
    if (scheme := scheme_of(text)) is not None:
        if not text.removeprefix(f"{scheme}://").strip("/"):
            raise SpecError("", f"{shown(text)} names no bucket", f"write it like {scheme}://bucket/run")
        return RemotePlace(text.rstrip("/"), Limit(limit_seconds))
    return Path(unquote(urlsplit(text).path)) if _URI.match(text) else Path(text)


def read_range(place: Place, first: int, last: int) -> Content:
    if isinstance(place, RemotePlace):
        return place.read_range(first, last)
    with place.open("rb") as file:
        file.seek(first)
        return file.read(last - first)


def absolute(text: str) -> str:
    """The same place as seen from any folder."""
    place = place_of(text)
    return str(place.resolve()) if isinstance(place, Path) else str(place)


# -- ranges in blocks ----------------------------------------------------------------------------------


def block_sum(content: Content) -> str:
    """The checksum of a block of data; BLAKE2b is fast even on CPUs without instructions for SHA-256."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class BlockCache:
    """The blocks used last, of any objects, up to a number of bytes."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes, self.held_bytes = limit_bytes, 0
        self._blocks: OrderedDict[tuple[str, int], Content] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, int]) -> Content | None:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def keep(self, key: tuple[str, int], block: Content) -> None:
        with self._lock:
            if key in self._blocks or len(block) > self.limit_bytes:
                return
            self._blocks[key] = block
            self.held_bytes += len(block)
            while self.held_bytes > self.limit_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self.held_bytes -= len(oldest)


class BlockReader:
    """Ranges of an object of ``size`` bytes, read in whole blocks that are compared with ``sums``, their checksums."""

    def __init__(
        self, place: RemotePlace, size: int, block_bytes: int, cache: BlockCache, sums: Sequence[str] | None = None
    ) -> None:
        self.place, self.size, self.block_bytes, self.cache, self.sums = place, size, block_bytes, cache, sums

    def read(self, first: int, last: int) -> memoryview:
        """A copy of the bytes from ``first`` up to ``last``; blocks missing from the cache are fetched concurrently."""
        last = min(last, self.size)
        if first >= last:
            return memoryview(b"")
        numbers = range(first // self.block_bytes, (last - 1) // self.block_bytes + 1)
        if len(numbers) == 1:
            blocks = [self._block(numbers[0])]
        else:
            with ThreadPoolExecutor(min(AHEAD, len(numbers))) as threads:
                blocks = list(threads.map(self._block, numbers))
        content, at = fresh_bytes(last - first), 0
        for number, block in zip(numbers, blocks):
            part = memoryview(block)[max(0, first - number * self.block_bytes) : last - number * self.block_bytes]
            content[at : at + len(part)] = part
            at += len(part)
        return content

    def _block(self, number: int) -> Content:
        key = (str(self.place), number)
        block = self.cache.get(key)
        if block is None:
            block = self._checked(number)
            self.cache.keep(key, block)
        return block

    def _checked(self, number: int) -> Content:
        """Fetches a block, and again if its checksum differs: it may have been damaged on the way."""
        first = number * self.block_bytes
        for _ in range(2):
            block = self.place.read_range(first, min(first + self.block_bytes, self.size))
            if self.sums is None or block_sum(block) == self.sums[number]:
                return block
        raise SpecError(str(self.place), f"is damaged near byte {first:,}", "copy or build it again")


# -- checks before a run starts: whether its stores can be reached, and written to -------------------

_PROBE_RETRIES = 1
PROBE_SECONDS = 60.0  # for a small object, while somebody waits for the run to start
_IN_ONE_PROCESS = ("memory",)


def require_stores(run: Run) -> None:
    """Raises SpecError if a run cannot read from, or keep checkpoints in, a store that it names."""
    limit_seconds = min(PROBE_SECONDS, run.timeouts.checkpoint)
    for kind, names in (("shards", run.data.shards), ("validation", run.data.validation)):
        for number, name in enumerate(names):
            _require_readable(f"run.data.{kind}[{number}]", place_of(name, limit_seconds))
    if run.start_from is not None:
        _require_readable("run.start_from", place_of(run.start_from, limit_seconds))
    if run.checkpoints.folder is not None:
        place = place_of(run.checkpoints.folder, limit_seconds)
        if isinstance(place, RemotePlace):
            require_writable_store(place, "run.checkpoints.folder")


def _require_readable(field: str, place: Place) -> None:
    if isinstance(place, RemotePlace):
        require_shared(place, field)
        try:
            FsspecStore(place.uri, _PROBE_RETRIES, place.limit).listed(place.uri)
        except OSError as error:
            raise refused(field, place.uri, "cannot be read", error) from None


def require_writable_store(place: RemotePlace, field: str) -> None:
    """Writes, reads and deletes a small object below ``place``; raises SpecError with what does not work."""
    require_shared(place, field)
    probe, content = str(place / f".probe-{secrets.token_hex(4)}"), secrets.token_bytes(32)
    store = FsspecStore(str(place), _PROBE_RETRIES, place.limit)
    doing = "written to"
    try:
        store.put(probe, content)
        doing = "read"
        returned = store.read(probe, 0, len(content))
        doing = "deleted from"
        store.delete([probe])
    except OSError as error:
        raise refused(field, str(place), f"cannot be {doing}", error) from None
    if returned != content:
        problem = f"{place} gives back other bytes than were written"
        raise SpecError(field, problem, "this store cannot keep checkpoints: choose another")


def require_shared(place: RemotePlace, field: str) -> None:
    """Raises SpecError for a store that only one process sees."""
    scheme = str(place).partition("://")[0]
    if scheme in _IN_ONE_PROCESS:
        problem = f"{place} is in the memory of one process, and every rank is one of its own"
        raise SpecError(field, problem, "name a path, or a store that all ranks reach")
