"""What a tool of NVTX is told of a run: phases, layers, collectives, microbatches and steps, as nested ranges."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.collectives.test_nccl_gpu import DENSE, WORLD, job, on_one_gpu
from required import require
from shardwise.engine.engine import Engine
from shardwise.engine.labels import label_of
from shardwise.measure.reference import sample_batch
from shardwise.measure.step import cluster_name_here
from shardwise.spec.run import StepWindow
from shardwise.training.profiler import NvtxSteps

RECORDER = Path(__file__).with_name("nvtx_recorder.c")
MARKED = StepWindow(first=6, last=7)  # other steps are replayed from CUDA graphs by then
STEPS = 8


@dataclass
class Range:
    name: str
    inside: list[Range] = field(default_factory=list)

    def all(self) -> Iterator[Range]:
        yield self
        for one in self.inside:
            yield from one.all()


@dataclass
class Told:
    """Of one process: the outermost ranges of each thread, and all calls in their order."""

    threads: dict[str, list[Range]]
    calls: list[tuple[str, str]]

    def names(self) -> list[str]:
        return [one.name for ranges in self.threads.values() for top in ranges for one in top.all()]

    def step(self, number: int) -> Range:
        (found,) = [one for ranges in self.threads.values() for one in ranges if one.name == f"step {number}"]
        return found


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    require("cuda", None if torch.cuda.is_available() else "needs a GPU")
    require("cc", None if shutil.which("cc") else "needs a C compiler")
    library = tmp_path / "recorder.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, RECORDER, "-ldl"], check=True)
    return library


def told(folder: Path) -> list[Told]:
    """Of every process that made ranges; each range is closed, by its own thread."""
    return [_told(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.nvtx"))]


def _told(text: str) -> Told:
    threads: dict[str, list[Range]] = {}
    opened: dict[str, list[Range]] = {}
    calls = []
    for line in text.splitlines():
        thread, what, name = line.split("\t")
        calls.append((what, name))
        stack = opened.setdefault(thread, [])
        if what == "push":
            one = Range(name)
            (stack[-1].inside if stack else threads.setdefault(thread, [])).append(one)
            stack.append(one)
        elif what == "pop":
            stack.pop()
    assert not any(opened.values()), opened
    return Told(threads, calls)


def trained(library: Path, folder: Path, *flags: str) -> list[Told]:
    """`shardwise train` of a few steps on one GPU, under the recorder."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "shardwise", "train", "--model", "tiny"),
        *("--cluster", cluster_name_here("cuda"), "--gpus", "1", "--seq", "128", "--global-batch", "4"),
        *("--microbatch", "2", "--steps", str(STEPS), "--run-folder", str(folder / "run"), *flags),
    ]
    records = folder / "records"
    records.mkdir()
    under = {"NVTX_INJECTION64_PATH": str(library), "LD_PRELOAD": str(library), "NVTX_RECORDS": str(records)}
    done = subprocess.run(command, env=os.environ | under, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return told(records)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_tells_its_steps(recorder: Path, tmp_path: Path, compiled: bool) -> None:
    flags = ("--nvtx", "steps=6:7", "--set", f"training.compile={str(compiled).lower()}")
    (found,) = trained(recorder, tmp_path, *flags)
    assert [name for name in found.names() if label_of(name).kind == "step"] == ["step 6", "step 7"]
    for number in (6, 7):
        step = found.step(number)
        passes = ["forward 0", "backward 0", "forward 1", "backward 1"]
        assert [one.name for one in step.inside if label_of(one.name).kind == "pass"] == passes
        forward = next(one for one in step.inside if one.name == "forward 0")
        layers = [one.name for one in forward.inside if label_of(one.name).kind == "layer"]
        assert layers == [f"layer {index}" for index in range(len(layers))] and len(layers) > 1
        assert {"data", "optimizer"} <= {one.name for one in step.all()}
    # Only these steps are inside of what `nsys --capture-range=cudaProfilerApi` records.
    assert found.calls[0][0] == "cudaProfilerStart" and found.calls[-1][0] == "cudaProfilerStop"


def test_a_run_without_ranges_tells_nothing(recorder: Path, tmp_path: Path) -> None:
    assert trained(recorder, tmp_path) == []


def marked_steps(layouts: dict[str, Any]) -> list[int]:
    """Steps of each layout; what a push returns outside of all ranges is their depth, if all were closed."""
    depths = []
    for one in layouts.values():
        engine = Engine(one, device="cuda")
        ranges = NvtxSteps(engine, MARKED)
        for number in range(1, STEPS + 1):
            batch = sample_batch(one, number, 0, "cuda").share(engine.mesh.rank("dp"), engine.mesh.size("dp"))
            with ranges.step(number):
                engine.step(batch)
        depths.append(int(torch.cuda.nvtx.range_push("outside")))
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
    return depths


def test_every_rank_tells_its_collectives(recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline with split backward passes beside data parallelism, FSDP, and tensor parallelism."""
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(recorder))
    monkeypatch.setenv("NVTX_RECORDS", str(tmp_path))
    layouts = {
        "pp": job(DENSE, {"dp": 2, "pp": 2, "schedule": "zb-h1"}, WORLD),
        "zero-3": job(DENSE, {"dp": 4, "zero": 3}, WORLD),
        "tp": job(DENSE, {"dp": 2, "tp": 2}, WORLD),
    }
    assert on_one_gpu(tmp_path, marked_steps, layouts) == [[0, 0, 0]] * WORLD
    ranks = told(tmp_path)
    assert len(ranks) == WORLD
    for rank in ranks:
        assert len(rank.threads) > 1  # backward passes run in threads of autograd
        labels = [label_of(name) for name in rank.names() if name != "outside"]
        assert all(one.kind != "none" for one in labels)
        assert {one.dimension for one in labels if one.kind == "begin" and one.bytes} >= {"pp", "dp", "tp"}
        assert {one.pass_kind for one in labels if one.kind == "pass" and one.stage is not None} == {
            "forward", "backward", "weight gradients",
        }  # fmt: skip
        assert [one.number for one in labels if one.kind == "step"] == [6, 7] * len(layouts)
