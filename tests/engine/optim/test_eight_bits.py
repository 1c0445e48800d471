"""Moments in 8 bits: their codes, and training with them beside training with fp32 moments."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.optim import eight_bits
from shardwise.engine.optim.eight_bits import BLOCK, MOST, decoded, drawn_numbers, encode_, room
from shardwise.engine.optim.optimizer import LocalOptimizer
from shardwise.spec.training import OPTIMIZERS, Optimization, Training

SIZES = (1, 255, 256, 1000, 4096)


def moments(elements: int, signed: bool) -> Tensor:
    """Over many orders of magnitude, some of them zero, a whole block among them."""
    draw = torch.Generator().manual_seed(elements)
    values = torch.randn(elements, generator=draw) * torch.exp(3 * torch.randn(elements, generator=draw))
    values[::7] = 0
    values[BLOCK : 2 * BLOCK] = 0
    return values if signed else values.square()


def stored(values: Tensor, signed: bool, step: float | None = None) -> Tensor:
    kept = torch.full((room(values.numel()),), 77, dtype=torch.uint8)
    encode_(values, kept, signed=signed, step=None if step is None else torch.tensor(step))
    return kept


def gaps(values: Tensor, signed: bool) -> Tensor:
    """Between the two codes around each value."""
    padded = F.pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale = padded.amax(1).repeat_interleave(BLOCK)[: len(values)]
    power, most = (2, MOST[True]) if signed else (4, MOST[False])
    lower = ((values.abs() / scale).nan_to_num(0).pow(1 / power) * most).floor()
    return (((lower + 1) / most) ** power - (lower / most) ** power) * scale


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("elements", SIZES)
def test_codes_are_the_nearest_and_stay_what_they_are(elements: int, signed: bool) -> None:
    values = moments(elements, signed)
    kept = stored(values, signed)
    found = decoded(kept, elements, signed=signed)
    nearest = (found - values).abs() <= 0.501 * gaps(values, signed)
    assert (nearest | ((values > 0) & (found > 0) & (not signed))).all()  # the smallest second moments are made larger
    assert ((found == 0) == (values == 0)).all() or signed
    assert torch.equal(stored(found, signed)[:elements], kept[:elements])  # a checkpoint brings the same codes back
    assert torch.equal(stored(found, signed, step=3.0)[:elements], kept[:elements])  # and so does a step at rest


@pytest.mark.parametrize("signed", [True, False])
def test_drawn_codes_are_right_on_average(signed: bool) -> None:
    values = moments(1000, signed)
    draws = 400
    mean = sum(decoded(stored(values, signed, float(step)), 1000, signed=signed) for step in range(draws)) / draws
    large = values.abs() > 1e-6 * values.abs().max()
    off = (mean - values)[large] / gaps(values, signed)[large].clamp(min=1e-30)
    assert off.abs().max() < 5 * 0.5 / draws**0.5 and abs(float(off.mean())) < 0.01


def test_some_elements_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = moments(1000, True)
    whole = stored(values, True, 3.0)
    monkeypatch.setattr(eight_bits, "AT_ONCE", 2 * BLOCK)
    assert torch.equal(stored(values, True, 3.0)[:1000], whole[:1000])


def test_drawn_numbers_are_spread() -> None:
    lower, upper = (drawn_numbers(torch.tensor(5.0), 0, 10000, upper=one) for one in (False, True))
    for one in (lower, upper):
        assert abs(float(one.mean()) - 0.5) < 0.02 and abs(float(one.var()) - 1 / 12) < 0.005
    assert abs(float(torch.corrcoef(torch.stack([lower, upper]))[0, 1])) < 0.05
    assert (drawn_numbers(torch.tensor(6.0), 0, 10000, upper=False) != lower).float().mean() > 0.99


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def optimizer_of(kind: str, model: nn.Module) -> LocalOptimizer:
    training = Training(optimizer=kind, optimization=Optimization(learning_rate=3e-3, beta2=0.999, decay=0.01))
    return LocalOptimizer(model.named_parameters(), training)


def losses(kind: str, steps: int) -> list[float]:
    """Of a network that learns what another one computes, with noise."""
    model = network()
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer, found = optimizer_of(kind, model), []
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        given = torch.randn(64, 24, generator=draw)
        wanted = teacher(given).detach() + 0.1 * torch.randn(64, 8, generator=draw)
        optimizer.zero_grad()
        loss = F.mse_loss(model(given), wanted)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.slow
def test_training_is_as_with_fp32_moments_within_two_percent() -> None:
    steps = 400
    exact, eight = losses("adamw", steps), losses("adam8bit", steps)
    assert exact[-1] < 0.3 * exact[0]
    for start in range(0, steps, 50):  # means of 50 steps
        first, second = (sum(one[start : start + 50]) for one in (exact, eight))
        assert second == pytest.approx(first, rel=0.02)
    assert exact != eight


def gradients(model: nn.Module, step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=draw)


def test_a_bad_step_changes_nothing_and_states_come_back() -> None:
    first, second = network(), network()
    mine, other = optimizer_of("adam8bit", first), optimizer_of("adam8bit", second)
    for step in range(3):
        gradients(first, step)
        mine.step(bad=torch.zeros(()))
    before = copy.deepcopy(mine.state_dict()["state"])
    gradients(first, 3)
    mine.step(bad=torch.ones(()))
    for number, states in mine.state_dict()["state"].items():
        assert all(torch.equal(one, before[number][name]) for name, one in states.items())
    second.load_state_dict(first.state_dict())
    for one, theirs in zip(first.parameters(), second.parameters()):  # as a checkpoint does
        for name in ("exp_avg", "exp_avg_sq"):
            values = mine.read(one, name)
            assert values.shape == one.shape and values.dtype == mine.dtype(one, name) == torch.float32
            other.write(theirs, name, values)
            assert torch.equal(other.state[theirs][name], mine.state[one][name])
            assert (mine.state[one][name].dtype == torch.uint8) == (one.dim() > 1)
    for a, b in zip(mine.param_groups, other.param_groups):
        b["step"].copy_(a["step"])
    for model, optimizer in ((first, mine), (second, other)):
        gradients(model, 4)
        optimizer.step()
    assert all(torch.equal(one, theirs) for one, theirs in zip(first.parameters(), second.parameters()))


def test_memory_is_as_priced() -> None:
    matrix = nn.Parameter(torch.randn(512, 1024))
    optimizer = LocalOptimizer([("layers.0.up.weight", matrix)], Training(optimizer="adam8bit"))
    held = sum(one.nbytes for one in optimizer.state[matrix].values())
    assert held == OPTIMIZERS["adam8bit"].matrices * matrix.numel()
