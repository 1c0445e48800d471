"""Experts spread over ranks inside a model: loss, every gradient, balancing and loads against one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.experts.test_exchange import short
from engine.workers import on_ranks
from shardwise.engine.experts.apply import apply_experts, update_balance
from shardwise.engine.mesh import build_mesh
from shardwise.engine.parameters import HeldPart, parts_of
from shardwise.models import Decoder, initialise
from shardwise.models.moe import MoELayer
from shardwise.spec import presets
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy

BATCH, SEQ = 4, 12
TINY = presets.resolve("model", Model, "tiny-moe")
assert TINY.moe is not None
MODEL = replace(
    TINY, layers=2, hidden=32, heads=4, kv_heads=2, vocab=64, ffn=48, published_parameters=None,
    moe=replace(TINY.moe, ffn=16, shared_ffn=16, top_k=3, router="sigmoid", router_bias=True),
    numerics=replace(TINY.numerics, balance_loss=0.05),
)  # fmt: skip
RATE = 0.25  # large enough to change the second step's routing


def decoder() -> Decoder:
    made = Decoder(MODEL)
    initialise(made, 3, MODEL)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "router" in name or "experts" in name:
                parameter.mul_(10)  # so that choices and experts differ
    return made


def step(made: Decoder, tokens: Tensor, labels: Tensor) -> float:
    """Forward and backward of the mean loss over the whole batch; this rank's share of it."""
    for one in made.modules():
        if isinstance(one, MoELayer):
            one.balance_scale = MODEL.numerics.balance_loss / BATCH
    loss = made(tokens, labels) / labels_of_the_batch()[1].numel()
    loss.backward()
    return float(loss.detach())


def labels_of_the_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    tokens = torch.randint(MODEL.vocab, (BATCH, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def two_steps(made: Decoder, own: slice, balance: Any) -> dict[str, Any]:
    """Gradients of the second of two steps, between which only biases move; losses, biases and loads."""
    tokens, labels = labels_of_the_batch()
    loads = noted_loads(made)
    losses = [step(made, tokens[own], labels[own])]
    balance(made)
    made.zero_grad()
    losses.append(step(made, tokens[own], labels[own]))
    balance(made)
    return {
        "losses": losses,
        "gradients": {name: one.grad for name, one in made.named_parameters()},
        "biases": [one.bias for name, one in made.named_modules() if name.endswith("router")],
        "loads": loads[len(loads) // 2 :],
    }


def noted_loads(made: nn.Module) -> list[Tensor]:
    """A list that gets the load by which each mixture is balanced, as they come."""
    loads: list[Tensor] = []

    def note(update: Any, total: Tensor, rate: float) -> None:
        loads.append(total.clone())
        update(total, rate)

    for one in made.modules():
        if isinstance(one, MoELayer):
            one.update_bias = partial(note, one.update_bias)
    return loads


def on_a_rank(strategy: Strategy) -> dict[str, Any]:
    made, mesh = decoder(), build_mesh(strategy)
    apply_experts(made, mesh, strategy, lambda rank: rank // 2)
    each = BATCH // strategy.data_parallel
    own = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    found = two_steps(made, own, lambda module: update_balance(module, mesh, RATE))
    return {**found, "parts": parts_of(made)}


def one_process() -> dict[str, Any]:
    def balance(made: nn.Module) -> None:
        for one in made.modules():
            if isinstance(one, MoELayer):
                one.update_bias(one.load.clone(), RATE)

    made = decoder()
    found = two_steps(made, slice(None), balance)
    return {**found, "shapes": {n: p.shape for n, p in made.named_parameters()}}


def summed(found: list[dict[str, Any]], name: str, shape: torch.Size) -> Tensor:
    """A gradient summed over all ranks, each giving what it holds."""
    total = torch.zeros(shape)
    for one in found:
        part: HeldPart = one["parts"][name]
        held = torch.zeros(shape)
        part.put(one["gradients"][name], held)
        total += held
    return total


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(dp=2, ep=2),
        Strategy(dp=4, ep=4),
        Strategy(dp=4, ep=4, dispatch="deduplicated"),
        pytest.param(Strategy(dp=4, ep=2), marks=pytest.mark.slow),
        pytest.param(Strategy(dp=4, ep=2, dispatch="deduplicated"), marks=pytest.mark.slow),
        pytest.param(Strategy(dp=4, ep=1), marks=pytest.mark.slow),
    ],
    ids=short,
)
def test_a_model_with_its_experts_on_several_ranks(strategy: Strategy) -> None:
    expected = one_process()
    found = on_ranks(strategy.world, on_a_rank, strategy)
    for number in range(2):
        loss = sum(one["losses"][number] for one in found)
        assert loss == pytest.approx(expected["losses"][number], rel=1e-5)
    for name, gradient in expected["gradients"].items():
        assert deviation(summed(found, name, expected["shapes"][name]), gradient) < 1e-5, name
    for one in found:
        for bias, reference in zip(one["biases"], expected["biases"]):
            assert torch.equal(bias, reference)
        for tokens, reference in zip(one["loads"], expected["loads"], strict=True):
            assert torch.equal(tokens, reference)


# One layer whose ranks hold parts of sequences (sequence or context parallelism), or the same sequences (tensor
# parallelism without it). There is no shared expert: that is cut by tensor parallelism.
LAYER = replace(MODEL, moe=replace(MODEL.moe, shared_ffn=0, shared_gate=False))


def layer() -> MoELayer:
    torch.manual_seed(2)
    made = MoELayer(LAYER)
    with torch.no_grad():
        made.router.gate.weight.normal_(std=0.3)
        for parameter in made.experts.parameters():
            parameter.normal_(std=0.3)
        assert made.router.bias is not None
        made.router.bias.zero_()
    made.balance_scale = 0.5
    return made


def states() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(2, SEQ, LAYER.hidden), torch.randn(2, SEQ, LAYER.hidden)


def layer_passes(made: nn.Module, hidden: Tensor, gradient: Tensor, recompute: bool = False) -> dict[str, Any]:
    hidden = hidden.clone().requires_grad_()
    result = checkpoint(made, hidden, use_reentrant=False) if recompute else made(hidden)
    result.backward(gradient)
    return {
        "result": result.detach(),
        "hidden": hidden.grad,
        "gradients": {name: one.grad for name, one in made.named_parameters()},
        "parts": parts_of(made),
    }


def own_tokens(strategy: Strategy, rank: int) -> slice:
    """Of a sequence; ranks that are neighbours in tp hold neighbouring parts, or the same."""
    shares = strategy.cp * strategy.tp if strategy.sequence_parallel else strategy.cp
    place = rank if strategy.sequence_parallel else rank // strategy.tp
    each = SEQ // shares
    return slice(place * each, (place + 1) * each)


def layer_on_a_rank(strategy: Strategy, recompute: bool) -> dict[str, Any]:
    made, mesh = layer(), build_mesh(strategy)
    apply_experts(made, mesh, strategy, lambda rank: rank // 2)
    own = own_tokens(strategy, dist.get_rank())
    hidden, gradient = (one[:, own] for one in states())
    found = layer_passes(made, hidden, gradient, recompute)
    loads = noted_loads(made)
    update_balance(made, mesh, RATE)
    return {**found, "bias": made.router.bias, "load": loads[0]}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(tp=2, cp=2, dp=1, ep=4, expert_tp=1),
        Strategy(tp=2, cp=2, dp=1, ep=2, expert_tp=2, dispatch="deduplicated"),
        Strategy(tp=2, cp=2, dp=1, ep=1, expert_tp=2, sequence_parallel=False),
        Strategy(tp=2, cp=2, dp=1, ep=1, expert_tp=1, sequence_parallel=False),
        pytest.param(Strategy(tp=2, cp=2, dp=1, ep=2, expert_tp=1, sequence_parallel=False), marks=pytest.mark.slow),
        pytest.param(Strategy(tp=4, dp=1, ep=1, expert_tp=4), marks=pytest.mark.slow),
        pytest.param(Strategy(tp=4, dp=1, ep=1, expert_tp=1), marks=pytest.mark.slow),
    ],
    ids=short,
)
def test_a_layer_with_parts_of_sequences(strategy: Strategy) -> None:
    check_layer(strategy)


@pytest.mark.parametrize("dispatch", ["all-to-all", "deduplicated"])
def test_a_layer_that_is_recomputed(dispatch: Any) -> None:
    check_layer(Strategy(tp=2, cp=2, dp=1, ep=2, expert_tp=2, dispatch=dispatch), recompute=True)


def check_layer(strategy: Strategy, recompute: bool = False) -> None:
    whole = layer()
    expected = layer_passes(whole, *states())
    load = whole.load.clone()
    whole.update_bias(load, RATE)
    found = on_ranks(strategy.world, layer_on_a_rank, strategy, recompute)
    for rank, one in enumerate(found):
        own = own_tokens(strategy, rank)
        assert deviation(one["result"], expected["result"][:, own]) < 1e-5
        assert deviation(one["hidden"], expected["hidden"][:, own]) < 1e-5
        assert torch.equal(one["bias"], whole.router.bias)
        assert recompute or torch.equal(one["load"].float(), load)  # a second pass notes its load again
    # The router's gradient is partial wherever ranks have seen different tokens, and whole where the same.
    different = found if strategy.sequence_parallel else found[:: strategy.tp]
    for name, gradient in expected["gradients"].items():
        ranks = found if name.startswith("experts") else different
        assert deviation(summed(ranks, name, gradient.shape), gradient) < 1e-5, name
