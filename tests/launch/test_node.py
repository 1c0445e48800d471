"""One process per node (Kubeflow, SkyPilot): it starts the same command as the ranks of its node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from measure.calibrate.test_hosts import free_port

SMALL = ("--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4")


@pytest.mark.slow
def test_two_nodes_train_together(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "shardwise", "train", *SMALL, "--precision", "fp32", "--steps", "2"]
    command += ["--run-folder", str(tmp_path / "run")]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    kubeflow = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    nodes = [
        subprocess.Popen(
            command, env={**own, **kubeflow, "PET_NODE_RANK": str(node)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=300) for one in nodes]
    finally:
        for one in nodes:
            one.kill()
    assert [one.returncode for one in nodes] == [0, 0], said
    assert "Done: " in said[0][0] and "Done: " not in said[1][0]
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists()
