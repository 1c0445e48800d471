"""A real object server (moto) in a process of its own, behind a proxy that can fail as a test tells it to."""

from __future__ import annotations

import atexit
import importlib.util
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

from required import require

BUCKET = "runs"
_START_SECONDS = 60
_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


@dataclass
class StoreFault:
    """The next ``times`` requests of ``method`` whose path and query match ``path``.

    ``what``: a status such as 500 or 403, ``slow`` (one second later), ``short`` (an answer of half its length),
    ``lose`` (it is answered, but half of what was sent is not kept), ``silent`` (it is never answered), ``trickle``
    (the answer comes at a byte a second). Any of ``method``, separated by ``|``.
    """

    method: str
    path: str
    what: str
    times: int = 1
    met: int = 0

    def meets(self, method: str, path: str) -> bool:
        if self.met >= self.times or method not in self.method.split("|") or not re.search(self.path, path):
            return False
        self.met += 1
        return True


@dataclass
class ObjectServer:
    """``port`` is the proxy's."""

    port: int
    behind: int
    faults: list[StoreFault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def uri(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    @property
    def environment(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    @contextmanager
    def failing(self, *faults: StoreFault) -> Iterator[None]:
        self.faults = list(faults)
        try:
            yield
        finally:
            self.faults = []


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Emptied, with its bucket, and the environment in which s3:// means it; skips where it is not installed."""
    missing = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]
    require("s3", f"no object server here: {', '.join(missing)} missing (make installs them)" if missing else None)
    server = _started()
    _send(server.behind, "POST", "/moto-api/reset", b"", {})
    _send(server.behind, "PUT", f"/{BUCKET}", b"", {})
    server.requests.clear()
    with mock.patch.dict("os.environ", server.environment):
        yield server


@cache
def _started() -> ObjectServer:
    """One for all tests of a process: clients, which fsspec keeps, would go on asking one that is gone."""
    moto = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stderr=subprocess.PIPE, text=True
    )
    atexit.register(moto.kill)
    server = ObjectServer(0, _port_of(moto))
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    proxy.daemon_threads = True
    server.port = proxy.server_address[1]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    return server


def _port_of(moto: subprocess.Popen[str]) -> int:
    """It picks a free one, and says which."""
    assert moto.stderr is not None
    for line in moto.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            threading.Thread(target=moto.stderr.read, daemon=True).start()
            return int(found[1])
    raise AssertionError("moto did not start")


def _send(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()


def _handler(server: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answered(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.requests.append((self.command, self.path))
            fault = next((one for one in server.faults if one.meets(self.command, self.path)), None)
            what = "" if fault is None else fault.what
            if what.isdecimal():
                code = {"403": "InvalidAccessKeyId", "503": "SlowDown"}.get(what, "InternalError")
                text = f"<Error><Code>{code}</Code><Message>as the test told it</Message></Error>"
                return self._send(int(what), [("Content-Type", "application/xml")], text.encode())
            if what == "slow":
                time.sleep(1)
            if what in ("silent", "trickle"):
                return self._unanswered(fault, b"HTTP/1.1 200 OK\r\n" * 1000 if what == "trickle" else b"")
            headers = dict(self.headers.items())
            if what == "lose":
                body = _half(body, headers)
            status, names, answer = _send(server.behind, self.command, self.path, body, headers)
            return self._send(status, names, answer, short=what == "short")

        def _unanswered(self, fault: StoreFault | None, answer: bytes) -> None:
            """As long as the fault lasts."""
            self.close_connection = True
            with suppress(OSError):  # the client has given up
                while fault in server.faults:
                    self.wfile.write(answer[:1])
                    answer = answer[1:]
                    time.sleep(1 if answer else 0.1)

        def _send(self, status: int, names: Any, answer: bytes, *, short: bool = False) -> None:
            self.send_response_only(status)
            for name, value in names:
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            length = next((value for name, value in names if name.lower() == "content-length"), len(answer))
            self.send_header("Content-Length", str(length if self.command == "HEAD" else len(answer)))
            self.end_headers()
            self.wfile.write(answer[: len(answer) // 2] if short else answer)
            if short:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answered

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


def _half(body: bytes, headers: dict[str, str]) -> bytes:
    """Half of what a client sent, with the headers that say so: nobody notices on the way."""
    for name in [
        name
        for name in headers
        if re.match(r"(?i)content-md5|x-amz-(checksum|trailer|sdk-check|decoded)|content-enc", name)
    ]:
        del headers[name]
    short = body[: len(body) // 2]
    headers["Content-Length"] = str(len(short))
    headers["x-amz-content-sha256"] = "UNSIGNED-PAYLOAD"
    return short
