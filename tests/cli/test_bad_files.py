"""Every reader on damaged and hostile files: a result or one line of error, and at most 1 GiB of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_no_file_brings_a_reader_down(count: int, tmp_path: Path) -> None:
    """In a process of its own, whose memory is limited."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    worker = [sys.executable, str(Path(__file__).with_name("bad_files.py")), str(count), str(tmp_path)]
    done = subprocess.run(worker, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{count} inputs for " in done.stdout
