"""The commands for several hosts, as torchrun itself reads them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cli.running import run as shardwise
from cli.running import run_json
from shardwise.launch.run import torchrun_commands
from shardwise.run.attempt import WorldPlace
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec import SpecError
from shardwise.spec.job import Job
from shardwise.spec.run import Restarts


def job(cluster: str, **strategy: int) -> Job:
    return Job.from_dict(
        {"model": "tiny", "cluster": cluster, "strategy": strategy, "training": {"global_batch": 32, "seq": 64}}
    )


def test_one_command_per_host_that_torchrun_accepts() -> None:
    run = pytest.importorskip("torch.distributed.run")
    asked = job("dgx-h100:2")
    asked = replace(asked, run=replace(asked.run, restarts=Restarts(most=7)))
    commands = torchrun_commands(asked, "my jobs/job.yaml")
    assert len(commands) == 2
    for name, command in zip(("host-0", "host-1"), commands):
        program, *arguments = shlex.split(command)
        parsed = run.parse_args(arguments)
        assert (program, parsed.nnodes, parsed.nproc_per_node, parsed.module) == ("torchrun", "2", "8", True)
        assert (parsed.rdzv_endpoint, parsed.local_addr, parsed.rdzv_backend) == ("host-0:29400", name, "c10d")
        assert (parsed.training_script, parsed.max_restarts) == ("shardwise.training.worker", 7)
        assert parsed.training_script_args == ["my jobs/job.yaml"]


def test_hosts_without_names_and_one_machine() -> None:
    assert [f"--local-addr=host-{n} " in c for n, c in enumerate(torchrun_commands(job("dgx-h100:4"), "j"))] == [
        True
    ] * 4
    (only,) = torchrun_commands(job("laptop:4", tp=2), "job.yaml")
    assert "--nnodes=1 --nproc-per-node=4" in only
    assert "--rdzv-endpoint=localhost:29400" in only


SMALL = ("--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4")


def printed(folder: Path, *arguments: str) -> list[str]:
    """The command for the one host, after which the folder is ready to be trained in."""
    found = shardwise(
        "train", *SMALL, "--precision", "fp32", "--run-folder", str(folder), *arguments, "--print-torchrun"
    )
    assert found.status == 0, found.err
    (line,) = found.out.splitlines()
    return shlex.split(line)


def test_what_train_prints_starts_workers_in_a_folder_that_is_ready(tmp_path: Path) -> None:
    command = printed(tmp_path / "run", "--set", "training.tokens=1M")
    assert command[-3:] == ["--module", "shardwise.training.worker", str(tmp_path / "run")]
    written = Job.from_yaml((tmp_path / "run" / "job.yaml").read_text())
    assert (written.run.steps, written.strategy.dp) == (7813, 2)  # 1,000,000 tokens, 128 in a step
    assert not (tmp_path / "run" / "attempts").exists()


def test_commands_are_printed_as_they_are(tmp_path: Path) -> None:
    for form in ("--json", "--markdown", "--csv", "--debug"):
        found = shardwise("train", *SMALL, "--run-folder", str(tmp_path / "run"), "--print-torchrun", form)
        assert (found.status, found.out) == (2, "")
        assert found.err == f"shardwise: error: {form}: cannot be combined with --print-torchrun; leave it out\n"
    assert not (tmp_path / "run").exists()


def test_rank_0_takes_the_folder_where_no_launcher_has(tmp_path: Path) -> None:
    worker = pytest.importorskip("shardwise.training.worker")
    folder = RunFolder(tmp_path)
    left = folder.checkpoints.unfinished(3, "restart-0-1")
    left.mkdir(parents=True)
    with worker._exclusive(folder, WorldPlace(0, 2, 0)):
        assert not left.exists()  # of a start before, by the name that this one's will have
        with pytest.raises(SpecError, match="is training in it"), worker._exclusive(folder, WorldPlace(0, 2, 0)):
            pass
        with (
            worker._exclusive(folder, WorldPlace(1, 2, 1)),
            worker._exclusive(folder, WorldPlace(0, 2, 0, folder=tmp_path)),
        ):
            pass


@pytest.mark.slow
def test_torchrun_trains(tmp_path: Path) -> None:
    command = printed(tmp_path / "run", "--steps", "3")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run"] + [
        re.sub(":29400$", f":{port}", one) for one in command[1:]
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=200)
    assert RunFolder(tmp_path / "run").checkpoints.committed() == [3]
    told = run_json("status", str(tmp_path / "run"))
    assert (told["state"], told["step"], told["restarts"], told["saved"]["step"]) == ("ended", 3, 0, 3)
