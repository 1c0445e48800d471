"""The process that holds the virtual nodes: it ends when its input closes, and everything it created goes with it.

It runs as a module; its arguments are an `Emulation` and the backend that shapes the links. It prints the handles of
the namespaces as one line of JSON, then reads lines with changes and answers each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from functools import partial

from shardwise.launch.emulate.kernel import KernelSwitch, kernel_has_netem
from shardwise.launch.emulate.switch import PacketSwitch
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError

_POLL_SECONDS = 1.0


def main(text: str, shaping: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    emulation = Emulation.parse(text)
    try:
        nodes = _nodes(emulation, shaping)
    except SpecError as error:
        return _answer(error=error.problem, remedy=error.remedy)
    except OSError as error:
        remedy = "run as root, outside a container or in one that may create network namespaces"
        return _answer(error=f"no virtual nodes here ({error})", remedy=remedy)
    _answer(namespaces=nodes.namespaces)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    return nodes.forward(sys.stdin.fileno(), partial(_controlled, nodes))


def _exit_with(parent: int) -> None:
    """A process forked from the dead parent may still hold our input open."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


def _nodes(emulation: Emulation, shaping: str) -> PacketSwitch | KernelSwitch:
    if shaping == "kernel":
        return KernelSwitch(emulation)
    if shaping == "auto" and kernel_has_netem():
        with contextlib.suppress(OSError):  # it has netem, but something else is missing
            return KernelSwitch(emulation)
    return PacketSwitch(emulation)


def _controlled(nodes: PacketSwitch | KernelSwitch, control: int) -> bool:
    """Applies pending changes; False once there will be no more."""
    read = os.read(control, 2**16)
    for line in read.splitlines():
        try:
            nodes.change(json.loads(line))
            _answer()
        except SpecError as error:
            _answer(error=error.problem, remedy=error.remedy)
        except OSError as error:
            _answer(error=str(error), remedy="")
    return bool(read)


def _answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
