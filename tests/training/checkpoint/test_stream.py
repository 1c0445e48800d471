"""Files that are written past the page cache: every byte, and its checksum, whatever the sizes and the disk."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.training.checkpoint import shards

SMALL = 2 * shards.ALIGNED_BYTES
PARTS = ([], [0], [1], [SMALL], [SMALL - 1, 2], [1, SMALL, 0, 5 * SMALL, 3], [7] * 100, [9 * SMALL])


@pytest.mark.parametrize("sizes", PARTS)
def test_every_byte_is_written_and_summed(sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", SMALL)
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, size, np.uint8) for size in sizes]
    written = shards.write_stream(tmp_path / "file", parts)
    content = (tmp_path / "file").read_bytes()
    assert content == b"".join(part.tobytes() for part in parts)
    assert (written.size, written.checksum) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("refused_by", ["open", "write"])
def test_a_disk_that_takes_nothing_directly(refused_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse when the file is opened, some when it is written."""
    inner: Any = getattr(os, refused_by)

    def refuse(where: Any, argument: Any, *more: Any) -> Any:
        flags = argument if refused_by == "open" else shards.fcntl.fcntl(where, shards.fcntl.F_GETFL)
        if flags & shards._DIRECT:
            raise OSError(errno.EINVAL, "not directly")
        return inner(where, argument, *more)

    monkeypatch.setattr(shards.os, refused_by, refuse)
    part = np.arange(SMALL + 5, dtype=np.uint64).view(np.uint8)
    written = shards.write_stream(tmp_path / "file", [part])
    assert (tmp_path / "file").read_bytes() == part.tobytes()
    assert written.checksum == hashlib.sha256(part.tobytes()).hexdigest()
