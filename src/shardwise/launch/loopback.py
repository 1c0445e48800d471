"""Servers on loopback: their socket, whom they answer, and how many connections they hold for how long.

A page of another origin can make a browser send requests to loopback, and a name that resolves to loopback can make it
read the answers (DNS rebinding): the Host and the Origin of every request are compared with our own address.
"""

from __future__ import annotations

import errno
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shardwise.spec.errors import SpecError, shown

LOOPBACK = "127.0.0.1"
_NAMES = frozenset({LOOPBACK, "localhost", "[::1]"})
# Any port: it may be forwarded from another machine. Whoever made a name of his own resolve to loopback has that name.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?", re.IGNORECASE)
MOST_CONNECTIONS = 16  # a scraper has one or two
MOST_SECONDS = 10.0  # to send a request; Prometheus' own default for a whole scrape (scrape_timeout)


def bound(port: int, field: str) -> socket.socket:
    """A socket on loopback; port 0 takes a free one. Raises SpecError where the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        remedy = "name another port, or 0 for any that is free"
        raise SpecError(field, f"{LOOPBACK}:{port} {reason}", remedy) from None
    return listening


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered, as the status and the line that say so."""

    status: int
    field: str
    problem: str
    remedy: str

    @property
    def text(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {"error": {"field": self.field, "problem": self.problem, "remedy": self.remedy, "text": self.text}}


def refusal(hosts: Sequence[str], origins: Sequence[str], named: Collection[str] = ()) -> Refusal | None:
    """For the values of a request's Host and Origin; ``named``: other hosts under which the server is reached."""
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None or match[1].lower() not in _NAMES.union(name.lower() for name in named):
        problem = f"{shown(', '.join(hosts))} is not this server"
        return Refusal(421, "host", problem, "use the address that it printed")
    if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
        return Refusal(403, "origin", f"{shown(', '.join(origins))} may not use this server", "open its own page")
    return None


class LoopbackServer(ThreadingHTTPServer):
    """Bound when it is made. A few connections at a time, a thread each, with a limit on the time of a request.

    Where all are in use, the one that has been sending its request for the longest time is cut: whoever asks at once
    is answered, however many are slow.
    """

    daemon_threads = True
    request_queue_size = 128
    most_seconds = MOST_SECONDS

    def __init__(self, port: int, field: str, handler: type[BaseHTTPRequestHandler]) -> None:
        listening = bound(port, field)
        super().__init__((LOOPBACK, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, listening.getsockname()
        self.server_activate()
        self._changed = threading.Condition()
        self._open: set[Any] = set()
        self._reading: dict[Any, float] = {}  # whose request has not come yet, and since when; oldest first

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if self._full() and self._cut_oldest():
                self._changed.wait_for(lambda: not self._full(), timeout=1)
            refused = self._full()
            if not refused:
                self._open.add(request)
                self._reading[request] = time.monotonic()
        if refused:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def request_came(self, request: Any) -> None:
        """Called by the handler: what it takes from here is our own time."""
        with self._changed:
            self._reading.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            super().shutdown_request(request)
            self._reading.pop(request, None)
            self._open.discard(request)
            self._changed.notify()

    def service_actions(self) -> None:
        """Called about twice a second, by the thread that accepts."""
        self._cut_all(time.monotonic() - self.most_seconds)

    def server_close(self) -> None:
        super().server_close()
        self._cut_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ended early is nobody's fault here; the terminal is the progress bar's."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _full(self) -> bool:
        return len(self._open) >= MOST_CONNECTIONS

    def _cut_all(self, before: float = math.inf) -> None:
        with self._changed:
            while self._cut_oldest(before):
                pass

    def _cut_oldest(self, before: float = math.inf) -> bool:
        """Ends the connection whose request is the oldest, if it began ``before``; its thread then closes it."""
        request, begun = next(iter(self._reading.items()), (None, math.inf))
        if request is None or begun >= before:
            return False
        del self._reading[request]
        with suppress(OSError):  # it is gone already
            request.shutdown(socket.SHUT_RDWR)
        return True
