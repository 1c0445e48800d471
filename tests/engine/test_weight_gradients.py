"""Weight gradients that wait: the same sums, computed when asked for, and nothing held that they do not need."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from engine.pipeline import toy_pipeline as toy
from engine.workers import on_ranks
from shardwise.engine.autograd import Deferrable, compute, defer, deferring, is_deferring

LINEARS = ("up.weight", "down.weight")


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def split(model: nn.Module, run: Callable[[], Tensor], mode: Deferrable) -> tuple[dict[str, Tensor | None], ...]:
    """Gradients after the input gradients, and after the weight gradients, of two microbatches."""
    lists = []
    for _ in range(2):
        with mode:
            total = run()
            with deferring() as waiting:
                torch.autograd.backward((get_gradient_edge(total),), (torch.ones(()),))
        lists.append(waiting)
    before = gradients(model)
    for waiting in lists:
        compute(waiting)
    return before, gradients(model)


@pytest.mark.parametrize("recomputed", [False, True])
def test_products_wait_and_come_out_the_same(recomputed: bool) -> None:
    torch.manual_seed(0)
    block, inputs = toy.Block(), torch.randn(2, 3, toy.WIDTH, requires_grad=True)

    def run() -> Tensor:
        output = checkpoint(block, inputs, use_reentrant=False) if recomputed else block(inputs)
        return output.square().sum()

    before, after = split(block, run, Deferrable())
    assert {name for name, one in before.items() if one is None} == set(LINEARS)
    of_inputs, inputs.grad = inputs.grad, None
    block.zero_grad()
    for _ in range(2):
        block(inputs).square().sum().backward()
    assert torch.equal(of_inputs, inputs.grad)
    for name, expected in gradients(block).items():
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-6)


def test_without_a_request_nothing_waits() -> None:
    block, inputs = toy.Block(), torch.randn(2, toy.WIDTH)
    with Deferrable():
        block(inputs).sum().backward()
    assert all(one is not None for one in gradients(block).values()) and not is_deferring()


def test_what_is_no_parameter_or_exempt_is_computed_at_once() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with Deferrable([second]):
        total = F.linear(second(first(torch.randn(3, 4))), second.weight * 2).sum()
        with deferring() as waiting:
            total.backward()
    assert first.weight.grad is None and second.weight.grad is not None and len(waiting) == 1


def test_experts_wait_as_well() -> None:
    torch.manual_seed(0)
    matrices, rows = nn.Parameter(torch.randn(3, 4, 8)), torch.randn(10, 4, requires_grad=True)
    ends = torch.tensor([2, 2, 10], dtype=torch.int32)  # the second expert has no rows
    weight = torch.randn(10, 8)
    with Deferrable():
        total = (F.grouped_mm(rows, matrices, offs=ends) * weight).sum()
        with deferring() as waiting:
            total.backward()
    assert matrices.grad is None
    compute(waiting)
    found, of_rows = matrices.grad, rows.grad
    matrices.grad = rows.grad = None
    (F.grouped_mm(rows, matrices, offs=ends) * weight).sum().backward()
    torch.testing.assert_close(found, matrices.grad)
    torch.testing.assert_close(of_rows, rows.grad)


class Shifted(torch.autograd.Function):
    """A function of several weights that knows of `later`."""

    @staticmethod
    def forward(ctx, inputs, *weights):  # type: ignore[no-untyped-def]
        ctx.weights = weights
        return inputs + sum(weights)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, *defer(lambda: [gradient.clone() for _ in ctx.weights], *ctx.weights)


def test_any_function_may_put_off() -> None:
    weights = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    for _ in range(2):
        with deferring() as waiting:
            Shifted.apply(torch.randn(3), *weights).sum().backward()
        compute(waiting)
        Shifted.apply(torch.randn(3), *weights).sum().backward()
    assert all(torch.equal(one.grad, torch.full((3,), 4.0)) for one in weights)


class Watched(nn.Module):
    """Two products around a function that needs its own input; ``inner`` tells whether that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner: weakref.ref[Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        self.inner = weakref.ref(hidden)
        output: Tensor = self.second(hidden.sin())
        return output


def test_other_activations_are_free_before_the_products() -> None:
    model = Watched()
    with Deferrable():
        total = model(torch.randn(2, 4)).sum()
        with deferring() as waiting:
            total.backward()
    gc.collect()
    assert model.inner is not None and model.inner() is None and len(waiting) == 2
    compute(waiting)
    assert not waiting and model.first.weight.grad is not None


class Counted(toy.Block):
    """Counts how often it runs, and is recomputed in the backward pass."""

    runs = 0

    def forward(self, hidden: Tensor) -> Tensor:
        def body(hidden: Tensor) -> Tensor:
            self.runs += 1
            return super(Counted, self).forward(hidden)

        result: Tensor = checkpoint(body, hidden, use_reentrant=False)
        return result


def recomputed_pipeline(name: str) -> tuple[list[float], list[int]]:
    group = torch.distributed.distributed_c10d._get_default_group()
    schedule = toy.schedule_for(name, 2, 4)
    model, blocks = toy.whole_model(schedule.stages), []
    modules = {}
    for index in schedule.stages_of(group.rank()):
        modules[index] = stage = toy.stage_of(model, index, schedule.stages)
        block = Counted()
        block.load_state_dict(stage.blocks[str(index)].state_dict())
        stage.blocks[str(index)] = block
        blocks.append(block)
    batch = toy.batch_of(4 * toy.ROWS)
    toy.runner_of(schedule, modules, group).step(batch.microbatches(4), batch.counted)
    _, expected = toy.reference(toy.whole_model(schedule.stages), batch)
    named = [pair for stage in modules.values() for pair in stage.named_parameters()]
    return [toy.deviation(one.grad, expected[name]) for name, one in named], [block.runs for block in blocks]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipev"])
def test_a_layer_is_recomputed_once(name: str) -> None:
    """PyTorch's own split runs it again for every group of weights."""
    for deviations, runs in on_ranks(2, recomputed_pipeline, name):
        assert max(deviations) < 1e-5 and set(runs) == {8}


def compiled_pipeline(name: str) -> list[float]:
    group = torch.distributed.distributed_c10d._get_default_group()
    schedule = toy.schedule_for(name, 2, 2)
    model, batch = toy.whole_model(schedule.stages), toy.batch_of(2 * toy.ROWS)
    for block in model.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    modules = {index: toy.stage_of(model, index, schedule.stages) for index in schedule.stages_of(group.rank())}
    toy.runner_of(schedule, modules, group).step(batch.microbatches(2), batch.counted)
    _, expected = toy.reference(toy.whole_model(schedule.stages), batch)
    named = [pair for stage in modules.values() for pair in stage.named_parameters()]
    return [toy.deviation(one.grad, expected[name]) for name, one in named]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_compiled_layers_compute_all_gradients_at_once(name: str) -> None:
    """PyTorch's own split fails there (pytorch#161904); ours is right, and has nothing left for W."""
    assert max(map(max, on_ranks(2, compiled_pipeline, name))) < 1e-5
