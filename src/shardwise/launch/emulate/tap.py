"""The far end of a node's interface: a TUN device, whose packets a process reads and writes."""

from __future__ import annotations

import fcntl
import os
import struct

from shardwise.launch.emulate.namespace import INTERFACE

DEVICE = "/dev/net/tun"
MOST_BYTES = 65536 + 64
_HEADER = 10  # virtio header before each packet: how the kernel may segment it, and where its checksum goes
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN, _WITHOUT_PROTOCOL, _WITH_HEADER = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x1, 0x2
_SEGMENT_HEADERS = 52  # IPv4 and TCP with time stamps


def open_tap() -> int:
    """Creates the interface of this thread's namespace; it exists until the file descriptor is closed."""
    handle = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _TUN | _WITHOUT_PROTOCOL | _WITH_HEADER
    fcntl.ioctl(handle, _SET_INTERFACE, struct.pack("16sH22x", INTERFACE.encode(), flags))
    return handle


def set_segmentation_offload(handle: int, enabled: bool) -> None:
    """Whether TCP hands over up to 64 KiB at once, as it does to a network card; else every packet by itself."""
    fcntl.ioctl(handle, _SET_OFFLOAD, (_CHECKSUMS | _SEGMENTS) if enabled else _CHECKSUMS)


def destination(packet: bytes) -> int:
    """The node that a packet goes to; -1 for a packet that is not IPv4."""
    if len(packet) < _HEADER + 20 or packet[_HEADER] >> 4 != 4:
        return -1
    return packet[_HEADER + 19] - 1


def wire_bytes(packet: bytes) -> int:
    """Its size on the wire: every segment that the kernel splits it into has its own headers."""
    size = len(packet) - _HEADER
    segment = packet[4] | packet[5] << 8
    return size + (size // segment) * _SEGMENT_HEADERS if segment else size
