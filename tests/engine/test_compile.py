"""Compiled layers compute what the others do; with a backend that needs no compiler for C++."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from engine.recompute_cases import GPT, LLAMA, MIXTURE, batch, decoder_of, gradients, hidden_of, job_of, layer_call
from engine.workers import on_ranks
from shardwise.cost.memory.activations import layer_activation_bytes
from shardwise.engine.engine import apply_compile
from shardwise.engine.experts.apply import apply_experts
from shardwise.engine.mesh import build_mesh
from shardwise.engine.patterns import DECODER
from shardwise.engine.recompute import apply_recompute
from shardwise.engine.tensor.apply import apply_tensor
from shardwise.models.moe import MoELayer
from shardwise.spec.model import Model

Found = tuple[list[float], dict[str, Tensor], dict[str, int]]
FULL, CHEAP = {"recompute": "full"}, {"recompute": "selective"}


def trained(model: Model, strategy: dict[str, Any], compiled: bool, sharded: bool = False) -> Found:
    """Losses of three batches, their summed gradients and the loads of experts, and what the compiler did."""
    torch._dynamo.reset()
    counters.clear()
    job = job_of(model, **strategy)
    decoder = decoder_of(job)
    if job.strategy.world > 1:
        mesh = build_mesh(job.strategy, key_value_heads=model.key_value_heads)
        apply_tensor(decoder, mesh, DECODER, model)
        apply_experts(decoder, mesh, job.strategy, lambda rank: 0)
    apply_recompute(decoder, job, DECODER)
    if compiled:
        apply_compile(decoder, job.strategy, DECODER, backend="aot_eager")
    if sharded:
        for layer in decoder.layers.values():
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(decoder)
    losses = []
    for seed in range(3):
        loss = decoder(*batch(model, seed))
        loss.backward()
        losses.append(loss.item())
    found = gradients(decoder)
    loads = {f"{name}.load": one.load for name, one in decoder.named_modules() if isinstance(one, MoELayer)}
    stats = dict(counters["stats"], breaks=sum(counters["graph_break"].values()))
    return losses, loads | {name: one.full_tensor() if sharded else one for name, one in found.items()}, stats  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"recompute": "selective", "recompute_operators": ("norm", "activation")}])
@pytest.mark.parametrize("model", [GPT, LLAMA, MIXTURE])
def test_a_compiled_network_is_evaluated_before_its_first_step(model: Model, strategy: dict[str, Any]) -> None:
    """As `train` does: under `no_grad` the compiler drops the context of a function with as many tensors as names."""
    torch._dynamo.reset()
    job = job_of(model, **strategy)
    found = []
    for compiled in (False, True):
        decoder = decoder_of(job)
        apply_recompute(decoder, job, DECODER)
        if compiled:
            apply_compile(decoder, job.strategy, DECODER, backend="aot_eager")
        with torch.no_grad():
            found.append(decoder(*batch(model, 0)).item())
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def assert_close(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert list(found[1]) == list(expected[1]), "names have changed"
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    assert found[2]["unique_graphs"] and not found[2]["breaks"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [(LLAMA, {}), (LLAMA, CHEAP), (GPT, FULL), (MIXTURE, FULL)],
    ids=["llama", "llama selective", "gpt full", "mixture full"],
)
def test_whole_layers(model: Model, strategy: dict[str, Any]) -> None:
    assert_close(trained(model, strategy, True), trained(model, {}, False))


@pytest.mark.slow
def test_equal_layers_share_a_graph() -> None:
    """More layers than the compiler would take one by one (`recompile_limit`)."""
    for strategy in (CHEAP, FULL):
        assert trained(replace(LLAMA, layers=12), strategy, True)[2]["unique_graphs"] == 1


def kept_by_compiled_layer(model: Model, strategy: dict[str, Any]) -> int:
    torch._dynamo.reset()
    job = job_of(model, **strategy)
    decoder = decoder_of(job)
    apply_recompute(decoder, job, DECODER)
    apply_compile(decoder, job.strategy, DECODER, backend="aot_eager")
    layer, apart = layer_call(decoder, job)
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hidden = hidden_of(job).requires_grad_()
    layer(hidden * 1)  # compiled here, where the hooks do not see it
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(hidden * 1)
    for tensor in apart:
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_compiled_layer_keeps_what_the_planner_says(model: Model) -> None:
    for strategy in (CHEAP, {**CHEAP, "recompute_operators": ["alternate-products"]}):
        planned = layer_activation_bytes(job_of(model, **strategy), *model.kinds)
        assert kept_by_compiled_layer(model, strategy) == planned


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "strategy", "sharded"),
    [
        (LLAMA, {"tp": 2, **FULL}, False),
        pytest.param(
            MIXTURE, {"tp": 2, **CHEAP}, False, marks=pytest.mark.slow
        ),  # those before and after have its parts
        (MIXTURE, {"dp": 2, "ep": 2}, False),  # other numbers of tokens in every batch
        (LLAMA, {"dp": 2, "zero": 3, **CHEAP}, True),
    ],
    ids=["tensor", "mixture tensor", "expert", "sharded"],
)
def test_over_ranks(model: Model, strategy: dict[str, Any], sharded: bool) -> None:
    expected = on_ranks(2, trained, model, strategy, False, sharded)
    for rank, found in enumerate(on_ranks(2, trained, model, strategy, True, sharded)):
        assert_close(found, expected[rank])
