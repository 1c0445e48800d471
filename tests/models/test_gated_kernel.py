"""The backward pass of SwiGLU by our kernel against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from shardwise.models import compiled_layer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("with_kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4, 512), (3, 700)])
def test_gradients_and_the_output_again(
    shape: tuple[int, ...], dtype: torch.dtype, with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layer.kernels, "run_on", lambda device: with_kernels)
    draw = torch.Generator().manual_seed(sum(shape))
    gradient, gate, up = (3 * torch.randn(shape, generator=draw).to(DEVICE, dtype) for _ in range(3))
    wide_gate, wide_up = (one.double().requires_grad_() for one in (gate, up))
    output = F.silu(wide_gate) * wide_up
    right = (*torch.autograd.grad(output, (wide_gate, wide_up), gradient.double()), output.detach())
    limit = 1e-6 if dtype == torch.float32 else 8e-3 if INTERPRETED else 4e-3  # the interpreter cuts off
    for found, expected in zip(compiled_layer.swiglu_gradients(gradient, gate, up), right):
        assert found.dtype == dtype
        assert float((found.double() - expected).norm() / expected.norm()) < limit
