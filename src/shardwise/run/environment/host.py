"""What this host is called, as its launcher knows it."""

from __future__ import annotations

import os
import socket

HOST = "SHARDWISE_HOST"  # set by our launchers: the name in a host file, or the address of a Ray node
_NAMES = (HOST, "SLURMD_NODENAME")


def host_name() -> str:
    """The name by which the launcher addresses this host, or the host's own."""
    return next((os.environ[name] for name in _NAMES if os.environ.get(name)), socket.gethostname())
