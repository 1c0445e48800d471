"""Copies of the state in the memory of nodes: whole, on two of them, and what a run restarts from."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cli.running import error_line
from cli.running import run as command
from engine.workers import on_ranks
from required import require
from shardwise.launch import preflight
from shardwise.launch.emulate.network import Network, why_not
from shardwise.launch.keepers import Keepers, keepers, place_here
from shardwise.launch.run import Launch
from shardwise.run.storage.keeper_store import KeeperStore
from shardwise.spec import Job
from training.faults import STEPS, Ended, final_state, small_job, train
from training.faulty_worker import Fault
from training.runs import boxes, job_of, whole, write_shards
from training.runs import run as run_in_pool

RARE = {"checkpoints": {"steps": 4, "seconds": None, "memory": 1}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: str) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_in_pool(small_job(shards), folder)
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Keepers]:
    """Two keepers of this machine, as of two nodes."""
    with closing(Keepers(tmp_path / "keepers.json")) as found:
        found.use([place_here(None, node) for node in range(2)])
        yield found


def port_of(one: Keepers, node: int) -> int:
    return one.kept[f"node {node}"].port


def lose(one: Keepers, node: int) -> None:
    """A node's memory is gone; an empty keeper takes its place."""
    port = port_of(one, node)
    os.kill(one.kept[f"node {node}"].process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while port_of(one, node) == port or f":{port_of(one, node)}" not in one.file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_copy_is_on_another_node_where_groups_of_ranks_share_one(two: Keepers) -> None:
    """Three groups on two nodes: the second group's next neighbour is on its own node."""
    two.use([place_here(None, node) for node in (0, 0, 1)])
    KeeperStore(two.file, 0).upload("keeper://nodes/a/x", lambda: iter([memoryview(b"state")]))
    lose(two, 0)
    assert KeeperStore(two.file, 0).read("keeper://nodes/a/x") == b"state"
    two.use([place_here(None, 0)])  # the other node is no longer part of the run
    with pytest.raises(FileNotFoundError):
        KeeperStore(two.file, 0).read("keeper://nodes/a/x")


def test_an_object_is_on_two_nodes_and_appears_whole(two: Keepers) -> None:
    stores = [KeeperStore(two.file, node) for node in (0, 1)]
    content = bytes(range(256)) * 1000
    pieces = [memoryview(content)[:100_000], memoryview(content)[100_000:]]
    stores[0].upload("keeper://nodes/a/x", lambda: iter(pieces))
    stores[0].put("keeper://nodes/a/y", b"small")
    lose(two, 0)
    for store in stores:
        assert store.read("keeper://nodes/a/x") == content
        assert store.read("keeper://nodes/a/x", 99_999, 100_003) == content[99_999:100_003]
        assert {name: facts.st_size for name, facts in store.listed("keeper://nodes/a").items()} == {
            "x": len(content), "y": 5,
        }  # fmt: skip
    stores[1].delete(["keeper://nodes/a/y"])
    with pytest.raises(FileNotFoundError):
        stores[0].facts("keeper://nodes/a/y")

    def broken() -> Iterator[memoryview]:
        yield pieces[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stores[0].upload("keeper://nodes/a/half", broken)
    assert "half" not in stores[0].listed("keeper://nodes/a")
    lose(two, 0)
    lose(two, 1)
    with pytest.raises(FileNotFoundError, match="no node's memory"):
        stores[1].read("keeper://nodes/a/x")


def test_a_stranger_gets_nothing(two: Keepers) -> None:
    KeeperStore(two.file, 0).put("keeper://nodes/secret", b"weights")
    assert two.file.stat().st_mode & 0o077 == 0
    with socket.create_connection(("127.0.0.1", port_of(two, 0)), 5) as connection:
        connection.sendall(
            b'guessed\n{"what": "get", "how": {"key": "keeper://nodes/secret", "first": 0, "last": 9}}\n'
        )
        assert connection.recv(100) == b""
    with socket.create_connection(("127.0.0.1", port_of(two, 0)), 5) as connection:
        connection.sendall(b"g" * 200)  # a line without end
        assert connection.recv(100) == b""


def copied(job: Job, file: str, losses: int) -> dict[str, Any]:
    """Two copies, the second with another state; then what is loaded in this layout once nodes are lost."""
    import torch.distributed as dist

    from shardwise.engine.engine import Engine
    from shardwise.layout.groups import node_of
    from shardwise.training.checkpoint.save import MemoryCopies, memory_folder

    engine, half = Engine(job, seed=3), max(1, dist.get_world_size() // 2)
    folder = memory_folder(Path(file), node_of(dist.get_rank(), half))
    if losses == 0:
        copies = MemoryCopies(engine, folder, 1, 60)
        for step in (1, 2):
            for parameter in engine.parameters:
                parameter.parameter.data.add_(step)
            copies.save(step, {"data": {"batch": step, "left_out": [], "sequences": 8}, "losses": []})
        copies.finish()
        dist.barrier()
        return {"boxes": boxes(engine), "steps": folder.present()}
    from shardwise.training.checkpointing import load_newest

    state = load_newest(engine, folder)
    return {"boxes": boxes(engine), "step": None if state is None else state.position.step}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "zero": 3, "tp": 2}, {"pp": 2, "dp": 2, "zero": 1, "offload": {"optimizer": 1}}]
)
def test_any_layout_is_copied_and_any_other_restores_it(two: Keepers, shards: str, layout: dict[str, Any]) -> None:
    """Only the last copy is kept; with one node lost it is whole, in another layout too; with both there is none."""
    saved = on_ranks(4, copied, job_of(shards, 4, **layout), str(two.file), 0)
    assert saved[0]["steps"] == [2]
    lose(two, 1)
    restored = on_ranks(2, copied, job_of(shards, 2, tp=2), str(two.file), 1)
    assert [one["step"] for one in restored] == [2, 2]
    one, other = whole(saved), whole(restored)
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
    lose(two, 0)
    assert on_ranks(1, copied, job_of(shards, 1), str(two.file), 2)[0]["step"] is None


@contextmanager
def losing(nodes: tuple[int, ...]) -> Iterator[None]:
    """Once a run has failed, and before it is restarted, the memory of these nodes is lost."""
    running: list[Keepers] = []
    last_commit = Launch._last_commit
    calls: list[int] = []

    @contextmanager
    def noted(file: Path, network: Network | None) -> Iterator[Keepers]:
        with keepers(file, network) as one:
            running.append(one)
            yield one

    def lost(launch: Launch) -> Any:
        calls.append(1)
        for node in nodes if len(calls) == 2 else ():  # the first is before the start
            lose(running[0], node)
        return last_commit(launch)

    with mock.patch("shardwise.launch.run.keepers", noted), mock.patch.object(Launch, "_last_commit", lost):
        yield


def restored(ended: Ended) -> list[tuple[str, int]]:
    return [(one["restored_from"], one["step"]) for one in ended.lines() if "restored_from" in one]


def test_a_killed_rank_restarts_from_memory(shards: str, undisturbed: Path, tmp_path: Path) -> None:
    """The disk has step 4, the memory step 6: the run goes on from there, and ends with the same bits."""
    ended = train(small_job(shards, run=RARE), tmp_path / "run", Fault("kill", "backward", 6, 1))
    ended.require(0, "rank 1 (step, step 6): killed by SIGKILL")
    assert restored(ended) in ([("memory", 5)], [("memory", 6)]), "the last one may have been under way"
    assert all(one["memory_copy_seconds"] >= 0 for one in ended.lines() if "memory_copy" in one)
    assert final_state(ended.folder) == final_state(undisturbed)
    assert not (ended.folder / "keepers.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "restarts_from", "arguments"),
    [
        ((0,), "memory", ()),
        pytest.param((0, 1), "checkpoint", (), marks=pytest.mark.slow),
        pytest.param((1,), "memory", ("--emulate", "2x1,1Gbit,1ms"), marks=pytest.mark.slow),
        pytest.param((0, 1), "checkpoint", ("--emulate", "2x1,1Gbit,1ms"), marks=pytest.mark.slow),
    ],
)
def test_a_lost_node_restarts_from_its_neighbour_and_without_copies_from_disk(
    shards: str,
    undisturbed: Path,
    tmp_path: Path,
    lost: tuple[int, ...],
    restarts_from: str,
    arguments: tuple[str, ...],
) -> None:
    """On virtual nodes; the quick ones have two keepers on this machine."""
    if arguments:
        require("emulate", why_not())
    with losing(lost), mock.patch.object(Keepers, "nodes", 2):
        fault = Fault("kill", "begin", 6, 1)
        ended = train(small_job(shards, run=RARE), tmp_path / "run", fault, arguments=arguments)
    ended.require(0, "killed by SIGKILL")
    assert restored(ended) in [[(restarts_from, step)] for step in ((5, 6) if restarts_from == "memory" else (4,))]
    assert final_state(ended.folder) == final_state(undisturbed, STEPS)
    assert [one["step"] for one in ended.lines() if "loss" in one] == list(range(1, STEPS + 1))


def test_who_starts_ranks_without_keepers_is_told(shards: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job(shards, run=RARE).to_yaml(), encoding="utf-8")
    line = error_line(command("train", str(file), "--run-folder", str(tmp_path / "run"), "--print-torchrun"))
    assert "run.checkpoints.memory: needs a process on every node that keeps the copies" in line


def test_copies_that_the_machine_has_no_memory_for_are_refused(shards: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job(shards, run=RARE).to_yaml(), encoding="utf-8")
    with mock.patch.object(preflight, "COPIES", 10**9):
        result = command("train", str(file), "--run-folder", str(tmp_path / "run"))
    assert result.status == 1 and "run.checkpoints.memory: 1000000000 copies of the state are" in result.err
