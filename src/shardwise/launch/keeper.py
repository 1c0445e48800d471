"""A process that keeps objects in the memory of a node: it outlives the ranks, and ends with its launcher.

It runs as a script of the standard library alone (`python -I -S keeper.py`), reads the address to listen at and the
run's secret from the first line of its input, prints its port, and ends when its input closes. Each connection carries
one request: the secret, a line of JSON, and the content of the object.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import signal
import socketserver
import struct
import sys
import threading
import time
from io import BufferedIOBase
from typing import Any

FRAME = struct.Struct("<I")  # the length of a piece of an object; 0 ends it
_SECRET_SECONDS = 10.0  # to send the secret: a client that does not know it must not hold a thread
MARK = b"shardwise-keeper "  # begins the line with the port


class KeptObjects:
    """Objects by key; an object becomes visible once all of it has arrived."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[list[bytes], int, int]] = {}  # pieces, size, time of arrival in ns
        self._lock = threading.Lock()

    def put(self, key: str, pieces: list[bytes]) -> None:
        with self._lock:
            self._objects[key] = (pieces, sum(map(len, pieces)), time.time_ns())

    def get(self, key: str) -> tuple[list[bytes], int, int] | None:
        with self._lock:
            return self._objects.get(key)

    def below(self, prefix: str) -> dict[str, tuple[int, int]]:
        with self._lock:
            return {key: kept[1:] for key, kept in self._objects.items() if key.startswith(prefix)}

    def delete(self, keys: list[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)


class _Request(socketserver.StreamRequestHandler):
    server: _KeeperServer
    rbufsize = 2**20

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, ValueError, struct.error):
            self.connection.settimeout(_SECRET_SECONDS)
            secret = self.rfile.readline(len(self.server.secret) + 1).strip()
            if not hmac.compare_digest(secret, self.server.secret):
                return
            self.connection.settimeout(None)
            asked = json.loads(self.rfile.readline())
            getattr(self, f"_{asked['what']}", self._unknown)(**asked["how"])

    def _put(self, key: str) -> None:
        pieces = []
        while size := FRAME.unpack(_exactly(self.rfile, FRAME.size))[0]:
            pieces.append(_exactly(self.rfile, size))
        self.server.objects.put(key, pieces)
        self._answer(done=True)

    def _get(self, key: str, first: int, last: int | None) -> None:
        kept = self.server.objects.get(key)
        if kept is None:
            return self._answer(missing=True)
        pieces, size, _ = kept
        last = size if last is None else min(last, size)
        self._answer(size=max(0, last - first))
        at = 0
        for piece in pieces:
            if at < last and at + len(piece) > first:
                self.wfile.write(memoryview(piece)[max(0, first - at) : last - at])
            at += len(piece)
        return None

    def _below(self, prefix: str) -> None:
        self._answer(objects=self.server.objects.below(prefix))

    def _delete(self, keys: list[str]) -> None:
        self.server.objects.delete(keys)
        self._answer(done=True)

    def _unknown(self, **_: Any) -> None:
        self._answer(unknown=True)

    def _answer(self, **values: Any) -> None:
        self.wfile.write(json.dumps(values).encode() + b"\n")


def _exactly(file: BufferedIOBase, size: int) -> bytes:
    """Reads ``size`` bytes; raises ConnectionError if the writer went away: a partial object is dropped."""
    content = file.read(size)
    if len(content) != size:
        raise ConnectionError("the writer is gone")
    return content


class _KeeperServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, secret: bytes) -> None:
        self.secret, self.objects = secret, KeptObjects()
        super().__init__((host, 0), _Request)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    server = _KeeperServer(given["host"], given["secret"].encode())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"{MARK.decode()}{server.server_address[1]}", flush=True)
    sys.stdin.read()
    os._exit(0)  # at once: nobody needs what it keeps


if __name__ == "__main__":
    main()
