"""Steps replayed from CUDA graphs against the same steps as they are written, over a schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.recompute_cases import GPT, LLAMA, MIXTURE, batch, job_of
from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.graphs import WARM_STEPS
from shardwise.engine.mesh import process_group
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.training import LossScaling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS, REFUSED_STEP = 8, 5


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with process_group(0, 1, dist.HashStore(), device="cuda"):
        yield


@dataclass
class Trained:
    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]
    engine: Engine


def job_with(model: Model, precision: str, graphs: bool, **training: Any) -> Job:
    """Unfused attention, whose gradients are summed in one order."""
    job = job_of(model, precision)
    return replace(job, training=replace(job.training, graphs=graphs, attention="unfused", **training))


def of_step(model: Model, number: int) -> Batch:
    return Batch.of(*(one.cuda() for one in batch(model, number)))


def trained(job: Job, batches: list[Batch]) -> Trained:
    """Some steps, each with its own learning rate; one is refused for its loss."""
    engine, results = Engine(job, device="cuda"), []
    for number, one in enumerate(batches):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1)
        results.append(engine.step(one, loss_limit=0.1 if number == REFUSED_STEP else 1e3))
    losses, norms = (torch.stack(some) for some in zip(*((one.loss, one.gradient_norm) for one in results)))
    return Trained(losses, norms, {one.name: engine.weight(one).clone() for one in engine.parameters}, engine)


def both(model: Model, precision: str, batches: list[Batch], **training: Any) -> tuple[Trained, Trained]:
    plain, replayed = (trained(job_with(model, precision, graphs, **training), batches) for graphs in (False, True))
    assert plain.engine.graphs.recorded == 0 and replayed.engine.graphs.reason is None
    return plain, replayed


def require_equal(plain: Trained, replayed: Trained) -> None:
    """To rounding: sums by atomic additions, as in the gradient of an embedding, have no fixed order."""
    torch.testing.assert_close(replayed.losses, plain.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(replayed.norms, plain.norms, rtol=1e-4, atol=1e-6)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(replayed.weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "precision", "compiled"),
    [
        (GPT, "fp32", False),
        (LLAMA, "bf16", False),
        (MIXTURE, "bf16", False),
        (LLAMA, "bf16", True),
        (MIXTURE, "bf16", True),
    ],
)
def test_a_replayed_step_is_the_step_as_written(model: Model, precision: str, compiled: bool) -> None:
    plain, replayed = both(model, precision, [of_step(model, one) for one in range(STEPS)], compile=compiled)
    assert replayed.engine.graphs.recorded == 1
    require_equal(plain, replayed)
    assert replayed.norms[REFUSED_STEP] == -torch.inf
    assert replayed.engine.optimizer.steps_taken() == STEPS - 1


def test_the_scale_of_the_loss_moves_in_a_replayed_step() -> None:
    optimization = replace(job_of(GPT).training.optimization, loss_scaling=LossScaling(initial=2.0**40, hysteresis=1))
    batches = [of_step(GPT, number) for number in range(STEPS)]
    plain, replayed = both(GPT, "fp16", batches, optimization=optimization)
    assert plain.engine.scaler is not None and replayed.engine.scaler is not None
    assert float(replayed.engine.scaler.scale) == float(plain.engine.scaler.scale) < 2.0**38
    torch.testing.assert_close(replayed.losses, plain.losses, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize(("precision", "compiled"), [("bf16", False), ("bf16", True), ("fp8", True)])
def test_a_recomputed_layer_is_replayed(
    recompute: Literal["full", "selective"], precision: str, compiled: bool
) -> None:
    batches = [of_step(LLAMA, number) for number in range(STEPS)]
    found = []
    for graphs in (False, True):
        job = job_with(LLAMA, precision, graphs, compile=compiled)
        found.append(trained(job.with_strategy(recompute=recompute), batches))
    require_equal(*found)


def test_every_shape_of_packed_rows_has_its_graph() -> None:
    documents = torch.arange(16, device="cuda").expand(2, -1) // 8
    batches = [
        replace(of_step(LLAMA, number), documents=documents // (1 + number % 2), most_documents=2 - number % 2)
        for number in range(2 * STEPS)
    ]
    plain, replayed = both(LLAMA, "bf16", batches)
    assert replayed.engine.graphs.recorded == 2
    require_equal(plain, replayed)


def test_a_replay_makes_no_one_wait() -> None:
    engine = Engine(job_with(MIXTURE, "bf16", True), device="cuda")
    for number in range(WARM_STEPS + 1):
        engine.step(of_step(MIXTURE, number))
    one = of_step(MIXTURE, 9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(one)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_failed_recording_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wait is not seen before."""
    monkeypatch.setattr("shardwise.engine.graphs._waits_of_the_host", lambda seen: nullcontext([]))
    job, stream = job_with(GPT, "fp32", False), torch.cuda.current_stream()
    engine = Engine(replace(job, training=replace(job.training, graphs="auto")), device="cuda")
    (stage,) = engine.stages.values()
    stage.register_forward_hook(lambda module, inputs, output: output * float(output.isfinite()))
    batches = [of_step(GPT, number) for number in range(STEPS)]
    before = [engine.step(one).loss for one in batches[:WARM_STEPS]]
    held = torch.cuda.memory_allocated()
    losses = torch.stack([*before, *(engine.step(one).loss for one in batches[WARM_STEPS:])])
    assert "cannot be recorded" in str(engine.graphs.reason) and torch.cuda.current_stream() == stream
    assert torch.cuda.memory_allocated() <= held + 2048 * STEPS  # losses and other scalars
    assert torch.rand(4, device="cuda").unique().numel() == 4
    plain = Engine(job, device="cuda")
    torch.testing.assert_close(losses, torch.stack([plain.step(one).loss for one in batches]), rtol=1e-5, atol=1e-6)


def test_what_makes_the_host_wait_runs_as_written(caplog: pytest.LogCaptureFixture) -> None:
    job = job_with(GPT, "fp32", False)
    engine = Engine(replace(job, training=replace(job.training, graphs="auto")), device="cuda")
    (stage,) = engine.stages.values()
    stage.register_forward_hook(lambda module, inputs, output: output * float(output.isfinite()))
    batches = [of_step(GPT, number) for number in range(STEPS)]
    losses = torch.stack([engine.step(one).loss for one in batches])
    assert engine.graphs.recorded == 0
    assert "the host waits for the device, in test_graphs_gpu.py" in str(engine.graphs.reason)
    assert len([line for line in caplog.messages if "no CUDA graphs" in line]) == 1
    plain = Engine(job, device="cuda")
    torch.testing.assert_close(losses, torch.stack([plain.step(one).loss for one in batches]), rtol=1e-5, atol=1e-6)
