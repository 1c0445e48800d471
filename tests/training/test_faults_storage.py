"""Checkpoints that are damaged or hostile, disks that are full or read-only: each named, and nothing good is lost."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line
from cli.running import run as command
from launch.warm import warm_ranks
from run.checkpoint.sealed import resealed
from shardwise.spec import Job
from shardwise.training.checkpoint.load import problems_of
from training.faults import STEPS, final_state, read_only, small_disk, small_job, train
from training.faulty_worker import Fault, fill
from training.runs import run as run_in_pool
from training.runs import write_shards

KEEP_ALL = {"checkpoints": {"steps": 2, "seconds": None, "keep": 9}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: str) -> Path:
    """The folder of a run with all its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_in_pool(small_job(shards, run=KEEP_ALL), folder)
    return folder


class Hostile:
    """What a pickle of it does when it is loaded: leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def replace_shard(folder: Path, content: bytes) -> None:
    """Another file in place of a shard, with a manifest that agrees."""
    name = "shard-00001.safetensors"
    (folder / name).write_bytes(content)
    told = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    resealed(folder, lambda document: document["files"].update({name: told}))


def test_damaged_and_hostile_checkpoints_are_named_and_the_last_good_one_is_taken(
    tmp_path: Path, shards: str, undisturbed: Path
) -> None:
    """Seven kinds in one folder, all of them newer than the only good one; the run goes on from that, bit for bit."""
    run, mark = tmp_path / "run", tmp_path / "code was run"
    shutil.copytree(undisturbed, run)
    folder = run / "checkpoints"
    good = folder / "step-00000008"
    for step in (10, 12, 14, 16):
        shutil.copytree(good, folder / f"step-{step:08d}")
        resealed(folder / f"step-{step:08d}", partial(dict.update, step=step))

    def of(step: int) -> Path:
        return folder / f"step-{step:08d}"

    raw = bytearray((of(4) / "shard-00001.safetensors").read_bytes())
    raw[-3] ^= 1
    (of(4) / "shard-00001.safetensors").write_bytes(raw)
    (of(6) / "shard-00000.safetensors").write_bytes(raw[:-1000])
    (of(8) / "shard-00000.safetensors").unlink()
    number = (of(10) / "manifest.json").read_text().replace('"optimizer_steps": 8', '"optimizer_steps": 9')
    (of(10) / "manifest.json").write_text(number)
    replace_shard(of(12), pickle.dumps(Hostile(mark)))
    (of(12) / "optimizer.pt").write_bytes(pickle.dumps(Hostile(mark)))
    resealed(of(14), lambda one: one["files"].update({"../../outside.safetensors": one["files"].popitem()[1]}))
    (of(16) / "shard-00000.safetensors").rename(tmp_path / "elsewhere")
    (of(16) / "shard-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    (folder / "step-00000018").symlink_to(undisturbed / "checkpoints" / "step-00000008")

    ended = train(small_job(shards, run={"checkpoints": {"steps": 2, "seconds": None, "keep": 1}}), run)
    ended.require(
        0,
        "step-00000018: is a link",
        "step-00000016/shard-00000.safetensors: is a link",
        "step-00000014/manifest.json: does not describe a checkpoint",
        "step-00000012/shard-00001.safetensors: cannot be read",
        "step-00000010/manifest.json: is damaged: its checksum differs",
        "step-00000008/shard-00000.safetensors: is missing",
        "step-00000006/shard-00000.safetensors: has",
        "step-00000004/shard-00001.safetensors: is damaged: its checksum differs",
    )
    assert not mark.exists()
    assert [one["step"] for one in ended.lines() if "loss" in one] == list(range(1, STEPS + 1))
    assert final_state(run) == final_state(undisturbed)
    assert not problems_of(good)  # written anew; those beyond it are nobody's business
    assert ended.checkpoints.committed()[:6] == [18, 16, 14, 12, 10, 8]


def full_disk_job(shards: str, policy: str) -> Job:
    return small_job(shards, run={"checkpoints": {"steps": 2, "seconds": None, "disk_full": policy}})


@pytest.mark.slow
def test_a_full_disk_stops_a_run_or_does_not(tmp_path: Path, shards: str, undisturbed: Path) -> None:
    """To the last byte of a small disk that has the whole run's folder; what was committed stays whole."""
    run, filler = tmp_path / "disk" / "run", tmp_path / "disk" / "filler"
    with small_disk(tmp_path / "disk", "size=32m"):
        ended = train(full_disk_job(shards, "stop"), run, Fault(f"fill {filler}", "committed", 2, rank=0))
        ended.require(2, "step-00000004: rank 0 could not write its part: No space left on device; make room")
        ended.require_whole()
        assert ended.checkpoints.committed() == [2]

        line = error_line(train(full_disk_job(shards, "stop"), run).result)
        assert line.endswith("cannot be written (No space left on device); make room, or choose another folder")
        filler.unlink()

        # Room enough to start, and not for the corpus that rank 0 builds: no restart would mend it.
        (tmp_path / "disk" / "room").write_bytes(bytes(2**20))
        fill(filler)
        (tmp_path / "disk" / "room").unlink()
        small = (
            "--model",
            "tiny",
            "--cluster",
            "laptop:1",
            "--seq",
            "32",
            "--global-batch",
            "4",
            "--precision",
            "fp32",
        )
        with warm_ranks():
            found = command("train", *small, "--run-folder", str(tmp_path / "disk" / "other"))
        assert (found.status, found.err.count("started: ")) == (2, 1), found.err
        assert found.err.endswith("has no space left; make room and start it again\n")
        filler.unlink()
        shutil.rmtree(tmp_path / "disk" / "other")

        faults = [Fault(f"fill {filler}", "begin", 3, 0, None), Fault(f"free {filler}", "begin", 5, 0, None)]
        ended = train(full_disk_job(shards, "continue"), run, *faults)
        ended.require(0, "no checkpoint: rank 0 could not write its part: No space left on device")
        ended.require_whole()
        assert ended.checkpoints.committed() == [8, 6]
        assert final_state(run) == final_state(undisturbed)
        assert [one["step"] for one in ended.lines() if "loss" in one] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_rank_with_a_limit_on_what_it_may_write(tmp_path: Path, shards: str, undisturbed: Path) -> None:
    """The other rank, by a limit of the system's: rank 0 hears of it at once. Without its last checkpoint no run ends
    well, whatever the policy says; the same command then goes on."""
    job, run = full_disk_job(shards, "continue"), tmp_path / "run"
    ended = train(job, run, Fault("limit", "begin", 5, rank=1))
    ended.require(
        2,
        "no checkpoint: rank 1 could not write its part: File too large",
        "step-00000008: could not be written, so the run is not done; make room and start it again",
    )
    ended.require_whole()
    assert ended.checkpoints.committed() == [4, 2]
    train(job, run).require(0)
    assert final_state(run) == final_state(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "at"),
    [
        ("moved", 3),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("removed", 3), ("replaced", 3), ("checkpoints", 3))),
        pytest.param("moved", 7, marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_is_not_there_any_more(
    what: str, at: int, tmp_path: Path, shards: str, undisturbed: Path
) -> None:
    """In the middle of a run, or in its last step: one line, no half a folder, and what was moved goes on elsewhere."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    ended = train(small_job(shards), run, Fault(f"move {what}", "begin", at, rank=1))
    ended.require(2, "was moved, removed or replaced while the run went on; move it back, or name where it is now")
    assert ended.said.count("shardwise: error: ") == 1 and "Done" not in ended.result.out
    left = [one.name for one in run.iterdir()] if run.exists() else []
    assert "checkpoints" not in left and (not left or what == "checkpoints"), left
    if what == "moved":
        assert "was moved" in command("status", str(elsewhere)).out
        train(small_job(shards), elsewhere).require(0)
        assert final_state(elsewhere) == final_state(undisturbed)


def test_a_folder_that_cannot_be_written(tmp_path: Path, shards: str) -> None:
    with read_only(tmp_path / "place"):
        run = tmp_path / "place" / "run"
        (tmp_path / "job.yaml").write_text(small_job(shards).to_yaml(), encoding="utf-8")
        line = error_line(command("train", str(tmp_path / "job.yaml"), "--run-folder", str(run)))
        assert line.startswith(f"{run}/checkpoints: cannot be written (")
        assert line.endswith("; choose another folder")
