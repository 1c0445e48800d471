"""Runs a command inside a network namespace, replacing this process; it runs as a script with `python -I`.

Its arguments are a path to the namespace and the command.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000


def main() -> None:
    try:
        handle = os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        sys.exit("the emulated network is gone")
    if ctypes.CDLL(None).setns(handle, _CLONE_NEWNET):
        sys.exit(f"cannot enter the network namespace {sys.argv[1]}")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
