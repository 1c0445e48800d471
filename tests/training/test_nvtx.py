"""NVTX ranges of chosen steps: how they are asked for, where they are refused, and that nothing is pushed without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cli.running import error_line, run
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.profiler_ranges import nvtx_ranges
from shardwise.engine.torch_private import profiler_enabled
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Profile, RecutPolicy, Run, StepWindow
from shardwise.training.profiler import layers_named, recorded

SMALL = (
    *("--model", "tiny", "--cluster", "laptop:1", "--seq", "64", "--global-batch", "2", "--precision", "fp32"),
    *("--steps", "4"),
)


def job(**training: object) -> Job:
    fields = {"global_batch": 2, "seq": 16, "precision": "fp32", **training}
    return Job.from_dict({"model": "tiny", "cluster": "laptop:1", "training": fields})


def test_the_steps_are_a_field_of_the_job() -> None:
    asked = replace(job(), run=Run(nvtx=StepWindow.from_dict("steps=10:12")))
    assert Job.from_dict(asked.to_dict()) == asked
    assert asked.to_dict()["run"]["nvtx"] == {"first": 10, "last": 12}
    assert StepWindow.from_dict("steps=1:900").last == 900  # nothing is kept of them


@pytest.mark.parametrize(
    ("text", "problem"), [("10:12", "names no steps"), ("steps=0", "0 is"), ("steps=12:10", "step 12 is after step 10")]
)
def test_no_steps(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        StepWindow.from_dict(text)


def test_one_profiler_at_a_time() -> None:
    window = StepWindow(first=2, last=3)
    with pytest.raises(SpecError, match=r"nvtx: .*run\.profile"):
        Run(nvtx=window, profile=Profile(first=2, last=3))
    with pytest.raises(SpecError, match=r"nvtx: .*run\.recut"):
        Run(nvtx=window, recut=RecutPolicy())
    with pytest.raises(SpecError, match="nvtx: step 3 is after the last, 2"):
        Run(nvtx=window, steps=2)


def test_cpus_have_no_tool_that_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for command in (
        ("train", *SMALL, "--nvtx", "steps=2:3", "--run-folder", str(folder)),
        ("train", *SMALL, "--set", "run.nvtx={first: 2, last: 3}", "--run-folder", str(folder), "--rehearse", "3"),
        ("bench", "step", *SMALL[:-2], "--nvtx"),
    ):
        line = error_line(run(*command))
        assert "nvtx: NVTX ranges are read by the tools of a GPU, and the ranks compute on CPUs" in line
    assert not folder.exists()


@pytest.mark.skipif(hasattr(torch._C, "_nvtx"), reason="this torch has NVTX: test_nvtx_gpu.py")
def test_a_step_pushes_nothing_unless_asked() -> None:
    """A build of torch without CUDA has no NVTX, and says so at the first range."""
    with process_group(0, 1, dist.HashStore(), device="cpu"):
        engine = Engine(job(), device="cpu")
        engine.step(sample_batch(engine.job, 0, 0, "cpu"))
        with pytest.raises(RuntimeError, match="NVTX"):
            torch.cuda.nvtx.range_push("a range")
        with pytest.raises(RuntimeError, match="NVTX"), nvtx_ranges():
            pass
        assert not profiler_enabled()


class Doubled(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Doubled() for index in range(2)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_have_ranges_compiled_or_not(compiled: bool) -> None:
    """Around the compiled layer: a hook would be compiled with it, and a range inside is left out."""
    stage = Stage()
    if compiled:
        for layer in stage.layers.values():
            layer.compile(backend="eager", fullgraph=True)
    stage(torch.ones(1, 2))
    with recorded(torch.device("cpu")) as ranges:
        with layers_named([stage]):
            stage(torch.ones(1, 2))
        stage(torch.ones(1, 2))
    assert [one.name for one in ranges(0) if one.name.startswith("layer")] == ["layer 0", "layer 1"]
