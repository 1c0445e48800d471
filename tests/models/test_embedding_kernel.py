"""The gradient of an embedding by our kernel against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from shardwise.models.decoder import TokenEmbedding, summed_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)


@needs_kernels
@pytest.mark.parametrize(
    ("given", "dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("features", [64, 1500])
@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_rows_of_a_token_are_summed(vocabulary: int, features: int, given: torch.dtype, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    tokens = torch.randint(vocabulary, (40,), generator=draw).to(DEVICE)
    gradient = torch.randn(40, features, generator=draw).to(DEVICE, given)
    right = torch.zeros(vocabulary, features, dtype=torch.float64, device=DEVICE)
    right.index_add_(0, tokens, gradient.double())
    found = summed_rows(gradient, tokens, vocabulary, dtype)
    assert found.dtype == dtype
    narrow = 1e-6 if dtype == torch.float32 else 2.0**-7 if INTERPRETED else 2.0**-8
    torch.testing.assert_close(found.double(), right, rtol=narrow, atol=1e-5)


@needs_kernels
@pytest.mark.skipif(INTERPRETED, reason="the module runs its kernel on a GPU alone")
def test_a_gradient_that_is_accumulated_in_fp32_is_never_rounded() -> None:
    ours = TokenEmbedding(8, 64, device=DEVICE, dtype=torch.bfloat16)
    ours.weight.grad_dtype = torch.float32
    tokens = torch.arange(2048, device=DEVICE) % 2
    gradient = torch.randn(2048, 64, device=DEVICE).bfloat16()
    ours(tokens).backward(gradient)
    right = torch.stack([gradient[0::2].double().sum(0), gradient[1::2].double().sum(0)])
    assert ours.weight.grad is not None and ours.weight.grad.dtype == torch.float32
    torch.testing.assert_close(ours.weight.grad[:2].double(), right, rtol=1e-5, atol=1e-4)


def test_it_is_the_embedding_of_pytorch() -> None:
    torch.manual_seed(0)
    ours, plain = TokenEmbedding(50, 16, device=DEVICE), torch.nn.Embedding(50, 16, device=DEVICE)
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randint(50, (2, 30), device=DEVICE)
    results = [one(tokens) for one in (ours, plain)]
    for one in results:
        one.square().sum().backward()
    assert torch.equal(*results)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)
