"""Outputs that nobody keeps: made again once for all users, however often and in whatever order these come."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shardwise.engine.recompute import DiscardedOutputs


class Maps(nn.Module):
    """Two maps of one activation, as a layer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def activation(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return F.gelu(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.activation(inputs)
        result: Tensor = self.first(inner) * self.second(inner.transpose(0, 1)).transpose(0, 1)
        return result


def forgetful() -> tuple[Maps, Maps]:
    plain, maps = Maps(), Maps()
    maps.load_state_dict(plain.state_dict())
    discarded = DiscardedOutputs()
    maps.activation = discarded.discarding(maps.activation)  # type: ignore[method-assign]
    maps.forward = discarded.around(maps.forward)  # type: ignore[method-assign]
    return plain, maps


def test_a_function_runs_again_once_for_all_users_of_each_pass() -> None:
    plain, maps = forgetful()
    inputs = [torch.randn(3, 4, 4, requires_grad=True) for _ in range(3)]
    outputs = [maps(one) for one in inputs]  # all in flight at once
    assert maps.calls == 3
    for index in (1, 0, 2):
        outputs[index].sum().backward()
    assert maps.calls == 6
    for one in inputs:
        again = one.detach().requires_grad_()
        plain(again).sum().backward()
        assert torch.equal(again.grad, one.grad)  # type: ignore[arg-type]
    outputs = [maps(one) for one in inputs]
    with torch.no_grad():
        maps(inputs[0])
    assert maps.calls == 10


def test_halves_of_a_backward_pass_each_find_the_output() -> None:
    """PyTorch's own split: first the gradients of the inputs, later those of the weights."""
    plain, maps = forgetful()
    hidden = torch.randn(3, 4, 4)
    found = []
    for module in (plain, maps):
        inputs = hidden.clone().requires_grad_()
        output = module(inputs)
        (of_inputs,), groups = stage_backward_input(
            [output], [torch.ones_like(output)], [inputs], iter(module.parameters())
        )
        stage_backward_weight(iter(module.parameters()), groups)
        found.append([of_inputs, *(one.grad for one in module.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_a_changed_output_is_kept_and_a_changed_input_noticed() -> None:
    discarded, weight = DiscardedOutputs(), torch.randn(4, requires_grad=True)
    double = discarded.discarding(lambda one: one * 2)

    def changed(inputs: Tensor) -> Tensor:
        inner = double(inputs)
        return inner.add_(1) * weight

    inputs = torch.ones(4)
    discarded.around(changed)(inputs).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 4
    result = discarded.around(lambda one: double(one) * weight)(inputs)
    inputs.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        result.sum().backward()


def test_automatic_casts_are_those_of_the_first_run() -> None:
    discarded, linear, weight = DiscardedOutputs(), nn.Linear(4, 4), torch.randn(4, requires_grad=True)
    product = discarded.discarding(lambda one: linear(one))
    with torch.autocast("cpu", torch.bfloat16):
        result = discarded.around(lambda one: product(one) * weight)(torch.ones(2, 4))
    result.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        assert weight.grad is not None and torch.equal(weight.grad, linear(torch.ones(2, 4)).float().sum(0))
