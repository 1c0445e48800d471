"""A compiled layer adds in its matmuls: the same outputs and gradients as the layer that runs as it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.recompute_cases import GPT, LLAMA
from shardwise.models.attention import attention_scale, rotation_of
from shardwise.models.dot_product import AttentionArguments
from shardwise.models.layer import Layer
from shardwise.spec.model import Model


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "model",
    [GPT, LLAMA, replace(LLAMA, parallel_block=True), replace(LLAMA, norms_per_layer=4)],
    ids=["biases", "plain", "parallel", "norms behind"],
)
def test_outputs_and_gradients(model: Model) -> None:
    torch._dynamo.reset()  # a process compiles one function so many times only, those of other tests included
    torch.manual_seed(0)
    layer = Layer(model, moe=False).double()
    states = torch.randn(2, 8, model.hidden, dtype=torch.float64)
    rotation = rotation_of(model, torch.arange(8)[None]) if model.positions == "rope" else None
    arguments = AttentionArguments(True, None, attention_scale(model))

    def passes(compiled: bool) -> list[Tensor]:
        layer.zero_grad()
        inputs = states.clone().requires_grad_()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        with torch.no_grad():  # as an evaluation does, which comes first in a run
            evaluated = run(inputs, rotation, arguments)
        outputs = run(inputs, rotation, arguments)
        torch.testing.assert_close(evaluated, outputs.detach())
        outputs.square().sum().backward()
        found = [outputs.detach(), inputs.grad, *(one.grad for one in layer.parameters())]
        assert all(one is not None for one in found)
        return [one.clone() for one in found if one is not None]

    right = passes(False)
    for remakes in (False, *([True] if layer.can_remake() else [])):
        layer.remakes = remakes
        for one, other in zip(passes(True), right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_only_layers_with_the_right_parts_can_make_them_again() -> None:
    assert Layer(LLAMA, moe=False).can_remake()
    for other in (GPT, replace(LLAMA, parallel_block=True), replace(LLAMA, norms_per_layer=4)):
        assert not Layer(other, moe=False).can_remake()
