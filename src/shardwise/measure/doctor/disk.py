"""The disk of a run's folder: how much fits, and how fast it is."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.measure.doctor.finding import Examination, Finding
from shardwise.spec.units import readable_bytes, readable_rate, readable_seconds

MOST_BYTES, _MOST_SECONDS, _PIECE_BYTES = 128 * 2**20, 5.0, 8 * 2**20
_LITTLE_BYTES = 2**30
_SLOW_RATE = 50e6  # bytes/s: what a single hard disk gives
_KEPT = 3  # checkpoints at a time: the last good one, one more, and the one being written


def check_disk(asked: Examination) -> Iterator[Finding]:
    """Space and speed; the file that is written for it is bounded in size and time, and removed."""
    usage = shutil.disk_usage(asked.folder)
    yield _space(asked, usage.free)
    room = min(MOST_BYTES, usage.free // 10)
    if room < _PIECE_BYTES:
        return
    path = asked.folder / f".shardwise-disk-{os.getpid()}"
    try:
        size, write_seconds = timed_write(path, room)
        read_seconds = timed_read(path)
    finally:
        path.unlink(missing_ok=True)
    yield _speed(asked, size, write_seconds, read_seconds)


def _space(asked: Examination, free: int) -> Finding:
    wanted = _KEPT * asked.checkpoint_bytes if asked.checkpoint_bytes else _LITTLE_BYTES
    figure = f"{readable_bytes(free)} free in {asked.folder}"
    if asked.checkpoint_bytes:
        figure += f"; a checkpoint takes {readable_bytes(asked.checkpoint_bytes)}"
    if free >= wanted:
        return Finding("disk space", "pass", figure)
    remedy = f"{readable_bytes(wanted)} hold {_KEPT} checkpoints" if asked.checkpoint_bytes else "use another folder"
    too_little = asked.checkpoint_bytes is not None and free < asked.checkpoint_bytes
    return Finding("disk space", "fail" if too_little else "warn", figure, remedy)


def _speed(asked: Examination, size: int, write_seconds: float, read_seconds: float | None) -> Finding:
    rate = size / write_seconds
    figure = f"{readable_rate(rate)} written and synced"
    if read_seconds is not None:
        figure += f", {readable_rate(size / read_seconds)} read"
    if asked.checkpoint_bytes is not None:
        seconds = asked.checkpoint_bytes / asked.host_count / rate
        figure += f"; this host's part of a checkpoint in {readable_seconds(seconds)}"
        if seconds > asked.checkpoint_limit_seconds:
            return Finding("disk speed", "warn", figure, f"timeouts.checkpoint is {asked.checkpoint_limit_seconds:g} s")
    if rate < _SLOW_RATE:
        return Finding("disk speed", "warn", figure, "checkpoints would be faster in another folder")
    return Finding("disk speed", "pass", figure)


def timed_write(path: Path, room: int) -> tuple[int, float]:
    """Bytes written and synced, and the seconds they took: until ``room`` is full or the time is over."""
    piece, size = os.urandom(_PIECE_BYTES), 0  # not zeros: some file systems do not store those
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while size + len(piece) <= room and time.perf_counter() - began < _MOST_SECONDS:
            size += file.write(piece)
            os.fsync(file.fileno())
    return size, time.perf_counter() - began


def timed_read(path: Path) -> float | None:
    """Seconds to read the file; None if the system cannot be told to forget it first."""
    if not hasattr(os, "posix_fadvise"):
        return None
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(_PIECE_BYTES):
            pass
        return time.perf_counter() - began
