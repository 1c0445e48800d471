"""Starts the page's server on loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable

from shardwise.ui.app import page_app


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
