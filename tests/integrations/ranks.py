"""Starts real processes of a worker beside this file, by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_ranks(worker: str, folder: Path, *given: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    paths = [str(HERE.parents[1] / "src"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    return subprocess.run(
        [*command, str(HERE / worker), str(folder), *given],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def launched(worker: str, folder: Path, *given: str, processes: int = 2) -> str:
    """What the ranks print; they end well."""
    done = run_ranks(worker, folder, *given, processes=processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
