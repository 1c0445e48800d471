"""Copies in the memory of hosts and of Ray's nodes: a lost worker and a lost node cost no step that was copied."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import error_line
from cli.running import run as shardwise
from launch.ray.nodes import ray_nodes
from launch.ray.test_ray import SMALL, begun, ended, equal_weights, losses, nothing_left, ranks_of, reaches
from launch.running import wait_until
from launch.targets.ssh_hosts import SshHosts, ssh_hosts

COPIED = ("--set", "run.checkpoints.memory=1", "--set", "run.checkpoints.steps=1000")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job by the launcher of this machine, without copies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    os.environ["OMP_NUM_THREADS"] = "1"
    assert shardwise(*SMALL, *COPIED[2:], "--run-folder", str(folder)).status == 0
    return folder


def restored(folder: Path) -> list[tuple[str, int]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["restored_from"], line["step"]) for line in lines if "restored_from" in line]


def keepers_of(folder: Path) -> list[str]:
    return [str(one) for one in json.loads((folder / "keepers.json").read_text())["keepers"]]


def goes_on(process: subprocess.Popen[str], folder: Path, times: int) -> None:
    """So often it was restored, and has done steps since."""
    wait_until(lambda: process.poll() is not None or len(restored(folder)) >= times, 200)
    reaches(process, folder, restored(folder)[-1][1] + 2)


@pytest.mark.slow
def test_on_hosts(undisturbed: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    with ssh_hosts(tmp_path) as hosts:
        command = [sys.executable, "-m", "shardwise", *SMALL, *COPIED, "--run-folder", str(folder)]
        own = {"SHARDWISE_SSH": hosts.ssh, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with log.open("w") as said, log.with_suffix(".out").open("w") as out:
            process = subprocess.Popen(
                [*command, "--on", str(hosts.file)], env={**os.environ, **own}, stdout=out, stderr=said, text=True
            )
        try:
            reaches(process, folder, 5)
            assert [one.rpartition(":")[0] for one in keepers_of(folder)] == list(hosts.addresses)
            os.kill(ranks_of(folder)[1], signal.SIGKILL)
            goes_on(process, folder, 1)
            before = keepers_of(folder)
            hosts.lose(1)
            goes_on(process, folder, 2)
            assert keepers_of(folder)[0] == before[0] and keepers_of(folder)[1] != before[1]
            status, text = ended(process, folder)
        finally:
            process.kill()
        assert status == 0, text
        assert nobody_keeps(hosts)
    assert [where for where, _ in restored(folder)] == ["memory", "memory"], text
    assert not (folder / "keepers.json").exists()
    assert losses(folder) == losses(undisturbed)
    equal_weights(folder, undisturbed)


def nobody_keeps(hosts: SshHosts) -> bool:
    """Once the connections have ended."""
    wait_until(lambda: not any("launch.keeper" in one for one in hosts.commands()), 30)
    return True


@pytest.mark.slow
def test_on_ray(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ray_nodes(1, 1) as nodes:
        process = begun(nodes, folder, *COPIED)
        try:
            reaches(process, folder, 5)
            assert len(set(keepers_of(folder))) == 2
            os.kill(ranks_of(folder)[1], signal.SIGKILL)
            goes_on(process, folder, 1)
            nodes.lose(1)
            nodes.add(1)
            goes_on(process, folder, 2)
            status, said = ended(process, folder)
        finally:
            process.kill()
        assert status == 0, said
        nothing_left(nodes)
    assert [where for where, _ in restored(folder)] == ["memory", "memory"], said
    assert losses(folder) == losses(undisturbed)
    equal_weights(folder, undisturbed)


def test_where_nothing_outlives_the_ranks_it_is_refused(tmp_path: Path) -> None:
    given = (*SMALL, *COPIED, "--run-folder", str(tmp_path / "run"), "--on", "slurm")
    line = error_line(shardwise(*given))
    assert line == (
        "run.checkpoints.memory: a script for slurm starts ranks, and no process beside them that keeps the copies; "
        "leave it out"
    )
    assert "run.checkpoints.memory: needs a process" in error_line(shardwise(*given[:-1], "kubernetes"))
