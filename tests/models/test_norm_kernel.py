"""The backward pass of an RMS norm by our kernel against float64, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models import compiled_layer
from shardwise.models.compiled_layer import rms_norm_gradients

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("with_kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 9, 512), (7, 1536), (1, 64)])
def test_gradients_of_a_norm_and_of_the_path_around_it(
    shape: tuple[int, ...], dtype: torch.dtype, with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layer.kernels, "run_on", lambda device: with_kernels)
    monkeypatch.setattr(compiled_layer, "PROGRAMS", 4)  # each has several rows, or none
    draw = torch.Generator().manual_seed(sum(shape))
    states, gradient, around = (torch.randn(shape, generator=draw).to(DEVICE, dtype) for _ in range(3))
    weight = torch.rand(shape[-1], generator=draw).to(DEVICE, dtype)
    wide, wide_weight = (one.double().requires_grad_() for one in (states, weight))
    normed = F.rms_norm(wide, wide_weight.shape, wide_weight, 1e-5)
    right, right_weight = torch.autograd.grad(normed, (wide, wide_weight), gradient.double())
    found, partial, again = rms_norm_gradients(gradient, around, states, weight, 1e-5, True)
    limit = 1e-6 if dtype == torch.float32 else 8e-3 if INTERPRETED else 4e-3  # the interpreter cuts off
    assert found.dtype == dtype and error(found, right + around.double()) < limit
    assert error(partial.sum(0), right_weight) < 1e-6
    assert error(again, normed.detach()) < limit
