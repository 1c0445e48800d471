"""A small process that kills a launcher's ranks if the launcher itself is killed; it runs as a script with `python -I`.

It reads lines from the launcher, "+PID" for a process group that has begun and "-PID" for one that has ended. When the
pipe closes, the launcher is gone, and the guard removes what it left: stopped ranks, their children, and the rendezvous
folder, which is its argument.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        sign, group = line[0], int(line[1:])
        if sign == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    # By os, not pathlib: nothing but the standard library's smallest part is loaded here.
    with contextlib.suppress(OSError):
        for name in os.listdir(sys.argv[1]):  # noqa: PTH208
            os.unlink(f"{sys.argv[1]}/{name}")  # noqa: PTH108
        os.rmdir(sys.argv[1])  # noqa: PTH106


if __name__ == "__main__":
    main()
