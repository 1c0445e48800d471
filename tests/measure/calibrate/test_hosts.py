"""`shardwise calibrate` on ranks that others have started: several hosts become one cluster, written by rank 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cli.running import Result, error_line, run
from engine.workers import pool
from shardwise.api.calibration import started_cluster
from shardwise.cli.main import main
from shardwise.launch.pool import WorkerPlace
from shardwise.measure.calibrate.ranks import hosts_of
from shardwise.measure.calibrate.run import slow_ranks
from shardwise.run.environment import Started
from shardwise.spec import SpecError
from shardwise.spec.clusters import cluster_from

CALIBRATE = ("-m", "shardwise", "calibrate")
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def outputs(started: list[subprocess.Popen[str]], status: int = 0) -> list[tuple[str, str]]:
    """What each printed on both of its outputs, after checking how all of them ended."""
    try:
        said = [one.communicate(timeout=200) for one in started]
    finally:
        for one in started:
            one.terminate()  # torchrun ends its ranks
    assert [one.returncode for one in started] == [status] * len(started), said
    return said


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env={**_ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def two_ranks(arguments: list[str], ranks_per_host: tuple[int, int]) -> list[Result]:
    """As srun starts them: no launcher's store, rank 0 holds what they meet in; on processes that have torch."""
    there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    return pool().run(_calibrate, 2, arguments, there, ranks_per_host, timeout_seconds=200)


def _calibrate(place: WorkerPlace, arguments: list[str], there: dict[str, str], counts: tuple[int, int]) -> Result:
    own = {"RANK": str(place.rank), "LOCAL_WORLD_SIZE": str(counts[place.rank])}
    with mock.patch.dict(os.environ, {**there, **own}):
        return run("calibrate", *arguments)


@pytest.mark.slow
def test_two_hosts_of_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    first, second = two_ranks(["--only", "links,storage", "--out", str(path)], (1, 1))
    assert (first.status, second.status) == (0, 0), (first, second)
    assert f"Written: {path}" in first.out.replace("\n", "")
    assert second.out == ""
    cluster = cluster_from(str(path))
    inside, between = cluster.levels
    assert (inside.width, between.width, cluster.nodes, between.ports) == (1, 2, 2, 1)
    assert between.schedules is not None and 1e6 < between.bandwidth_per_direction < 1e12
    assert f"2 cpu devices of 2 hosts ({socket.gethostname()})" in cluster.source
    assert "Errors: the backend's collectives, ethernet: median" in cluster.source
    assert "slowest of 2 hosts" in cluster.storage[0].link.source
    assert not list(tmp_path.glob(".shardwise-*"))


def test_all_ranks_say_the_same_of_hosts_that_differ(tmp_path: Path) -> None:
    for one in two_ranks(["--out", str(tmp_path / "cluster.yaml")], (1, 2)):
        assert error_line(one).startswith("LOCAL_WORLD_SIZE: rank 1 is one of 2 on ")


@pytest.mark.slow
def test_two_agents_of_torchrun(tmp_path: Path) -> None:
    path, port = tmp_path / "cluster.yaml", free_port()
    outputs([
        start([sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
               "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port,
               *CALIBRATE, "--out", str(path)], {})
        for node in range(2)
    ])  # fmt: skip
    cluster = cluster_from(str(path))
    assert [level.width for level in cluster.levels] == [2, 2]
    assert all(level.schedules is not None for level in cluster.levels)
    assert cluster.device.name == "calibrated-cpu"
    assert "4 cpu devices of 2 hosts" in cluster.source


THERE = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "2"], "--processes: cannot be combined with torchrun"),
        (["--emulate", "2x2,1Gbit"], "--emulate: cannot be combined with torchrun"),
        (["--from", "runs/none"], "--from: runs in one process"),
        (["--cluster", "dgx-h100:2"], "--cluster: a node of dgx-h100 has 8 devices, a host here 4 ranks"),
        (
            ["--cluster", "dgx-h100:4"],
            "--cluster: dgx-h100 has 32 devices, there are 16 ranks; name it like dgx-h100:2",
        ),
        (["--cluster", "dgx"], "--cluster: "),
    ],
    ids=str,
)
def test_what_does_not_fit_the_ranks_is_told_in_a_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in THERE.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--run-device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "here", "widths"),
    [
        (None, Started(0, 4, 4), [1, 4]),
        (None, Started(0, 6, 2), [2, 3]),
        ("dgx-h100", Started(0, 4, 4), [4, 1]),
        ("dgx-h100:2", Started(0, 16, 8), [8, 2]),
    ],
)
def test_hosts_become_levels(name: str | None, here: Started, widths: list[int]) -> None:
    cluster = started_cluster(name, "cpu", here)
    assert [level.width for level in cluster.levels] == widths
    assert (cluster.nodes, cluster.node_devices) == (here.hosts, here.ranks_per_host)


class Answers:
    """Ranks whose answers are known."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._answers


def test_ranks_stand_host_by_host() -> None:
    assert hosts_of(Answers(("a", 2), ("a", 2), ("b", 2), ("b", 2))) == ["a", "a", "b", "b"]
    for wrong in ([("a", 2), ("b", 2), ("a", 2), ("b", 2)], [("a", 2), ("a", 2), ("b", 1), ("c", 1)]):
        with pytest.raises(SpecError, match="equally many ranks on every host"):
            hosts_of(Answers(*wrong))


def test_a_slow_rank_is_named_and_its_equals_are_not() -> None:
    hosts = ["a", "a", "b", "b"]
    seconds = {0: [1.0, 2.0, 9.0], 1: [1.1, 2.1, 3.0], 2: [2.0, 4.0, 6.0], 3: [1.0, 1.9, 3.1]}
    (slow,) = slow_ranks("matmuls", seconds, hosts)  # one figure that is off does not make a rank slow
    assert str(slow) == "rank 2 on b takes 2.0 times as long as others for matmuls"
    assert not list(slow_ranks("matmuls", {0: [1.0]}, hosts))
    assert [one.rank for one in slow_ranks("matmuls", {0: [1.0], 1: [2.0]}, hosts)] == [1]
