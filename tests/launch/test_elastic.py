"""`run.restarts.shrink`: a run goes on with what is left of its devices, nodes or hosts, and grows again."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cli.running import error_line
from cli.running import run as shardwise
from launch.running import wait_until
from launch.targets.ssh_hosts import ssh_hosts
from launch.test_torchrun import job as planned
from required import require
from shardwise.launch.elastic import HereTarget, SmallerSplits
from shardwise.launch.emulate.network import Network, Reach, emulated, most_together, why_not, wired
from shardwise.launch.outcome import STOPPED, Failure
from shardwise.launch.targets import hosts as over_ssh
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.metrics.lines import read_lines
from shardwise.spec import Job, SpecError
from shardwise.spec.emulation import Emulation
from shardwise.spec.run import Restarts
from shardwise.spec.wiring import Wiring
from shardwise.training.checkpoint.full_tensors import full_tensors
from training.faults import Ended, small_job, train
from training.faulty_worker import Fault
from training.runs import write_shards

FEW = {"checkpoints": {"steps": 2, "seconds": None}, "timeouts": {"start": 100, "step": 20, "checkpoint": 60}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


def losses(folder: Path) -> dict[int, float]:
    return {one["step"]: one["loss"] for one in read_lines(folder / "metrics.jsonl") if "loss" in one}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, however they were split."""
    found = RunFolder(folder).checkpoints
    place = found.of_step(found.committed()[0])
    manifest = read_manifest(place)
    return {key: one.read() for key, one in full_tensors(place, manifest, list(manifest.tensors)).items()}


def learned_the_same(ended: Ended, shards: str, tmp_path: Path) -> None:
    """As one process that nobody disturbed, up to the same step."""
    steps = max(losses(ended.folder))
    seldom = {**FEW, "checkpoints": {"steps": None, "seconds": None}, "steps": 10_000, "stop_at": steps}
    alone = train(small_job(shards, 1, run=seldom), tmp_path / "alone")
    alone.require(0)
    found, expected = losses(ended.folder), losses(alone.folder)
    assert sorted(found) == sorted(expected) == list(range(1, steps + 1))
    assert found == pytest.approx(expected, rel=1e-4)
    one, other = weights(ended.folder), weights(alone.folder)
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=1e-3, atol=1e-5)


def worlds(said: str) -> list[int]:
    return [int(number) for number in re.findall(r"started: (\d+) process", said)]


# -- what a job says ---------------------------------------------------------------------------------------


def test_restarts_are_a_number_or_more_than_that() -> None:
    for given_, meant in ((5, Restarts(most=5)), ({"shrink": True}, Restarts(shrink=True)), ({}, Restarts())):
        found = Job.from_dict({**planned("laptop:2", dp=2).to_dict(), "run": {"restarts": given_}})
        assert found.run.restarts == meant and Job.from_dict(found.to_dict()) == found
    for wrong, said in (
        (-1, "run.restarts: -1 is below 0"),
        ("often", "run.restarts: 'often'"),
        ({"shrinks": True}, "run.restarts.shrinks: unknown field"),
        ({"least_devices": 0}, "run.restarts.least_devices: 0 is below 1"),
    ):
        with pytest.raises(SpecError, match=re.escape(said)):
            Job.from_dict({**planned("laptop:2", dp=2).to_dict(), "run": {"restarts": wrong}})


SMALL = (
    *("--model", "tiny", "--cluster", "laptop:2", "--dp", "2", "--seq", "32", "--global-batch", "4"),
    *("--precision", "fp32"),
)


def test_what_cannot_shrink_is_refused(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        return error_line(shardwise("train", *SMALL, "--run-folder", str(tmp_path / "run"), *arguments))

    assert "--least-devices: 3, and the job has 2; use at most as many" in refused("--least-devices", "3")
    least = ("--set", "run.restarts.shrink=true", "--set", "run.restarts.least_devices=3")
    assert "run.restarts.least_devices: 3, and the job has 2" in refused(*least)
    assert "--wait-for-resources: " in refused("--wait-for-resources", "-1s")
    assert "run.restarts.shrink: needs a launcher" in refused("--least-devices", "1", "--print-torchrun")
    assert "run.restarts.shrink: a script for slurm starts" in refused("--least-devices", "1", "--on", "slurm")


# -- who is left -------------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_no_two_of_those_that_go_on_together_are_apart(nodes: int, apart: set[tuple[int, int]]) -> None:
    apart = {(one, other) for one, other in apart if one != other and max(one, other) < nodes}
    found = most_together(nodes, apart)
    assert found and not any((one, other) in apart for one in found for other in found)
    touched = {node for pair in apart for node in pair}
    assert set(range(nodes)) - touched <= set(found), "whom nothing separates is there"


@pytest.mark.slow
def test_lost_nodes_are_found_and_found_again() -> None:
    require("emulate", why_not())
    with emulated(Emulation(nodes=4, ranks_per_node=1, rate=1e9, delay=1e-3)) as network:
        reach = Reach(network)
        try:
            assert reach.nodes() == (0, 1, 2, 3)
            lose(network, 2)
            assert reach.nodes() == (0, 1, 3)
            network.partition(0, 1)
            assert reach.nodes() == (0, 3), "a pair that nothing separates; 1 and 3 are another"
            network.heal()
            assert reach.nodes() == (0, 1, 2, 3)
        finally:
            reach.close()


def test_a_device_whose_rank_fails_is_left_out_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs the others are named to the ranks, by the names that this process has for them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    whole = planned("laptop:4", dp=4)
    whole = Job.from_dict({**whole.to_dict(), "run": {"restarts": {"shrink": True, "retry": "1h"}, "device": "cuda"}})
    target = HereTarget(whole, RunFolder(tmp_path))
    target._begun = target._laid_out((0, 1, 2, 3))
    assert target.leave_out(Failure(None, "stuck", "")) is None
    assert target.leave_out(Failure(2, "killed", "")) == "goes on without device 2"
    assert target._laid_out(target._there()) and target.used == (0, 1, 3)
    assert target._visible() == {"CUDA_VISIBLE_DEVICES": "4,5,7"}
    assert target.job.strategy.world == 3 and Job.from_yaml((tmp_path / "job.yaml").read_text()) == target.job
    assert target.better() is None
    assert target.leave_out(Failure(2, "killed", "")) == "goes on without device 3", "rank 2 is on device 3 now"
    target._left_out = dict.fromkeys(target._left_out, 0.0)  # an hour later
    assert target.better() == "there is room for 4 ranks instead of 3"
    assert target._laid_out(target._there()) and target._visible() == {} and target.job == whole


def test_a_job_on_virtual_nodes_has_splits_for_fewer_of_them() -> None:
    whole = Job.from_dict({**planned("laptop:8", dp=8).to_dict(), "run": {"emulate": "4x2,1Gbit"}})
    splits = SmallerSplits(whole, 1)
    for nodes, emulation in ((4, "4x2,1Gbit,0"), (2, "2x2,1Gbit,0"), (1, "None")):
        found = next(splits.on([2] * nodes))
        assert (found.strategy.world, str(found.run.emulate)) == (2 * nodes, emulation)


# -- a run -------------------------------------------------------------------------------------------------


def goes_on(folder: Path, attempt: int, steps: int = 4) -> None:
    """Waits until that attempt has done some steps."""

    def told() -> int:
        return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0

    wait_until(lambda: (folder / "attempts" / f"attempt-{attempt:04d}").exists(), 200)
    before = told()
    wait_until(lambda: told() > before + steps, 200)


def stop_after(folder: Path, attempt: int) -> None:
    """Stops this process's run once that attempt has done some steps."""
    goes_on(folder, attempt)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_does_without_a_device_and_uses_it_again(shards: str, tmp_path: Path) -> None:
    """Rank 1 is killed at the same step again and again, as by a broken device; later it is well."""
    folder = tmp_path / "run"
    restarts = {"most": 1, "shrink": True, "retry": 0.5}
    whole = small_job(shards, 2, run={**FEW, "steps": 10_000, "restarts": restarts}, dp=2)
    threading.Thread(target=stop_after, args=(folder, 4), daemon=True).start()
    with mock.patch("shardwise.launch.local.LOOK_SECONDS", 0.2):
        ended = train(whole, folder, *(Fault("kill", "begin", 3, 1, attempt) for attempt in (1, 2)))
    ended.require(
        STOPPED, "restart 1 of 1", "goes on without device 1, from step 2", "changing: there is room for 2 ranks"
    )
    assert worlds(ended.said) == [2, 2, 1, 2]
    ended.require_whole()
    learned_the_same(ended, shards, tmp_path)


@pytest.mark.slow
def test_a_run_that_always_fails_ends_however_many_devices_it_leaves_out(shards: str, tmp_path: Path) -> None:
    restarts = {"most": 0, "shrink": True, "retry": "1ms"}
    whole = small_job(shards, 2, run={**FEW, "restarts": restarts}, dp=2)
    ended = train(whole, tmp_path / "run", *(Fault("raise", "begin", 0, rank, None) for rank in (0, 1)))
    ended.require(1, "; goes on without device ", "the moon is full; gave up after 0 restarts")
    assert worlds(ended.said) == [2, 1]


def lose(network: Network, node: int) -> None:
    """As if its cable were pulled."""
    for other in range(network.emulation.nodes):
        if other != node:
            network.partition(node, other)


@contextmanager
def beside(act: Callable[[Network], None]) -> Iterator[None]:
    """``act`` runs in a thread beside a run, with its network."""

    @contextmanager
    def own(emulation: Emulation, wiring: Wiring | None) -> Iterator[Network]:
        with wired(emulation, wiring) as network:
            thread = threading.Thread(target=act, args=(network,), daemon=True)
            thread.start()
            yield network
            thread.join(10)

    with mock.patch("shardwise.launch.run.wired", own):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 1])
def test_a_run_does_without_a_lost_node_and_uses_it_again(shards: str, tmp_path: Path, memory: int | None) -> None:
    """The rank there is killed and the node cut off; when it answers again, the run grows."""
    require("emulate", why_not())
    folder = tmp_path / "run"

    def act(network: Network) -> None:
        goes_on(folder, 1)
        lose(network, 1)
        _kill_rank(1)
        goes_on(folder, 2)
        network.heal()
        stop_after(folder, 3)

    restarts = {"most": 1, "shrink": True, "wait": 1}
    checkpoints = {"steps": 2, "seconds": None, "memory": memory}
    whole = small_job(
        shards, 3, run={**FEW, "steps": 10_000, "restarts": restarts, "checkpoints": checkpoints},
        pp=3, stage_layers="balanced",
    )  # fmt: skip
    with beside(act):
        ended = train(whole, folder, arguments=("--emulate", "3x1,1Gbit,1ms"))
    ended.require(STOPPED, "changing: there is room for 3 ranks instead of 2")
    assert worlds(ended.said) == [3, 2, 3]
    ended.require_whole()
    if memory:
        assert {one["restored_from"] for one in ended.lines() if "restored_from" in one} == {"memory"}
    learned_the_same(ended, shards, tmp_path)


def _kill_rank(rank: int) -> None:
    """Of this process's ranks."""
    wanted, parent = f"RANK={rank}".encode(), os.getpid()
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_does_without_a_lost_host_and_uses_it_again(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        monkeypatch.setenv(over_ssh.SSH, hosts.ssh)

        def act() -> None:
            goes_on(folder, 1)
            hosts.cut(1)
            goes_on(folder, 2)
            hosts.mend(1)
            stop_after(folder, 3)

        threading.Thread(target=act, daemon=True).start()
        restarts = {"most": 1, "shrink": True, "wait": 2}
        whole = small_job(shards, 2, run={**FEW, "steps": 10_000, "restarts": restarts}, dp=2)
        ended = train(whole, folder, arguments=("--on", str(hosts.file)))
    ended.require(STOPPED, "changing: 2 ranks have room again instead of 1")
    assert worlds(ended.said) == [2, 1, 2]
    ended.require_whole()
    learned_the_same(ended, shards, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_stages_are_cut_anew_while_a_rank_is_slow(shards: str, tmp_path: Path, compiled: bool) -> None:
    """Rank 1 waits in every layer: it ends with fewer of them, and the weights are those of a run without that."""
    folder = tmp_path / "run"
    run = {**FEW, "checkpoints": {"steps": 20, "seconds": None}, "steps": 10_000, "recut": {"every": 10, "steps": 3}}
    whole = small_job(shards, 2, run=run, pp=2)
    whole = replace(whole, training=replace(whole.training, compile=compiled))
    threading.Thread(target=stop_after, args=(folder, 2), daemon=True).start()
    with mock.patch("shardwise.launch.local.LOOK_SECONDS", 0.2):
        ended = train(whole, folder, Fault("slow", "begin", 0, 1, None), Fault("slow", "begin", 10, 1, None))
    ended.require(STOPPED, "changing: rank 1 took ", "stages of 2, 2 layers become ")
    cut = Job.from_yaml((folder / "recut.yaml").read_text())
    assert cut.strategy.stage_layers in ((3, 1), (4, 0))  # by how much slower it is, on this machine
    assert Job.from_yaml((folder / "job.yaml").read_text()) == cut
    ended.require_whole()
    learned_the_same(ended, shards, tmp_path)


def test_what_cannot_be_cut_anew_is_refused(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        recut = ("--set", "run.recut.every=100", *arguments)
        return error_line(shardwise("train", *SMALL, "--run-folder", str(tmp_path / "run"), *recut))

    assert "run.recut: the run has one pipeline stage" in refused()
    two = ("--dp", "1", "--pp", "2")
    assert "run.recut: needs a launcher that starts ranks anew" in refused(*two, "--print-torchrun")
    assert "run.recut: a script for slurm" in refused(*two, "--on", "slurm")
    assert "run.recut: records steps by itself" in refused(*two, "--profile", "steps=3:4")
    assert "run.recut.steps: 100 of 100" in refused(*two, "--set", "run.recut.steps=100")


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts are not used up meanwhile: one attempt waits until the host is there again."""
    from launch.running import QUICK, program
    from launch.targets.test_hosts import SHARED
    from shardwise.launch.local import supervise
    from shardwise.launch.targets.host_target import start_on
    from shardwise.launch.targets.registry import TargetRequest, target_named

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    whole = planned("laptop:2", dp=2)
    body = """
reporter.phase("step", 3)
note()
if attempt == 1:
    time.sleep(1)
    if rank == 1:
        (run / "gone").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    others_wait()
"""
    events: list[Any] = []
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        working = hosts.ssh
        monkeypatch.setenv(over_ssh.SSH, working)

        def act() -> None:
            wait_until(lambda: (tmp_path / "gone").exists())
            os.environ[over_ssh.SSH] = f"{working} -p 1"  # nobody listens there
            wait_until(lambda: len(list((tmp_path / "run").glob("attempt-*"))) == 2)
            time.sleep(3)
            os.environ[over_ssh.SSH] = working

        command = [*program(tmp_path, body, SHARED), str(tmp_path)]
        with start_on(TargetRequest(target_named(str(hosts.file)), whole)) as target:
            threading.Thread(target=act, daemon=True).start()
            outcome = supervise(
                command, 2, tmp_path / "run", start=target.start, layouts=target, timeouts=QUICK, restarts=1,
                on_event=events.append,
            )  # fmt: skip
    assert outcome.status == 0 and len(outcome.attempts) == 2, [str(event) for event in events]
