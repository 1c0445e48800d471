"""The memory of a run's nodes as a store: what a rank puts there is kept on its own node and on the next.

Losing a rank or a node loses no object; losing two neighbouring nodes loses what both kept. The processes that hold the
objects (`launch/keeper.py`) are started beside the ranks.
"""

from __future__ import annotations

import copy
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from shardwise.run.storage.stores import (
    USUAL,
    Blocks,
    Limit,
    NoAnswer,
    ObjectFacts,
    PendingAnswer,
    StoreError,
    fresh_bytes,
    in_time,
)

_Answer = TypeVar("_Answer")
KEEPER = "keeper"  # the scheme
_FRAME = struct.Struct("<I")  # as in `launch/keeper.py`
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 60.0
_BUFFER_BYTES = 2**20
MOST_READ_BYTES = 2**30


class KeeperStore:
    """The store as seen from ``node``; ``file`` lists the current keepers, since lost ones are replaced.

    A restart reads every shard twice, first for its checksum: what was read is cached for the second time, up to
    ``MOST_READ_BYTES``, until the rank saves again.
    """

    def __init__(self, file: Path, node: int) -> None:
        self.file, self.node, self.limit = file, node, USUAL
        self._read: dict[tuple[str, int, int], memoryview] = {}
        self._lock = threading.Lock()

    def within(self, limit: Limit) -> Self:
        other = copy.copy(self)
        other.limit = limit
        return other

    def _keepers(self) -> tuple[str, list[str]]:
        """The secret, and the addresses: this node's first, then the one that keeps its copies, then all others.

        A node with several groups of ranks is listed several times; duplicates are dropped, since a copy on the same
        node would be worthless.
        """
        document = json.loads(self.file.read_text(encoding="utf-8"))
        addresses = list(document["keepers"])
        begin = self.node % len(addresses)
        return str(document["secret"]), list(dict.fromkeys([*addresses[begin:], *addresses[:begin]]))

    def put(self, uri: str, content: bytes) -> None:
        """Puts a small object on every node that answers; the first two must."""
        self._in_time(uri, lambda _: self._put(uri, content))

    def _put(self, uri: str, content: bytes) -> None:
        secret, addresses = self._keepers()
        for number, address in enumerate(addresses):
            try:
                self._sent(uri, secret, [address], iter([memoryview(content)]))
            except OSError:
                if number < 2:
                    raise

    def upload(self, uri: str, content: Blocks) -> None:
        with self._lock:
            self._read.clear()
        secret, addresses = self._keepers()
        self._in_time(uri, lambda waiting: self._sent(uri, secret, addresses[:2], waiting.uploaded(content())))

    def _sent(self, uri: str, secret: str, addresses: list[str], blocks: Iterator[memoryview]) -> None:
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(_asked(address, secret, "put", key=uri)) for address in addresses]
                for block in blocks:
                    for file in files:
                        file.write(_FRAME.pack(len(block)))
                        file.write(block)
                for file in files:
                    file.write(_FRAME.pack(0))
                    file.flush()
                    _answer(file)
        except OSError as error:
            raise StoreError(uri, f"a keeper did not take it ({error.strerror or error})") from None

    def read(self, uri: str, first: int = 0, last: int | None = None) -> memoryview:
        if last is None:
            return self._in_time(uri, lambda _: self._fetched(uri, first, last))
        key = (uri, first, last)
        with self._lock:
            content = self._read.pop(key, None)
        if content is not None:
            return content
        content = self._in_time(uri, lambda _: self._fetched(uri, first, last))
        with self._lock:
            if sum(map(len, self._read.values())) + len(content) <= MOST_READ_BYTES:
                self._read[key] = content
        return content

    def _fetched(self, uri: str, first: int, last: int | None) -> memoryview:
        secret, addresses = self._keepers()
        for address in addresses:
            try:
                with _asked(address, secret, "get", key=uri, first=first, last=last) as file:
                    content = _content(file)
            except OSError:
                continue
            if content is not None:
                if last is not None and len(content) != last - first:
                    raise StoreError(uri, f"has {len(content):,} of {last - first:,} bytes")
                return content
        raise FileNotFoundError(0, "is in no node's memory", uri)

    def facts(self, uri: str) -> ObjectFacts:
        facts = self._in_time(uri, lambda _: self._below(uri)).get(uri)
        if facts is None:
            raise FileNotFoundError(0, "is in no node's memory", uri)
        return facts

    def listed(self, uri: str) -> dict[str, ObjectFacts]:
        prefix = f"{uri.rstrip('/')}/"
        objects = self._in_time(uri, lambda _: self._below(prefix))
        return {key[len(prefix) :]: facts for key, facts in objects.items()}

    def _below(self, prefix: str) -> dict[str, ObjectFacts]:
        """The objects below a prefix, on all nodes that answer."""
        secret, addresses = self._keepers()
        objects: dict[str, ObjectFacts] = {}
        for address in addresses:
            try:
                with _asked(address, secret, "below", prefix=prefix) as file:
                    there = _answer(file)["objects"]
            except OSError:
                continue
            objects |= {key: ObjectFacts(size, at) for key, (size, at) in there.items()}
        return objects

    def delete(self, uris: Iterable[str]) -> None:
        if keys := list(uris):
            self._in_time(keys[0], lambda _: self._delete(keys))

    def _delete(self, keys: list[str]) -> None:
        secret, addresses = self._keepers()
        for address in addresses:
            try:
                with _asked(address, secret, "delete", keys=keys) as file:
                    _answer(file)
            except OSError:
                continue

    def _in_time(self, uri: str, call: Callable[[PendingAnswer[_Answer]], _Answer]) -> _Answer:
        try:
            return in_time(uri, self.limit, call)
        except NoAnswer as error:
            raise StoreError(uri, str(error)) from None


@contextmanager
def _asked(address: str, secret: str, what: str, **how: Any) -> Iterator[BufferedRWPair]:
    """Sends a request; its content and the answer go through the file."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), _CONNECT_SECONDS) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        with connection.makefile("rwb", _BUFFER_BYTES) as file:
            file.write(f"{secret}\n{json.dumps({'what': what, 'how': how})}\n".encode())
            file.flush()
            yield cast(BufferedRWPair, file)


def _answer(file: BufferedRWPair) -> dict[str, Any]:
    line = file.readline()
    if not line:
        raise ConnectionError("the keeper is gone")
    return dict(json.loads(line))


def _content(file: BufferedRWPair) -> memoryview | None:
    """What a keeper has of an object; None if nothing."""
    size = _answer(file).get("size")
    if size is None:
        return None
    content = fresh_bytes(size)
    if file.readinto(content) != size:
        raise ConnectionError("the keeper is gone")
    return content
