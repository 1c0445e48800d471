"""FlexAttention with capped scores against plain matmuls in float64: output and gradients; steps that use it."""

from __future__ import annotations

import pytest
import torch

from shardwise.models import flexible_attention
from shardwise.models.dot_product import AttentionArguments, attention_from, dot_product_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("features", [64, 256])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("changed", ["cap", "sinks"])
def test_equals_plain_matmuls(changed: str, window: int | None, packed: bool, features: int, compiled: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(3)
    query, key, value, gradient = (
        torch.randn(2, 777, heads, features, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    documents = torch.randint(0, 4, (2, 777), device="cuda").sort(dim=1).values if packed else None
    sinks = torch.linspace(-1, 2, 4, device="cuda").requires_grad_() if changed == "sinks" else None
    softcap = 1.5 if changed == "cap" else None
    arguments = AttentionArguments(True, window, features**-0.5, documents, softcap=softcap, sinks=sinks)
    assert flexible_attention.takes(query, value)
    attend = torch.compile(dot_product_attention, fullgraph=True) if compiled else dot_product_attention
    tensors = (query, key, value)
    found = attend(*tensors, arguments)
    right = attention_from(*(one.double() for one in tensors), arguments, 0)
    leaves = tensors if sinks is None else (*tensors, sinks)
    wanted = (right, *torch.autograd.grad(right, leaves, gradient.double()))
    for got, want in zip((found, *torch.autograd.grad(found, leaves, gradient)), wanted):
        assert (got.double() - want).norm() < 5e-3 * want.norm()
