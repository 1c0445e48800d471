"""`--on ray`: which ranks share a node; on a real cluster, a lost worker or node costs no step that was committed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.running import run as shardwise
from launch.ray.nodes import RayNodes, ray_nodes
from launch.running import alive, wait_until
from required import require
from shardwise.launch.elastic import bundle_size, bundle_sizes
from shardwise.launch.local import supervise
from shardwise.launch.outcome import STOPPED
from shardwise.launch.ray.cluster import RayNode, missing_words, ranks_of_bundles
from shardwise.launch.targets.hosts import Host, HostRanks
from shardwise.layout.groups import along, division
from shardwise.spec.strategy import Strategy

# -- which ranks go where ----------------------------------------------------------------------------------

DEGREES = st.sampled_from([1, 2, 3, 4])
ORDERS = st.permutations(["tp", "cp", "dp", "pp"])


@given(DEGREES, DEGREES, DEGREES, ORDERS, st.integers(1, 16), st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_every_rank_has_one_bundle_and_no_tp_group_is_cut(
    tp: int, dp: int, pp: int, order: list[str], node_devices: int, rooms: list[int]
) -> None:
    strategy = Strategy(tp=tp, dp=dp, pp=pp, order=tuple(order))
    nodes = [RayNode(f"n{number}", f"10.0.0.{number}", room) for number, room in enumerate(rooms)]
    sizes = bundle_sizes(strategy, node_devices)
    assert sizes and all(strategy.world % size == 0 for size in sizes) and sizes[0] <= node_devices
    size = bundle_size(sizes, strategy.world, [node.room for node in nodes])
    if size is None:
        assert all(sum(room // one for room in rooms) * one < strategy.world for one in sizes)
        return
    assert sum(room // size for room in rooms) * size >= strategy.world
    # Ray may fill the nodes with bundles in any order.
    free = [node.number for node in nodes for _ in range(node.room // size)][: strategy.world // size]
    found = ranks_of_bundles(free[::-1], size, {node.number: node.address for node in nodes})
    assert sorted(rank for ranks in found for rank in ranks) == list(range(strategy.world))
    bundle_of = {rank: number for number, ranks in enumerate(found) for rank in ranks}
    groups = division(strategy, along(strategy, "tp"))
    if len(sizes) > 1 or all(len({rank // sizes[0] for rank in group}) == 1 for group in groups):
        assert all(len({bundle_of[rank] for rank in group}) == 1 for group in groups)
    by_rank = [free[::-1][bundle_of[rank]] for rank in range(strategy.world)]
    assert by_rank == sorted(by_rank, key=lambda name: int(name[1:]))  # those of a node are neighbours


def test_the_first_ranks_are_at_the_first_address_whatever_ray_calls_it() -> None:
    addresses = {"z": "10.0.0.9", "a": "10.0.0.10"}
    assert ranks_of_bundles(["a", "z", "a", "z"], 2, addresses) == [
        range(4, 6), range(2), range(6, 8), range(2, 4)
    ]  # fmt: skip


def test_smaller_nodes_than_planned_get_fewer_ranks_but_whole_tp_groups() -> None:
    strategy = Strategy(tp=2, dp=4)
    assert bundle_sizes(strategy, 8) == [8, 4, 2]
    nodes = [RayNode(name, name, room) for name, room in (("a", 4), ("b", 3), ("c", 3))]
    assert bundle_size([8, 4, 2], 8, [node.room for node in nodes]) == 2
    assert bundle_size([8, 4, 2], 8, [node.room for node in nodes[:2]]) is None
    assert missing_words(8, "GPU", [8, 4, 2], nodes[:2], 5.0) == (
        "asked for 8 GPUs, 2 or more of them on one node (whole tensor-parallel groups); "
        "present: 7 on 2 nodes (4 on a, 3 on b), of which 5 are free"
    )


def test_a_stop_while_a_place_is_waited_for(tmp_path: Path) -> None:
    def start(command: object, folder: Path, environment: object, stopped: Callable[[], bool]) -> HostRanks:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(stopped)
        return HostRanks.never_begun([(Host("ray"), range(2))], folder)

    outcome = supervise(["unused"], 2, tmp_path / "run", start=start)
    assert (outcome.status, outcome.stopped, len(outcome.attempts)) == (STOPPED, True, 1)


# -- a real cluster ----------------------------------------------------------------------------------------

SMALL = (
    "train", "--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4",
    "--precision", "fp32", "--set", "run.checkpoints.steps=3", "--steps", "30",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two nodes of one processor: the two ranks of `SMALL` need both."""
    with ray_nodes(1, 1) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job by the launcher of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    os.environ["OMP_NUM_THREADS"] = "1"
    assert shardwise(*SMALL, "--run-folder", str(folder)).status == 0
    return folder


def begun(nodes: RayNodes, folder: Path, *more: str, home: Path | None = None) -> subprocess.Popen[str]:
    given = (*SMALL, "--run-folder", str(folder), "--on", "ray", *more)
    return nodes.shardwise(*given, log=folder.with_suffix(".log"), home=home)


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    status = process.wait(240)
    return status, folder.with_suffix(".log").read_text() + folder.with_suffix(".out").read_text()


def reaches(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    metrics = folder / "metrics.jsonl"
    wait_until(
        lambda: process.poll() is not None or (metrics.exists() and f'"step": {step},' in metrics.read_text()), 200
    )
    assert process.poll() is None, folder.with_suffix(".log").read_text()


def ranks_of(folder: Path) -> dict[int, int]:
    """The processes of a run's ranks, wherever they are."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and f"worker\0{folder}\0".encode() in _read(entry / "cmdline"):
            variables = dict(part.partition(b"=")[::2] for part in _read(entry / "environ").split(b"\0"))
            if b"RANK" in variables:
                found[int(variables[b"RANK"])] = int(entry.name)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


def equal_weights(first: Path, second: Path) -> None:
    """Of the last checkpoints, bit for bit."""
    from safetensors.numpy import load_file

    def weights(folder: Path) -> dict[str, bytes]:
        newest = max((folder / "checkpoints").glob("step-*"))
        files = sorted(newest.rglob("*.safetensors"))
        assert files
        return {f"{file.name} {name}": value.tobytes() for file in files for name, value in load_file(file).items()}

    assert weights(first) == weights(second)


def nothing_left(nodes: RayNodes, *pids: int) -> None:
    for pid in pids:
        wait_until(lambda pid=pid: not alive(pid), 30)  # type: ignore[misc]
    groups = nodes.ask(
        "from ray.util.placement_group import placement_group_table\n"
        "print([one['state'] for one in placement_group_table().values() if one['state'] != 'REMOVED'])\n"
        "print(ray.available_resources().get('CPU'), ray.cluster_resources().get('CPU'))"
    ).split("\n")
    assert groups[0] == "[]" and len(set(groups[1].split())) == 1, groups


@pytest.mark.slow
def test_a_killed_worker_and_a_lost_node_cost_no_committed_step(
    nodes: RayNodes, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = begun(nodes, folder)
    reaches(process, folder, 5)
    first = ranks_of(folder)
    os.kill(first[1], signal.SIGKILL)
    reaches(process, folder, 12)
    second = ranks_of(folder)
    nodes.lose(1)
    nodes.add(1)
    status, said = ended(process, folder)
    assert status == 0, said
    assert "rank 1 (" in said and "killed by SIGKILL; restart 1 of 3 from step " in said
    # Whichever is noticed first: that Ray has lost the node, or that its rank is silent.
    assert f"host lost: {nodes.address_of(1)}: " in said or "no sign of life" in said
    assert said.count("restart 1 of 3 from step ") == 2, said  # a commit between them
    assert losses(folder) == losses(undisturbed) and len(losses(folder)) == 30
    equal_weights(folder, undisturbed)
    nothing_left(nodes, *first.values(), *second.values())


@pytest.mark.slow
def test_a_gang_that_cannot_be_placed(nodes: RayNodes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    four = ("--cluster", "laptop:4", "--dp", "4", "--wait-for-resources", "2s")
    status, said = ended(begun(nodes, folder, *four), folder)
    assert status == 1
    assert "--on ray: no place for the ranks within 2 s: asked for 4 CPUs; present: 2 on 2 nodes (1 on 10." in said
    assert "Traceback" not in said
    nothing_left(nodes)


@pytest.mark.slow
def test_a_stop_writes_a_checkpoint_and_leaves_nothing(nodes: RayNodes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = begun(nodes, folder)
    reaches(process, folder, 2)
    ranks = ranks_of(folder)
    process.send_signal(signal.SIGINT)
    status, said = ended(process, folder)
    assert status == STOPPED and "stopping: SIGINT" in said, said
    assert list((folder / "checkpoints").glob("step-*"))
    nothing_left(nodes, *ranks.values())


@pytest.mark.slow
def test_a_cluster_of_this_machine_alone(nodes: RayNodes, undisturbed: Path, tmp_path: Path) -> None:
    folder, before = tmp_path / "run", set(Path("/tmp").glob("shardwise-ray-*"))
    process = begun(nodes, folder, "--json", home=tmp_path)
    reaches(process, folder, 2)
    (own,) = set(Path("/tmp").glob("shardwise-ray-*")) - before
    status, said = ended(process, folder)
    assert status == 0, said
    assert json.loads(folder.with_suffix(".out").read_text())["steps"] == 30
    equal_weights(folder, undisturbed)
    assert not (tmp_path / ".ray").exists() and not own.exists()
    nothing_left(nodes)


def test_more_devices_at_least_than_the_job_has(tmp_path: Path) -> None:
    require("ray", None if importlib.util.find_spec("ray") else "ray is not installed")
    found = shardwise(*SMALL, "--on", "ray", "--least-devices", "3", "--run-folder", str(tmp_path / "run"))
    said = "shardwise: error: --least-devices: 3, and the job has 2; use at most as many"
    assert found.status == 2 and found.err.splitlines()[-1] == said


def test_where_nobody_listens_is_one_line(tmp_path: Path) -> None:
    """Ray would try for minutes, and print each try."""
    require("ray", None if importlib.util.find_spec("ray") else "ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    found = shardwise(*SMALL, "--on", f"ray,address={address}", "--run-folder", str(tmp_path / "run"))
    assert (found.status, len(found.err.splitlines())) == (2, 1)
    assert f"--on ray: no cluster can be joined at {address}: [Errno 111] Connection refused; " in found.err


def connecting(tmp_path: Path, address: str) -> subprocess.Popen[str]:
    given = (*SMALL, "--on", f"ray,address={address}", "--run-folder", str(tmp_path / "run"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "shardwise", *given]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)


@pytest.mark.slow
def test_a_head_that_never_answers_is_one_line(tmp_path: Path) -> None:
    require("ray", None if importlib.util.find_spec("ray") else "ray is not installed")
    with socket.create_server(("", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = connecting(tmp_path, address)
        said = process.communicate(timeout=200)[1].splitlines()
    assert process.returncode == 2 and not any("Traceback" in line for line in said), said
    assert f"no cluster can be joined at {address}: the cluster has not answered for 60 s" in said[-1]


@pytest.mark.slow
def test_a_stop_while_ray_connects_is_at_once(tmp_path: Path) -> None:
    """Ray would wait for a minute for a cluster that does not answer."""
    require("ray", None if importlib.util.find_spec("ray") else "ray is not installed")
    with socket.create_server(("", 0)) as silent:  # Ray connects to the host's own address, not to loopback
        process = connecting(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        silent.settimeout(300)  # imports on a busy machine
        silent.accept()[0].close()  # ours, which only looks whether somebody listens
        with silent.accept()[0]:  # Ray's
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == -signal.SIGTERM


@pytest.mark.slow
def test_a_cluster_that_does_not_start_within_rays_limit_is_one_line(nodes: RayNodes, tmp_path: Path) -> None:
    nodes.limits = {"RAY_gcs_server_port_wait_time_s": "0"}
    try:
        status, said = ended(begun(nodes, tmp_path / "run", home=tmp_path), tmp_path / "run")
    finally:
        nodes.limits = {}
    assert status == 2 and "Traceback" not in said
    assert "--on ray: no cluster can be started on this machine: Timed out waiting for file" in said.splitlines()[-1]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shardwise.spec.installation as installation

    there = installation.is_installed
    monkeypatch.setattr(installation, "is_installed", lambda name: name != "ray" and there(name))
    found = shardwise(*SMALL, "--on", "ray", "--run-folder", str(tmp_path / "run"))
    said = "--on ray: needs the package ray, which is not installed; pip install 'shardwise[ray]'"
    assert found.status == 2 and found.err.splitlines()[-1] == f"shardwise: error: {said}"
