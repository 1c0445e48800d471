"""Tokens to experts and back on several ranks, against one process: results, gradients, bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.workers import on_ranks
from shardwise.engine.experts.apply import apply_experts
from shardwise.engine.mesh import build_mesh
from shardwise.engine.parameters import parts_of
from shardwise.models.moe import MoELayer, at_once
from shardwise.spec.errors import SpecError
from shardwise.spec.model import MixtureOfExperts as Experts
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy

EXPERTS, HIDDEN, TOKENS = 8, 12, 10  # tokens of a rank
MODEL = Model(
    layers=1, hidden=HIDDEN, heads=2, ffn=16, vocab=32, activation="swiglu", mlp_bias=True,
    moe=Experts(experts=EXPERTS, top_k=2, ffn=16),
)  # fmt: skip
NODES_OF_TWO = (0, 0, 1, 1)
SLOW = pytest.mark.slow


def mixture(seed: int = 0) -> MoELayer:
    torch.manual_seed(seed)
    made = MoELayer(MODEL)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def choices(routing: str, shares: int, tokens: int = TOKENS) -> Tensor:
    """Experts [tokens of all ranks, k], different for every token."""
    torch.manual_seed(5)
    number = shares * tokens
    scores = torch.rand(number, EXPERTS)
    if routing == "skewed":  # experts 1 and 6 are popular, 3 has no token
        scores[:, [1, 6]] += torch.rand(number, 2) * 2
        scores[:, 3] = -1
    if routing == "one expert":  # all other ranks receive nothing
        scores[:, 2] += 2
    if routing == "far half":  # only the first half of the experts, so that the last ranks receive nothing
        scores[:, EXPERTS // 2 :] -= 2
    top_k = {"one": 1, "one expert": 1, "all": EXPERTS}.get(routing, 3)
    return scores.topk(top_k).indices


def data(indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights, and the gradient of the result."""
    torch.manual_seed(7)
    number = indices.shape[0]
    return torch.randn(number, HIDDEN), torch.rand(indices.shape), torch.randn(number, HIDDEN)


def passes(made: MoELayer, rows: Tensor, indices: Tensor, weights: Tensor, gradient: Tensor) -> list[Tensor]:
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    sorted_rows, counts, handle = made.exchange.dispatch(rows, indices)
    assert counts.shape[0] == made.experts.up.shape[0] and int(counts.sum()) == sorted_rows.shape[0]
    result = made.exchange.combine(made.experts(sorted_rows, at_once(counts)), weights, handle)
    result.backward(gradient)
    assert rows.grad is not None and weights.grad is not None
    return [result.detach(), rows.grad, weights.grad]


def short(strategy: Strategy) -> str:
    """The fields that are not as they are by default."""
    return " ".join(f"{name} {value}" for name, value in strategy.to_dict().items())


def share_of(rank: int, strategy: Strategy) -> int:
    return rank if strategy.sequence_parallel else rank // strategy.tp


def on_a_rank(strategy: Strategy, labels: tuple[int, ...], routing: str, tokens: int) -> dict[str, Any]:
    rank, shares = dist.get_rank(), strategy.world if strategy.sequence_parallel else strategy.data_parallel
    made = mixture()
    exchange: Any = apply_experts(made, build_mesh(strategy), strategy, labels.__getitem__)
    indices = choices(routing, shares, tokens)
    own = slice(share_of(rank, strategy) * tokens, (share_of(rank, strategy) + 1) * tokens)
    rows, weights, gradient = (one[own] for one in data(indices))
    return {
        "results": passes(made, rows, indices[own], weights, gradient),
        "gradients": {name: one.grad for name, one in made.experts.named_parameters()},
        "parts": parts_of(made.experts),
        "between": dict(exchange.traffic.between_nodes) if exchange else {},
        "inside": dict(exchange.traffic.inside_node) if exchange else {},
    }


def deviation(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def check(
    strategy: Strategy, routing: str = "random", labels: tuple[int, ...] = NODES_OF_TWO, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """All ranks against one process; what the ranks found."""
    world = strategy.world
    found = on_ranks(world, on_a_rank, strategy, labels, routing, tokens)
    indices = choices(routing, world if strategy.sequence_parallel else strategy.data_parallel, tokens)
    whole = mixture()
    rows, weights, gradient = data(indices)
    expected = passes(whole, rows, indices, weights, gradient)
    for rank, one in enumerate(found):
        own = slice(share_of(rank, strategy) * tokens, (share_of(rank, strategy) + 1) * tokens)
        for result, reference in zip(one["results"], expected):
            assert deviation(result, reference[own]) < 1e-5
    for name, parameter in whole.experts.named_parameters():
        total = torch.zeros_like(parameter)
        for one in found:  # the sum over all ranks that hold an element, as data parallelism will take it
            if name in one["parts"]:
                held = torch.zeros_like(parameter)
                one["parts"][name].put(one["gradients"][name], held)
                total += held
        assert parameter.grad is not None
        assert deviation(total, parameter.grad) < 1e-5
    return found


def test_two_ranks() -> None:
    check(Strategy(dp=2, ep=2), "skewed", (0, 0))


FOUR = Strategy(dp=4, ep=4)
BOTH_WAYS = ("dispatch", "combine", "dispatch, backward", "combine, backward")
ROW = HIDDEN * 4
ROUTINGS = ("skewed", "one expert", "all", *(pytest.param(one, marks=SLOW) for one in ("random", "one", "far half")))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_level_sends_a_row_per_expert(routing: str) -> None:
    found = check(FOUR, routing)
    indices = choices(routing, 4).view(4, TOKENS, -1)
    for rank, one in enumerate(found):
        node = indices[rank] // (EXPERTS // 2)
        device = indices[rank] // (EXPERTS // 4)
        expected_between = int((node != rank // 2).sum()) * ROW
        expected_inside = int(((node == rank // 2) & (device != rank)).sum()) * ROW
        assert one["between"].get("dispatch", 0) == one["between"].get("combine, backward", 0) == expected_between
        assert one["inside"].get("dispatch", 0) == one["inside"].get("combine, backward", 0) == expected_inside
    assert total(found, "between", "combine") == total(found, "between", "dispatch")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_two_levels_cross_the_network_once_per_node(routing: str) -> None:
    found = check(replace(FOUR, dispatch="deduplicated"), routing)
    indices = choices(routing, 4).view(4, TOKENS, -1)
    inside = 0
    for rank, one in enumerate(found):
        nodes = [{expert // 4 for expert in token} for token in indices[rank].tolist()]
        devices = [{expert // 2 for expert in token} for token in indices[rank].tolist()]
        remote = sum(len(visited - {rank // 2}) for visited in nodes)
        assert one["between"]["dispatch"] == one["between"]["combine, backward"] == remote * ROW
        # On a node the device with the sender's place has the row already.
        inside += sum(device % 2 != rank % 2 for visited in devices for device in visited)
    for what in BOTH_WAYS:
        assert total(found, "between", what) == total(found, "between", "dispatch")
        assert total(found, "inside", what) == inside * ROW


def test_two_levels_send_less_between_nodes() -> None:
    once, often = check(replace(FOUR, dispatch="deduplicated")), check(FOUR)
    for what in BOTH_WAYS:
        assert 0 < total(once, "between", what) < 0.7 * total(often, "between", what)


def total(found: list[dict[str, Any]], where: str, what: str) -> int:
    return sum(one[where].get(what, 0) for one in found)


@pytest.mark.parametrize("dispatch", ["all-to-all", "deduplicated"])
def test_two_copies_of_the_experts(dispatch: Any) -> None:
    check(Strategy(dp=4, ep=2, dispatch=dispatch), "skewed", (0, 1, 0, 1))


@pytest.mark.parametrize("dispatch", ["all-to-all", "deduplicated"])
@pytest.mark.parametrize("routing", ["skewed", "one expert"])
def test_experts_in_two_parts(dispatch: Any, routing: str) -> None:
    check(Strategy(tp=2, dp=2, ep=2, expert_tp=2, dispatch=dispatch), routing)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(tp=4, dp=1, ep=1, expert_tp=4),
        pytest.param(Strategy(tp=2, dp=2, ep=1, expert_tp=1), marks=SLOW),
        Strategy(tp=2, dp=2, ep=4, expert_tp=1, dispatch="deduplicated"),
        pytest.param(Strategy(tp=2, dp=2, ep=2, expert_tp=1), marks=SLOW),
        pytest.param(Strategy(tp=2, dp=2, ep=2, expert_tp=2, order=("dp", "tp", "cp", "pp")), marks=SLOW),
        Strategy(tp=1, cp=2, dp=2, ep=2, expert_tp=2),
        Strategy(tp=2, dp=2, ep=1, expert_tp=2, sequence_parallel=False),
        Strategy(tp=2, dp=2, ep=2, expert_tp=2, sequence_parallel=False),
        Strategy(tp=2, dp=2, ep=1, expert_tp=1, sequence_parallel=False),
        pytest.param(Strategy(tp=2, dp=2, ep=2, expert_tp=1, sequence_parallel=False), marks=SLOW),
        Strategy(tp=2, dp=2, ep=4, expert_tp=1, sequence_parallel=False, dispatch="deduplicated"),
    ],
    ids=short,
)
def test_beside_tensor_parallelism(strategy: Strategy) -> None:
    check(strategy, "skewed")


def test_shares_of_tokens_that_do_not_divide() -> None:
    check(Strategy(tp=4, dp=1, ep=1, expert_tp=1, sequence_parallel=False), "skewed", tokens=3)
    check(Strategy(tp=2, dp=2, ep=2, expert_tp=1, sequence_parallel=False), "skewed", tokens=7)
    two_levels = Strategy(tp=2, dp=2, ep=4, expert_tp=1, sequence_parallel=False, dispatch="deduplicated")
    check(two_levels, "skewed", tokens=1)


def refused(strategy: Strategy, labels: tuple[int, ...]) -> str:
    try:
        apply_experts(mixture(), build_mesh(strategy), strategy, labels.__getitem__)
    except SpecError as error:
        return str(error)
    return ""


def test_what_cannot_be_done_right_is_refused() -> None:
    two_levels = replace(FOUR, dispatch="deduplicated")
    assert "more ranks on some nodes" in on_ranks(4, refused, two_levels, (0, 0, 0, 1))[0]
    assert "back and forth" in on_ranks(4, refused, two_levels, (0, 1, 0, 1))[0]
    assert "does not divide 8 experts" in on_ranks(3, refused, Strategy(dp=3, ep=3), (0, 0, 0))[0]
    odd = Strategy(tp=2, dp=2, ep=1, expert_tp=2, sequence_parallel=False, order=("dp", "tp", "cp", "pp"))
    assert "strategy.order" in on_ranks(4, refused, odd, (0, 0, 0, 0))[0]


def on_the_meta_device(strategy: Strategy) -> dict[str, Any]:
    with torch.device("meta"):
        made = MoELayer(MODEL)
    apply_experts(made, build_mesh(strategy), strategy, lambda rank: 0)
    return {name: tuple(one.shape) for name, one in made.experts.named_parameters()}


def test_parameters_are_cut_before_they_exist() -> None:
    first, second, *_ = on_ranks(4, on_the_meta_device, Strategy(tp=2, dp=2, ep=2, expert_tp=2))
    expected = {
        "gate": (4, HIDDEN, 8), "up": (4, HIDDEN, 8), "down": (4, 8, HIDDEN), "gate_bias": (4, 8), "up_bias": (4, 8),
    }  # fmt: skip
    assert first == {**expected, "down_bias": (4, HIDDEN)}
    assert second == expected
