"""Network interfaces of this host: loopback, and the one that has or reaches an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def loopback_interface() -> str:
    """The name of the loopback interface; "" if there is none."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")


def interface_towards(address: str) -> str:
    """The name of the interface that leads to ``address``; "" if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:  # sends nothing
            towards.connect((address, 9))
            return interface_of(towards.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The name of the interface with this IPv4 address; "" if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none, or this is not Linux
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return loopback_interface() if address.startswith("127.") else ""
