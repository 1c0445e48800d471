"""`mpirun -n 4 shardwise train` under a real Open MPI and a real MPICH: their ranks train as our own do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cli.running import run as shardwise
from launch.targets.test_hosts import refusal
from required import require

SMALL = ("--model", "tiny", "--cluster", "laptop:4", "--dp", "2", "--tp", "2", "--seq", "32", "--global-batch", "4")
STEPS = ("--precision", "fp32", "--steps", "4")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LAUNCHERS = {"openmpi": ("mpirun.openmpi", "--oversubscribe"), "mpich": ("mpiexec.hydra",)}


# A rank's output is a file of its own: on its way through the launcher the end of it was lost once.
TO_FILES = 'own=$0/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; exec "$@" > "$own.out" 2> "$own.err"'


def mpirun(launcher: str, ranks: int, *arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """What all ranks printed, in their order."""
    program, *options = LAUNCHERS[launcher]
    require(launcher, None if shutil.which(program) else f"{program} is not installed")
    environment = {**os.environ, **AS_ROOT, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        rank = ["bash", "-c", TO_FILES, folder, sys.executable, "-m", "shardwise", *arguments]
        command = [program, *options, "-n", str(ranks), *rank]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        files = [sorted(Path(folder).glob(f"*.{kind}")) for kind in ("out", "err")]
        out, err = ("".join(one.read_text() for one in some) for some in files)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout + out, done.stderr + err)


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_four_ranks_train_as_our_own_launcher_does(launcher: str, tmp_path: Path) -> None:
    found = mpirun(launcher, 4, "train", *SMALL, *STEPS, "--run-folder", str(tmp_path / "mpi"))
    assert found.returncode == 0, found
    assert found.stdout.count("Done:") == 1  # rank 0 alone prints
    assert shardwise("train", *SMALL, *STEPS, "--run-folder", str(tmp_path / "own")).status == 0
    assert losses(tmp_path / "mpi") == losses(tmp_path / "own") and len(losses(tmp_path / "mpi")) == 4
    checked = shardwise("checkpoint", "verify", str(tmp_path / "mpi"))
    assert checked.status == 0, checked
    again = mpirun(launcher, 4, "train", *SMALL, *STEPS, "--run-folder", str(tmp_path / "mpi"))
    assert again.returncode == 0 and again.stdout.count("Nothing to do") == 1, again


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_other_verbs_run_on_the_ranks(launcher: str, tmp_path: Path) -> None:
    small = ("--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4")
    verified = mpirun(launcher, 2, "verify", *small, "--steps", "1", "--json")
    assert verified.returncode == 0 and json.loads(verified.stdout)["ok"], verified
    examined = mpirun(launcher, 2, "doctor", "--run-device", "cpu", "--run-folder", str(tmp_path), "--json")
    findings = {one["check"]: one for one in json.loads(examined.stdout)["findings"]}
    assert "over 2 cpu processes" in findings["all-reduce"]["figure"], examined
    timed = mpirun(launcher, 2, "bench", "collectives", "--kinds", "all_reduce", "--max-bytes", "1KiB", "--json")
    assert timed.returncode == 0 and json.loads(timed.stdout), timed


@pytest.mark.parametrize("launcher", [pytest.param("openmpi", marks=pytest.mark.slow), "mpich"])
def test_a_job_of_another_size_is_refused_once(launcher: str, tmp_path: Path) -> None:
    found = mpirun(launcher, 2, "train", *SMALL, *STEPS, "--run-folder", str(tmp_path / "run"))
    assert found.returncode == 2, found
    errors = [line for line in found.stderr.splitlines() if line.startswith("shardwise: error: ")]
    assert len(errors) == 1 and "cluster: the job has 4 ranks, " in errors[0] and " started 2; " in errors[0]
    assert not (tmp_path / "run").exists()


def test_the_mpi_of_a_build_without_it_is_refused_by_name(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    if dist.is_mpi_available():
        pytest.skip("this build of PyTorch has MPI")
    said = refusal("train", *SMALL, *STEPS, "--run-folder", str(tmp_path / "run"), "--set", "run.backend=mpi")
    assert "run.backend: mpi is not in this build of PyTorch; leave it out (gloo), or build PyTorch with MPI" in said
