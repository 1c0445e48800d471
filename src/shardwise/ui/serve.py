"""Starts the page's server on loopback."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from shardwise.spec.errors import SpecError
from shardwise.ui.app import page_app

HOST = "127.0.0.1"


def bound(port: int) -> socket.socket:
    """A socket on loopback; port 0 takes a free one. Raises SpecError where the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise SpecError("--port", f"{port} {reason}", "give another, or 0 for any that is free") from None
    return listening


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
