"""The server of the page as an ASGI application: its files, and what it answers as JSON."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shardwise.api.analysis import analyze
from shardwise.launch.loopback import Refusal, refusal
from shardwise.report.html import asset as report_asset
from shardwise.spec.errors import SpecError, shown
from shardwise.ui.adapting import adapted
from shardwise.ui.answer import advice, answer, compare, exported, published, timeline, trace
from shardwise.ui.children import TICK, Children, Event
from shardwise.ui.choices import catalogue
from shardwise.ui.finetune_demo import Demos, demo_request
from shardwise.ui.given import MOST_BYTES, arguments_from, document, error_data, imported
from shardwise.ui.searching import plan_request

Answer = Callable[[Mapping[str, Any]], Any]
Events = AsyncGenerator[Event, None]
_COMPRESSED_FROM = 1000  # bytes
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
    """The files of the page by their name in the address; no other file is served."""
    own = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}
    drawing = {name: report_asset(name).encode() for name in _CHARTS}
    return {
        name: Asset(
            kind=_KINDS[Path(name).suffix],
            compressed=gzip.compress(content, 9, mtime=0),
            tag=f'"{hashlib.sha256(content).hexdigest()[:16]}"',
        )
        for name, content in (own | drawing).items()
    }


def analysis(given: Mapping[str, Any]) -> Any:
    """The data of `analyze --json`."""
    return analyze(arguments_from(given)).to_dict()


# Every answer to a posted job, by its address.
ANSWERS: dict[str, Answer] = {
    "answer": answer,
    "adapt": adapted,
    "analyze": analysis,
    "timeline": timeline,
    "advice": advice,
    "published": published,
    "compare": compare,
    "import": imported,
    "export": exported,
    "trace": trace,
}


def page_app() -> App:
    searches = Children("shardwise.ui.searching", ("plan", "search"), most_at_once=2)
    routes = [
        Route("/", _page),
        Route("/assets/{name}", _file),
        Route("/api/catalogue", _catalogue),
        Route("/api/plan", _followed(searches.events, plan_request), methods=["POST"]),
        Route("/api/demo", _followed(Demos().events, demo_request), methods=["POST"]),
        *(Route(f"/api/{name}", _posted(function), methods=["POST"]) for name, function in ANSWERS.items()),
    ]
    handlers: dict[Any, Any] = {404: _not_found, 405: _not_found, Exception: _failed}
    return Guard(Starlette(routes=routes, exception_handlers=handlers))


# -- files -----------------------------------------------------------------------------------------------------------


async def _page(request: Request) -> Response:
    return _sent(request, assets()["index.html"])


async def _file(request: Request) -> Response:
    asset = assets().get(request.path_params["name"])
    return await _not_found(request, None) if asset is None else _sent(request, asset)


def _sent(request: Request, asset: Asset) -> Response:
    headers = {"etag": asset.tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == asset.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        compressed = {**headers, "content-encoding": "gzip"}
        return Response(asset.compressed, headers=compressed, media_type=asset.kind)
    return Response(gzip.decompress(asset.compressed), headers=headers, media_type=asset.kind)


# -- answers ---------------------------------------------------------------------------------------------------------


async def _catalogue(request: Request) -> Response:
    return _json(request, await run_in_threadpool(catalogue))


def _posted(function: Answer) -> Callable[[Request], Any]:
    async def answered(request: Request) -> Response:
        try:
            body = await _body(request)
            return _json(request, await run_in_threadpool(lambda: function(document(body))))
        except _TooLarge as error:
            return _json(request, too_large(error).to_dict(), 413)
        except SpecError as error:
            return _json(request, error_data(error), 422)

    return answered


def _followed(begin: Callable[[bytes], Events], check: Answer) -> Callable[[Request], Any]:
    """The last event of a process; if the request accepts server-sent events, all of them.

    A client that disconnects ends the process.
    """

    async def answered(request: Request) -> Response:
        try:
            body = await _body(request)
            await run_in_threadpool(lambda: check(document(body)))
            events = begin(body)
            first = await anext(events)
        except _TooLarge as error:
            return _json(request, too_large(error).to_dict(), 413)
        except SpecError as error:
            return _json(request, error_data(error), 422)
        if "text/event-stream" in request.headers.get("accept", ""):
            return StreamingResponse(_streamed(request, first, events), media_type="text/event-stream")
        last = await _last(request, first, events)
        return _json(request, last["data"], 200 if last["event"] == "result" else 422)

    return answered


async def _streamed(request: Request, first: Event, events: Events) -> AsyncIterator[bytes]:
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    event: Event | None = first
    async with contextlib.aclosing(events):
        while event is not None and not await request.is_disconnected():
            data = json.dumps(event["data"], allow_nan=False)
            yield b": going on\n\n" if event is TICK else f"event: {event['event']}\ndata: {data}\n\n".encode()
            event = await anext(events, None)


async def _last(request: Request, last: Event, events: Events) -> Event:
    async with contextlib.aclosing(events):
        async for event in events:
            last = last if event is TICK else event
            if await request.is_disconnected():
                break
    return last


class _TooLarge(Exception):
    """A body that is longer than what is accepted, whatever length it announced."""


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise _TooLarge(f"more than {MOST_BYTES}")
    return bytes(body)


def _json(request: Request, data: Any, status: int = 200) -> Response:
    body = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    headers = {"cache-control": "no-store"}
    if len(body) >= _COMPRESSED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 1, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers, "application/json")


async def _not_found(request: Request, _: Any) -> Response:
    known = ", ".join(f"/api/{name}" for name in ANSWERS)
    problem = f"{request.method} {request.url.path} is not answered here"
    return _json(request, error_data(SpecError("address", problem, f"post a job to {known}")), 404)


async def _failed(request: Request, error: Exception) -> Response:
    """A bug of ours: its trace goes to the terminal, a line to the page."""
    traceback.print_exception(error, file=sys.stderr)
    problem = f"failed with {type(error).__name__}: {error}"
    return _json(request, error_data(SpecError("server", problem, "its terminal says where; please report it")), 500)


def serve(listening: socket.socket, ready: Callable[[], None]) -> None:
    """Answers until it is interrupted; ``ready`` is called when it does."""
    import uvicorn

    config = uvicorn.Config(
        page_app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    listening.listen(128)
    ready()
    uvicorn.Server(config).run(sockets=[listening])


# -- which requests are answered: those of our own page, or of a program on this machine -------------
# The Host and the Origin of every request are compared with our own address (`launch/loopback.py`), and what is posted
# must be JSON, which a form of another page cannot send (https://fetch.spec.whatwg.org/#cors-safelisted-method).

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Popups are allowed since the page sends the trace to Perfetto's window.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin-allow-popups",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self.refusal(scope)
        if refused is None:
            await self.app(scope, receive, _with_headers(send))
            return
        body = json.dumps(refused.to_dict()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        answered = _with_headers(send)
        # The rest of the body is never read: the connection is closed.
        await answered({"type": "http.response.start", "status": refused.status,
                        "headers": [*headers, (b"connection", b"close")]})  # fmt: skip
        await answered({"type": "http.response.body", "body": body})

    def refusal(self, scope: Message) -> Refusal | None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        refused = refusal(headers.get("host", []), headers.get("origin", []))
        return refused or _refused_body(scope["method"], headers)


def _refused_body(method: str, headers: dict[str, list[str]]) -> Refusal | None:
    if method != "POST":
        return None
    kind = headers.get("content-type", [""])[0].partition(";")[0].strip().lower()
    if kind != "application/json":
        return Refusal(415, "content-type", f"{shown(kind)} is not JSON", "send application/json")
    length = headers.get("content-length", ["0"])[0]
    if not length.isdigit() or int(length[:12]) > MOST_BYTES:
        return too_large(length)
    return None


def too_large(length: object) -> Refusal:
    problem = f"{shown(str(length))} bytes are more than {MOST_BYTES:,}"
    return Refusal(413, "request", problem, "a job has a few thousand")


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return sent
