"""How a step runs: what it holds, what it tells a profiler, and that the host never waits for a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from engine.pipeline import toy_pipeline as toy
from engine.workers import on_ranks
from shardwise.engine.pipeline.runtime import PipelineRunner, PipelineStage
from shardwise.engine.pipeline.tied import tie_ends
from shardwise.pipeline import peak_chunks_in_flight
from shardwise.spec.schedules import job_schedules

SCHEDULES = job_schedules()

RUN = tuple(name for name in SCHEDULES if name != "dualpipe")


def runner_for(name: str, microbatches: int) -> PipelineRunner:
    group = dist.distributed_c10d._get_default_group()
    schedule = toy.schedule_for(name, group.size(), microbatches)
    model = toy.whole_model(schedule.stages)
    modules = {index: toy.stage_of(model, index, schedule.stages) for index in schedule.stages_of(group.rank())}
    return toy.runner_of(schedule, modules, group)


def step(runner: PipelineRunner) -> torch.Tensor:
    number = runner.schedule.microbatches
    batch = toy.batch_of(number * toy.ROWS)
    return runner.step(batch.microbatches(number), torch.tensor(7.0))


def most_held(name: str, microbatches: int) -> tuple[int, int]:
    """Microbatches times chunks between forward and last backward pass at the peak, and what is left after the step."""
    runner, peak = runner_for(name, microbatches), 0
    forward = PipelineStage.forward_one_chunk

    def watched(stage: PipelineStage, *arguments: Any, **more: Any) -> torch.Tensor:
        nonlocal peak
        output = forward(stage, *arguments, **more)
        peak = max(peak, sum(len(one.kept) + len(one.weights_to_do) for one in runner.stages))
        return output

    PipelineStage.forward_one_chunk = watched  # type: ignore[method-assign]
    try:
        step(runner)
    finally:
        PipelineStage.forward_one_chunk = forward  # type: ignore[method-assign]
    left = sum(
        len(held)
        for one in runner.stages
        for held in (one.inputs, one.outputs, one.kept, one.input_gradients, one.output_gradients, one.weights_to_do)
    )
    return peak, left + len(runner.mailbox.leaving)


@pytest.mark.parametrize("name", RUN)
def test_as_many_activations_are_held_as_were_simulated(name: str) -> None:
    ranks, microbatches = 2, 6
    chunks = toy.schedule_for(name, ranks, microbatches).stages // ranks
    for rank, (peak, left) in enumerate(on_ranks(ranks, most_held, name, microbatches)):
        assert peak == peak_chunks_in_flight(name, ranks, microbatches, chunks, rank) and left == 0


class Reads(TorchDispatchMode):
    """Notes every operator that gives a tensor's value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def reads(name: str) -> list[str]:
    runner = runner_for(name, 4)
    with Reads() as mode:
        step(runner)
    return mode.found


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_the_host_reads_nothing(name: str) -> None:
    """Not even in the first step."""
    assert on_ranks(2, reads, name) == [[], []]


def names() -> set[str]:
    runner = runner_for("zb-h1", 2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(runner)
    return {event.key for event in profiler.key_averages()}


def test_a_profiler_shows_passes_and_bytes() -> None:
    first, last = on_ranks(2, names)
    size = toy.ROWS * toy.SEQUENCE * toy.WIDTH * 4
    assert {"PP:0F0", "PP:0I1", "PP:0W1", f"pp: send stage 0's output {size} B"} <= first
    assert {"PP:1F0", "PP:1SEND_B0", f"pp: send stage 1's input gradient {size} B"} <= last
    assert "pp: broadcast of the loss 4 B" in first & last


def posing(name: str, rank: int) -> tuple[str, bool]:
    """A step of one rank of four on PyTorch's fake process group, with tensors that have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    group = dist.distributed_c10d._get_default_group()
    schedule = toy.schedule_for(name, 4, 8)
    with FakeTensorMode():
        model = toy.whole_model(schedule.stages, tied=True)
        modules = {index: toy.stage_of(model, index, schedule.stages) for index in schedule.stages_of(rank)}
        tied = tie_ends(modules, schedule.placement, dist.get_process_group_ranks(group))
        runner = toy.runner_of(schedule, modules, group, tied=tied)
        tokens = torch.zeros(8 * toy.ROWS, toy.SEQUENCE, dtype=torch.long)
        loss = runner.step(toy.Batch.of(tokens, tokens).microbatches(8), torch.ones(()))
        if tied:
            tied.add_gradients()
        complete = all(one.grad is not None for module in modules.values() for one in module.parameters())
    return type(loss).__name__, complete


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipev"])
def test_any_rank_may_be_posed_as(name: str) -> None:
    for rank in (0, 3):
        assert on_ranks(1, posing, name, rank) == [("FakeTensor", True)]
