"""`--on ray --least-devices`: fewer devices and more again, with the same batches and, to rounding, the same losses."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from cli.running import run as shardwise
from launch.ray.nodes import ray_nodes
from launch.ray.test_ray import SMALL, begun, ended, losses, nothing_left, ranks_of, reaches
from launch.running import wait_until
from launch.test_torchrun import job
from shardwise.launch.elastic import SmallerSplits
from shardwise.launch.outcome import STOPPED


def test_the_split_for_fewer_devices_keeps_the_batches() -> None:
    whole = job("laptop:4", dp=4)
    splits = SmallerSplits(whole, 1)
    nodes = [1, 1, 1, 1]
    for count in (4, 3, 2, 1):  # 32 sequences do not divide over dp 3: there it is a pipeline
        found = next(splits.on(nodes[:count]))
        assert found.strategy.world == count and found.training.sequences(found.strategy.data_parallel) == 32
        assert found.run == whole.run
    assert [one.strategy.world for one in splits.on(nodes, more_than=1)] == [4, 3, 2]
    assert not list(SmallerSplits(whole, 3).on(nodes[:2]))


@pytest.mark.slow
def test_one_two_four_two_workers_keep_the_batches_and_the_losses(tmp_path: Path) -> None:
    four = (
        "--cluster",
        "laptop:4",
        "--dp",
        "4",
        "--steps",
        "4000",
        "--wait-for-resources",
        "3s",
        "--least-devices",
        "1",
    )
    folder = tmp_path / "run"
    with ray_nodes(1) as nodes:

        def goes_on_with(count: int) -> None:
            """So many ranks are there, and have done steps."""
            wait_until(lambda: process.poll() is not None or len(ranks_of(folder)) == count, 200)
            done = max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0
            reaches(process, folder, done + 3)
            assert len(ranks_of(folder)) == count, folder.with_suffix(".log").read_text()

        process = begun(nodes, folder, *four)
        goes_on_with(1)
        nodes.add(1)
        goes_on_with(2)
        nodes.add(2)
        goes_on_with(4)
        nodes.lose(2)
        goes_on_with(2)
        process.send_signal(signal.SIGTERM)
        status, said = ended(process, folder)
        assert status == STOPPED, said
        worlds = re.findall(r"started: (\d) process", said)
        assert worlds == ["1", "2", "4", "2"], said
        found = losses(folder)
        nothing_left(nodes)
    steps = max(found)
    alone = ("--cluster", "laptop:1", "--dp", "1", "--steps", "4000", "--set", f"run.stop_at={steps}")
    assert shardwise(*SMALL, *alone, "--run-folder", str(tmp_path / "alone")).status == 0
    expected = losses(tmp_path / "alone")
    assert sorted(found) == sorted(expected) == list(range(1, steps + 1))
    assert found == pytest.approx(expected, rel=1e-4)
