"""HTTP servers on loopback: their socket, which requests they answer, and limits on connections and time.

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
# Any port is accepted: it may be forwarded from another machine. A rebinding attacker is recognised by the host name.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?", re.IGNORECASE)
MOST_CONNECTIONS = 16  # a scraper has one or two
MOST_SECONDS = 10.0  # to send a request; Prometheus' own default for a whole scrape (scrape_timeout)


def bound(port: int, field: str) -> socket.socket:
    """A socket bound to loopback; port 0 takes any free one. Raises SpecError if the port is taken."""
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
    """Why a request is not answered: an HTTP status, and the parts of the line that explains it."""

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
    """Checks a request's Host and Origin headers; ``named`` are further host names of this server."""
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None or match[1].lower() not in _NAMES.union(name.lower() for name in named):
        problem = f"{shown(', '.join(hosts))} is not this server"
        return Refusal(421, "host", problem, "use the address that it printed")
    if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
        return Refusal(403, "origin", f"{shown(', '.join(origins))} may not use this server", "open its own page")
    return None


class LoopbackServer(ThreadingHTTPServer):
    """Bound on creation. Serves a few connections at a time, one thread each, with a time limit per request.

    When all are in use, the connection that has been sending its request for longest is cut: slow clients cannot keep a
    quick one from being answered.
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
        self._reading: dict[Any, float] = {}  # connections whose request is incomplete, and since when; oldest first

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
        """Called by the handler when a request is complete: from here on its time limit no longer applies."""
        with self._changed:
            self._reading.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            super().shutdown_request(request)
            self._reading.pop(request, None)
            self._open.discard(request)
            self._changed.notify()

    def service_actions(self) -> None:
        """Called about twice a second by the accepting thread."""
        self._cut_all(time.monotonic() - self.most_seconds)

    def server_close(self) -> None:
        super().server_close()
        self._cut_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that ended early: the terminal belongs to the progress bar."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _full(self) -> bool:
        return len(self._open) >= MOST_CONNECTIONS

    def _cut_all(self, before: float = math.inf) -> None:
        with self._changed:
            while self._cut_oldest(before):
                pass

    def _cut_oldest(self, before: float = math.inf) -> bool:
        """Cuts the oldest incomplete request, if it began ``before``; its thread then closes the connection."""
        request, begun = next(iter(self._reading.items()), (None, math.inf))
        if request is None or begun >= before:
            return False
        del self._reading[request]
        with suppress(OSError):  # it is gone already
            request.shutdown(socket.SHUT_RDWR)
        return True
