"""What this host is called, as its launcher knows it."""

from __future__ import annotations

import os
import socket

HOST = "SHARDWISE_HOST"  # set by our own launchers: the name in a file of hosts, or the address of a node of Ray
_NAMES = (HOST, "SLURMD_NODENAME")


def host_name() -> str:
    """The launcher's name of it, which its wiring uses, or its own."""
    return next((os.environ[name] for name in _NAMES if os.environ.get(name)), socket.gethostname())
