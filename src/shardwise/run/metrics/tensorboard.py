"""Scalars as TensorBoard event files, written without its dozen packages.

A file is records of length, checksum, message, checksum (tensorflow/core/lib/io/record_writer.h); a message is a
protocol buffer `Event` (tensorflow/core/util/event.proto).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from shardwise.spec.errors import SpecError

_START = 1  # SessionLog.START: readers forget what they have of this step and later ones


@contextlib.contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise SpecError(str(folder), problem, "make room, or run.logging.tensorboard: false") from None


def make_folder(folder: Path) -> None:
    """The folder for event files; raises SpecError if it cannot be made."""
    with _guarded(folder):
        folder.mkdir(parents=True, exist_ok=True)


class EventFile:
    """A new file in ``folder``; readers take all files there together."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        with _guarded(folder):
            self._file = (folder / name).open("ab", buffering=0)
        self._write(_bytes(3, b"brain.Event:2"))

    def forget_after(self, step: int) -> None:
        """Later steps will be written again: readers drop what they have of them."""
        self._write(_number(2, step + 1) + _bytes(7, _number(1, _START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in values.items())
        self._write(_number(2, step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, message: bytes) -> None:
        event = struct.pack("<Bd", 1 << 3 | 1, time.time()) + message
        length = struct.pack("<Q", len(event))
        record = length + _checksum(length) + event + _checksum(event)
        with contextlib.suppress(OSError):  # a full disk loses the record, never the run
            written = self._file.write(record)
            if written < len(record):  # readers would stop at half a record
                self._file.truncate(self._file.tell() - written)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


@cache
def _table() -> tuple[int, ...]:
    """CRC-32C, one entry for each byte."""
    entries = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        entries.append(number)
    return tuple(entries)


def _checksum(data: bytes) -> bytes:
    table, value = _table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
