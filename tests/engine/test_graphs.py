"""When a step is recorded as a CUDA graph, and what happens where it cannot be; the recording itself needs a GPU."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.recompute_cases import GPT, MIXTURE, batch, job_of
from engine.workers import on_ranks
from shardwise.engine import graphs
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.graphs import WARM_STEPS, StepGraphs, why_not_recorded
from shardwise.engine.trainer import StepResult
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload
from shardwise.spec.training import Training

GPU = torch.device("cuda")


def job(**training: Any) -> Job:
    one = job_of(GPT)
    return replace(one, training=replace(one.training, **training))


@pytest.mark.parametrize(
    ("changed", "device", "reason"),
    [
        (job(), GPU, None),
        (job(), torch.device("cpu"), "a CPU has none"),
        (job(graphs=False), GPU, "training.graphs is false"),
        (replace(job_of(MIXTURE), training=replace(job().training, compile=True)), GPU, "only where graphs: true"),
        (replace(job_of(MIXTURE), training=replace(job().training, compile=True, graphs=True)), GPU, None),
        (job_of(GPT, dp=2), GPU, "several processes"),
        (job_of(GPT, offload=Offload(optimizer=0.5)), GPU, "offloaded"),
    ],
)
def test_what_cannot_be_recorded_is_known_before(changed: Job, device: torch.device, reason: str | None) -> None:
    found = why_not_recorded(changed, device)
    assert found is None if reason is None else reason in str(found)


def test_graphs_that_a_job_requires_are_an_error_where_there_are_none() -> None:
    with pytest.raises(SpecError, match=r"training\.graphs: there are no CUDA graphs: a CPU has none; graphs: auto"):
        steps_of(job(graphs=True))


def test_the_field_takes_what_yaml_makes_of_on_and_off() -> None:
    assert Training.from_dict({"graphs": True}).graphs is True
    assert Training.from_dict({"graphs": "auto"}).graphs == "auto"
    with pytest.raises(SpecError, match="choose one of auto, True, False"):
        Training.from_dict({"graphs": "sometimes"})


class Steps:
    """Counts what is called, in place of an engine."""

    def __init__(self) -> None:
        self.plain, self.replayed, self.forgotten = 0, 0, 0
        self.groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0}]

    def step(self, batch: Batch, *, loss_limit: Tensor | float | None) -> StepResult:
        self.plain += 1
        return StepResult(torch.zeros(()), torch.zeros(()))

    def forget(self) -> None:
        self.forgotten += 1


def steps_of(one: Job) -> tuple[Steps, StepGraphs]:
    steps = Steps()
    return steps, StepGraphs(one, steps.groups)


def run_once(steps: Steps, graphs: StepGraphs, number: int = 2) -> None:
    graphs(steps.step, steps.forget, rows(number), None)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "why_not_recorded", lambda job, device: None)
    monkeypatch.setattr(graphs, "_too_little_room", lambda: None)


class Replayed:
    """In place of a graph."""

    pool = None

    def __init__(self, step: Any, groups: Any, batch: Batch, pool: Any) -> None:
        self.steps: Steps = step.__self__

    def replay(self, batch: Batch, rates: list[float], loss_limit: float | None) -> StepResult:
        self.steps.replayed += 1
        return StepResult(torch.zeros(()), torch.zeros(()))


def rows(number: int) -> Batch:
    tokens = torch.zeros(number, 4, dtype=torch.int64)
    return Batch.of(tokens, tokens)


@pytest.mark.usefixtures("on_gpu")
def test_a_shape_is_recorded_after_it_has_run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graph", Replayed)
    steps, run = steps_of(job())
    for _ in range(WARM_STEPS + 3):
        run_once(steps, run)
    assert (steps.plain, steps.replayed, run.recorded) == (WARM_STEPS, 3, 1)
    run_once(steps, run, 4)
    assert (steps.plain, run.recorded) == (WARM_STEPS + 1, 1)
    with torch.profiler.profile():
        run_once(steps, run)
    assert (steps.plain, steps.replayed) == (WARM_STEPS + 2, 3)


@pytest.mark.usefixtures("on_gpu")
def test_a_step_that_cannot_be_recorded_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for ...")

    monkeypatch.setattr(graphs, "_Graph", fails)
    steps, run = steps_of(job())
    with caplog.at_level(logging.WARNING):
        for _ in range(WARM_STEPS + 3):
            run_once(steps, run)
    assert (steps.plain, steps.forgotten) == (WARM_STEPS + 3, 1)
    (line,) = caplog.messages
    assert line == ("no CUDA graphs: the step cannot be recorded: operation not permitted when stream is capturing")


def test_memory_of_other_processes_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of 40 GB, a step of 20 GB beside them twice: 80 GB."""
    held = {"max_memory_allocated": 60e9, "memory_allocated": 40e9, "memory_reserved": 65e9}
    for name, number in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number)
    for free, fits in ((30e9, True), (15e9, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 141e9))
        assert (graphs._too_little_room() is None) == fits


@pytest.mark.usefixtures("on_gpu")
def test_the_first_problem_of_a_recording_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that its end failed as well."""

    def fails(*arguments: Any) -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB.\nSee ...")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs, "_Graph", fails)
    steps, run = steps_of(job())
    for _ in range(WARM_STEPS + 1):
        run_once(steps, run)
    assert run.reason == "the step cannot be recorded: CUDA out of memory. Tried to allocate 3.50 GiB."
    steps, required = steps_of(job(graphs=True))
    for _ in range(WARM_STEPS):
        run_once(steps, required)
    with pytest.raises(SpecError, match="the step cannot be recorded"):
        run_once(steps, required)


def test_the_compiler_s_problem_is_told_with_its_name() -> None:
    told = ["backend='inductor' raised:", "OutOfMemoryError: CUDA out of memory.", "", "Set TORCHDYNAMO_VERBOSE=1 ..."]
    assert graphs._first_problem(RuntimeError("\n".join(told))) == " ".join(told[:2])


@pytest.mark.parametrize("rows", [1, 2])
def test_a_recorded_batch_is_laid_out_as_the_others(rows: int) -> None:
    """A compiled layer that is given positions of other strides would be compiled anew while it is recorded."""
    text = torch.arange(rows * 5).view(rows, 5)
    for given in (text, text[:, 1:], text[:1].expand(rows, -1), torch.arange(5).expand_as(text), text[:1, 1:]):
        copy = graphs.laid_out_as(given)
        assert torch.equal(copy, given) and copy.stride() == given.stride()
        graphs._elements(copy).zero_()
        assert not copy.any() and int(text.sum()) == sum(range(rows * 5))


def test_rows_with_positions_of_their_own_have_another_graph() -> None:
    tokens, labels = batch(GPT, 0)
    shared = Batch.of(tokens, labels)
    apart = replace(shared, positions=shared.positions.contiguous())
    assert graphs._shape(shared) != graphs._shape(apart)


def an_engine_lives_on() -> bool:
    """Whether what a reference held is still there without a collection of garbage: gigabytes, on a GPU."""
    gc.disable()
    engine = Engine(job())
    engine.step(Batch.of(*batch(GPT, 0)))
    left = weakref.ref(engine)
    del engine
    gc.enable()
    return left() is not None


def test_no_cycle_of_references_keeps_an_engine() -> None:
    assert on_ranks(1, an_engine_lives_on) == [False]


def test_what_a_batch_has_decides_which_graph_it_takes() -> None:
    tokens, labels = batch(GPT, 0)
    one = Batch.of(tokens, labels)
    packed = replace(one, documents=torch.zeros_like(tokens), most_documents=2)
    shapes = {graphs._shape(some) for some in (one, packed, replace(packed, most_documents=4))}
    assert len(shapes) == 3
