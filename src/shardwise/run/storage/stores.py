"""What a store of objects has to do, and which one a URI means.

An object appears whole or not at all, and has no other name later: there is no rename. Every failure is an `OSError`
whose text is one line.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Self

from shardwise.run.storage.limits import Limit

Blocks = Callable[[], Iterator[memoryview]]  # the content of an object, from its begin each time it is called
Content = bytes | memoryview


def fresh_bytes(size: int) -> memoryview:
    """To be filled. numpy asks for large pages, of which the first use costs a third of that of small ones."""
    import numpy as np

    return np.empty(size, np.uint8).data


@dataclass(frozen=True)
class ObjectFacts:
    """Of one object; named as in `os.stat_result`."""

    st_size: int
    st_mtime_ns: int = 0


class StoreError(OSError):
    """A store did not do what it was asked to, though it was asked several times."""

    def __init__(self, uri: str, problem: str) -> None:
        super().__init__(errno.EIO, " ".join(problem.split()), uri)


class ObjectStore(Protocol):
    """Objects by their URIs. What is absent raises FileNotFoundError; what takes too long, StoreError."""

    def within(self, limit: Limit) -> Self:
        """The same store, in which no call takes longer, tries included."""

    def put(self, uri: str, content: bytes) -> None: ...

    def upload(self, uri: str, content: Blocks) -> None:
        """A large object; ``content`` is asked for again if the store fails."""

    def read(self, uri: str, first: int = 0, last: int | None = None) -> Content:
        """All of the bytes from ``first`` up to ``last``."""

    def facts(self, uri: str) -> ObjectFacts: ...

    def listed(self, uri: str) -> dict[str, ObjectFacts]:
        """All objects below a prefix, by their names from there on."""

    def delete(self, uris: Iterable[str]) -> None:
        """What is absent already is passed over."""


_OF_PROCESS: dict[str, ObjectStore] = {}


def store_of(uri: str) -> ObjectStore:
    """Raises SpecError for an unknown scheme, or one whose package is not installed."""
    scheme, _, rest = uri.partition("://")
    return _OF_PROCESS.get(scheme) or _store(scheme, rest.partition("/")[0])


def register_store(scheme: str, store: ObjectStore) -> None:
    """From now on every URI of a scheme means ``store`` in this process."""
    _OF_PROCESS[scheme] = store


@lru_cache(maxsize=16)
def _store(scheme: str, authority: str) -> ObjectStore:
    from shardwise.run.storage.fsspec_store import FsspecStore

    return FsspecStore(f"{scheme}://{authority}")
