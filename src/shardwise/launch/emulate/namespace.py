"""Network namespaces without names: each lives as long as a process is in it or holds it open.

So nothing is left behind, however the processes end, and no two runs interfere. As a script (`python -I`) it runs a
command inside a namespace, replacing this process: its arguments are a path to the namespace and the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"
MTU = 9000
_CLONE_NEWNET = 0x40000000
_SET_FLAGS, _SET_ADDRESS, _SET_NETMASK, _SET_MTU, _SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_UP = 0x1
_QUEUED_PACKETS = 4096  # kept by the kernel until the switch takes them


def address(node: int) -> str:
    """The IPv4 address of a node, inside the namespaces only."""
    return f"10.77.0.{node + 1}"


def new_namespace() -> int:
    """Moves this thread into a new namespace; the file descriptor returned keeps it open."""
    _call("unshare", _CLONE_NEWNET)
    return _open("/proc/thread-self/ns/net")


@contextlib.contextmanager
def returning() -> Iterator[None]:
    """Moves this thread back to its own namespace at the end."""
    home = _open("/proc/thread-self/ns/net")
    try:
        yield
    finally:
        enter_open(home)
        os.close(home)


def enter(path: str) -> None:
    """Moves this thread, and everything it starts from now on, into the namespace at ``path``."""
    handle = _open(path)
    try:
        enter_open(handle)
    finally:
        os.close(handle)


def enter_open(handle: int) -> None:
    _call("setns", handle, _CLONE_NEWNET)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def configure(node: int) -> None:
    """Gives the interface of this thread's namespace its address and brings it and loopback up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _request(control, "lo", _SET_FLAGS, struct.pack("=h", _UP))
        for request, value in ((_SET_ADDRESS, address(node)), (_SET_NETMASK, "255.255.255.0")):
            _request(control, INTERFACE, request, struct.pack("=HH4s", socket.AF_INET, 0, socket.inet_aton(value)))
        _request(control, INTERFACE, _SET_MTU, struct.pack("=i", MTU))
        _request(control, INTERFACE, _SET_QUEUE, struct.pack("=i", _QUEUED_PACKETS))
        _request(control, INTERFACE, _SET_FLAGS, struct.pack("=h", _UP))


def tune_tcp(bytes_in_flight: float) -> None:
    """TCP of this thread's namespace as for a cluster's link: no slow start after a pause, a full pipe."""
    buffer = int(max(2**19, 4 * bytes_in_flight))
    _set("ipv4/tcp_congestion_control", "reno")  # bbr mistakes the switch's batches for a slow link
    _set("ipv4/tcp_slow_start_after_idle", "0")
    _set("ipv4/tcp_no_metrics_save", "1")
    for name in ("rmem", "wmem"):
        _set(f"ipv4/tcp_{name}", f"4096 {buffer} {buffer}")


def disable_ipv6() -> None:
    for scope in ("all", "default"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without it
            _set(f"ipv6/conf/{scope}/disable_ipv6", "1")


def _set(name: str, value: str) -> None:
    (Path("/proc/sys/net") / name).write_text(value, encoding="ascii")


def _request(control: socket.socket, interface: str, request: int, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", interface.encode(), value))


def _call(name: str, *arguments: int) -> None:
    """A function of the C library; Python itself has these two only from 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    try:
        enter(sys.argv[1])
    except FileNotFoundError:
        sys.exit("the emulated network is gone")
    except OSError:
        sys.exit(f"cannot enter the network namespace {sys.argv[1]}")
    os.execvp(sys.argv[2], sys.argv[2:])
