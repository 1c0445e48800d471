"""Only this machine's browser and programs may ask, by the address that was printed; everything else is refused.

The Host and the Origin of every request are compared with our own address (`launch/loopback.py`), and what is posted
must be JSON, which a form of another page cannot send (https://fetch.spec.whatwg.org/#cors-safelisted-method).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shardwise.launch.loopback import Refusal, refusal
from shardwise.spec.errors import shown
from shardwise.ui.given import MOST_BYTES

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
    """Passes on requests of our own page, or of a program on this machine."""

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
