"""Experts: routing, balance by a bias and by a loss, and the default exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.shapes import SHAPES, decoder_of, gradients, tokens
from shardwise.models.decoder import initialise
from shardwise.models.moe import LocalExchange, MoELayer, TopKRouter, balance_value, grouped_product
from shardwise.spec.model import Model
from shardwise.spec.numerics import Numerics

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
SOFTMAX, SIGMOID = SHAPES["moe"], SHAPES["mla"]
BALANCED = replace(SOFTMAX, numerics=Numerics(balance_loss=0.5))


def mixture_of(model: Model) -> MoELayer:
    mixture = MoELayer(model)
    initialise(mixture, 0, model)
    return mixture


def states(batch: int = 2, seq: int = 24, hidden: int = 32) -> Tensor:
    return torch.randn(batch, seq, hidden, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model", [SOFTMAX, SIGMOID, SHAPES["moe-biased"]], ids=["softmax", "sigmoid", "biased"])
def test_the_mixture_is_the_weighted_sum_of_each_tokens_experts(model: Model) -> None:
    mixture, hidden = mixture_of(model).eval(), states()
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(std=0.3)
        rows = hidden.flatten(0, 1)
        indices, weights, _ = mixture.router(rows)
        for token in (0, 13, 47):
            expected = torch.zeros(32)
            for expert, weight in zip(indices[token].tolist(), weights[token]):
                counts = torch.zeros(8, dtype=torch.int64)
                counts[expert] = 1
                expected += weight * mixture.experts.multiply(rows[token : token + 1], counts)[0]
            expected += mixture._shared(rows[token])
            torch.testing.assert_close(mixture(hidden).flatten(0, 1)[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_has_the_gradients_of_one_product_per_group(dtype: torch.dtype) -> None:
    rows = torch.randn(11, 16, dtype=dtype, requires_grad=True)
    matrices = torch.randn(4, 16, 8, dtype=dtype, requires_grad=True)
    grouped_product(rows, matrices, torch.tensor([3, 3, 10, 11], dtype=torch.int32)).sum().backward()
    found = rows.grad, matrices.grad
    rows.grad = matrices.grad = None
    groups = rows.split([3, 0, 7, 1])
    torch.cat([group @ matrix for group, matrix in zip(groups, matrices)]).sum().backward()
    for left, right in zip(found, (rows.grad, matrices.grad)):
        torch.testing.assert_close(left, right, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_the_exchange_sorts_by_expert_and_brings_every_row_back() -> None:
    exchange = LocalExchange(experts=5)
    rows = torch.randn(6, 3, requires_grad=True)
    indices = torch.tensor([[4, 0], [0, 1], [4, 1], [0, 4], [1, 0], [3, 4]])
    weights = torch.rand(6, 2, requires_grad=True)
    sorted_rows, counts, handle = exchange.dispatch(rows, indices)
    assert counts.tolist() == [4, 3, 0, 1, 4]
    assert torch.equal(sorted_rows[:4], rows[[0, 1, 3, 4]])
    mixed = exchange.combine(sorted_rows, weights, handle)
    torch.testing.assert_close(mixed, rows * weights.sum(1, keepdim=True))
    mixed.sum().backward()
    torch.testing.assert_close(rows.grad, weights.sum(1, keepdim=True).expand(6, 3))
    torch.testing.assert_close(weights.grad, rows.sum(1, keepdim=True).expand(6, 2))


# -- routing -----------------------------------------------------------------------------------------------


def test_weights_sum_to_the_scale_when_renormalised() -> None:
    model = replace(SIGMOID, numerics=Numerics(router_scale=2.5))
    _, weights, scores = mixture_of(model).router(states().flatten(0, 1))
    torch.testing.assert_close(weights.sum(-1), torch.full((48,), 2.5))
    assert scores.shape == (48, 8) and bool((scores >= 0).all())
    plain = replace(SOFTMAX, numerics=Numerics(renormalise_top_k=False))
    indices, weights, scores = mixture_of(plain).router(states().flatten(0, 1))
    torch.testing.assert_close(weights, scores.gather(1, indices))


def test_tokens_reach_only_their_best_groups() -> None:
    router = mixture_of(replace(SIGMOID, moe=replace(SIGMOID.moe, top_k=4, groups=4, groups_used=2))).router  # type: ignore[type-var]
    with torch.no_grad():
        router.gate.weight.normal_()
    indices, _, _ = router(states().flatten(0, 1))
    assert all(len(set((row // 2).tolist())) <= 2 for row in indices)


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    router = mixture_of(SIGMOID).router
    rows = states().flatten(0, 1)
    assert router.bias is not None
    router.bias[3] = 10.0
    indices, weights, scores = router(rows)
    assert bool((indices == 3).any(-1).all())
    chosen = scores.gather(1, indices)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))


def test_buffers_stay_in_fp32_when_the_weights_are_cast() -> None:
    mixture = mixture_of(SIGMOID).to(torch.bfloat16)
    assert mixture.router.bias is not None
    assert mixture.router.bias.dtype == mixture.load.dtype == torch.float32
    assert mixture.router.gate.weight.dtype == torch.bfloat16
    assert mixture(states().to(torch.bfloat16)).dtype == torch.bfloat16


# -- balance by a bias -------------------------------------------------------------------------------------


def test_the_bias_evens_out_the_load() -> None:
    mixture = mixture_of(replace(SIGMOID, moe=replace(SIGMOID.moe, groups=1, groups_used=1)))  # type: ignore[type-var]
    hidden = states(batch=4, seq=64) + 1.0  # a common direction, which some experts like
    with torch.no_grad():
        mixture.router.gate.weight.normal_(std=0.05, generator=torch.Generator().manual_seed(2))

    def imbalance() -> float:
        mixture(hidden)
        load = mixture.load.clone()
        assert float(load.sum()) == 4 * 64 * 2
        mixture.update_bias(load, rate=0.01)
        assert not bool(mixture.load.any())
        return float(load.max() / load.mean())

    first = imbalance()
    last = [imbalance() for _ in range(100)][-1]
    assert first > 2 and last < 1.3


def test_load_adds_up_over_calls_and_only_in_training() -> None:
    mixture = mixture_of(SOFTMAX)
    mixture(states())
    mixture(states())
    assert float(mixture.load.sum()) == 2 * 48 * 2
    mixture.eval()(states())
    assert float(mixture.load.sum()) == 2 * 48 * 2
    assert "load" not in mixture.state_dict()


# -- balance by a loss -------------------------------------------------------------------------------------


def explicit_balance(mixture: MoELayer, hidden: Tensor) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437 as they stand there, summed over the sequences."""
    total = torch.zeros(())
    for sequence in hidden:
        indices, _, scores = mixture.router(sequence)
        length, experts = scores.shape
        for expert in range(experts):
            f = experts / (2 * length) * (indices == expert).sum()
            p = (scores[:, expert] / scores.sum(-1)).mean()
            total = total + f * p
    return total


@pytest.mark.parametrize("base", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("scale", [None, 0.125, torch.tensor(0.125)], ids=["default", "float", "tensor"])
def test_the_gradient_is_that_of_the_loss_added_by_hand(base: Model, scale: Tensor | float | None) -> None:
    mixture = mixture_of(replace(base, numerics=Numerics(balance_loss=0.25)))
    plain = mixture_of(replace(base, numerics=Numerics(balance_loss=0.0)))
    mixture.balance_scale = scale  # by default the coefficient over the two sequences: the same eighth
    ours, theirs = states().requires_grad_(), states().requires_grad_()
    mixture(ours).square().sum().backward()
    (plain(theirs).square().sum() + 0.125 * explicit_balance(plain, theirs)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    expected = dict(plain.named_parameters())
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)


def test_the_forward_value_is_untouched_by_the_loss() -> None:
    hidden = states()
    assert torch.equal(mixture_of(BALANCED)(hidden), mixture_of(replace(BALANCED, numerics=Numerics()))(hidden))


def test_parts_of_sequences_have_the_gradient_of_whole_ones() -> None:
    mixture, hidden = mixture_of(BALANCED), states()
    mixture.balance_scale = 0.25
    mixture(hidden).square().sum().backward()
    whole = {
        name: parameter.grad.clone() for name, parameter in mixture.named_parameters() if parameter.grad is not None
    }
    mixture.zero_grad()
    halves, counts = hidden.chunk(2, dim=1), []
    mixture.sum_over_sequence = lambda of_half: counts.append(of_half) or of_half
    with torch.no_grad():
        for half in halves:
            mixture(half)
    mixture.sum_over_sequence = lambda of_half: counts[0] + counts[1]
    for half in halves:
        mixture(half).square().sum().backward()
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-6, msg=name)


def test_an_even_load_has_the_value_one_and_a_single_favourite_more() -> None:
    even = torch.full((1, 8, 4), 0.25)
    assert float(balance_value(even, torch.full((1, 4), 4.0), top_k=2)) == pytest.approx(1)
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 8, 4)
    assert float(balance_value(skewed, torch.tensor([[8.0, 8.0, 0.0, 0.0]]), top_k=2)) == pytest.approx(1.6)


def test_the_loss_acts_through_a_whole_decoder() -> None:
    with_loss, without = (replace(SOFTMAX, numerics=Numerics(balance_loss=value)) for value in (0.5, 0.0))
    ids = tokens()
    found = []
    for model in (with_loss, without):
        decoder = decoder_of(model)
        decoder(ids, ids).backward()
        found.append(gradients(decoder)["layers.1.mlp.router.gate.weight"])
    assert not torch.allclose(*found)


def test_a_router_alone_is_a_module_of_its_own() -> None:
    indices, weights, scores = TopKRouter(SOFTMAX)(torch.randn(5, 32))
    assert indices.shape == weights.shape == (5, 2) and scores.shape == (5, 8)
