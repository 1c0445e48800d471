"""The interface of an object store, and the stores that this process has registered for a scheme.

An object appears whole or not at all and is never renamed. Every failure is an `OSError` with a one-line text.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from shardwise.run.storage.limits import Limit
from shardwise.spec.errors import SpecError

Blocks = Callable[[], Iterator[memoryview]]  # each call yields the whole content of an object again
Content = bytes | memoryview


def fresh_bytes(size: int) -> memoryview:
    """Uninitialised memory. numpy asks for huge pages: touching them first costs a third of what small pages do."""
    import numpy as np

    return np.empty(size, np.uint8).data


@dataclass(frozen=True)
class ObjectFacts:
    """Size and time of an object; the fields are named as in `os.stat_result`."""

    st_size: int
    st_mtime_ns: int = 0


class StoreError(OSError):
    """A store failed to do what was asked, after all retries."""

    def __init__(self, uri: str, problem: str) -> None:
        super().__init__(errno.EIO, " ".join(problem.split()), uri)


def refused(field: str, name: str, what: str, error: OSError) -> SpecError:
    """A store's error as an error of the user's ``field``, with what to check."""
    problem = f"{name} {what} ({error.strerror or error})"
    if isinstance(error, PermissionError):
        return SpecError(field, problem, "check the credentials, and what they allow")
    if isinstance(error, FileNotFoundError):
        return SpecError(field, problem, "create the bucket, or check its name")
    return SpecError(field, problem, "check the endpoint and the network")


class ObjectStore(Protocol):
    """Objects by URI. A missing object raises FileNotFoundError, a call that takes too long StoreError."""

    def within(self, limit: Limit) -> Self:
        """The same store with a limit on every call, retries included."""

    def put(self, uri: str, content: bytes) -> None: ...

    def upload(self, uri: str, content: Blocks) -> None:
        """Stores a large object; ``content`` is called again for every retry."""

    def read(self, uri: str, first: int = 0, last: int | None = None) -> Content:
        """The bytes from ``first`` up to ``last``, all of them."""

    def facts(self, uri: str) -> ObjectFacts: ...

    def listed(self, uri: str) -> dict[str, ObjectFacts]:
        """All objects below a prefix, by their names relative to it."""

    def delete(self, uris: Iterable[str]) -> None:
        """Deletes objects; missing ones are ignored."""


_REGISTERED: dict[str, ObjectStore] = {}


def register_store(scheme: str, store: ObjectStore) -> None:
    """From now on every URI of ``scheme`` means ``store`` in this process."""
    _REGISTERED[scheme] = store


def registered_store(scheme: str) -> ObjectStore | None:
    return _REGISTERED.get(scheme)
