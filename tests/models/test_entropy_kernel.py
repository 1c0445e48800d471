"""The kernels of the loss against float64, on a GPU or in Triton's interpreter, and the plain version beside them."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from shardwise.models import loss
from shardwise.models.loss import cross_entropy_sum

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS_RUN = torch.cuda.is_available() or INTERPRETED
NARROW = 2.0**-7 if INTERPRETED else 2.0**-8  # bf16 rounds; the interpreter cuts off
needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason="needs a GPU, or TRITON_INTERPRET=1")
versions = pytest.mark.parametrize("with_kernels", [False, pytest.param(True, marks=needs_kernels)])


@pytest.fixture(autouse=True)
def the_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = request.node.callspec.params.get("with_kernels", False)
    monkeypatch.setattr(loss.kernels, "run_on", lambda device: wanted)
    monkeypatch.setattr(loss, "WIDE_LOGITS", 3000)  # slices that do not divide the tokens


def some(tokens: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * columns)
    logits = 6 * torch.randn(tokens, columns, generator=generator)
    labels = torch.randint(columns, (tokens,), generator=generator)
    factors = torch.rand(tokens, generator=generator)
    factors[0] = 0.0
    return logits.to(DEVICE, dtype), labels.to(DEVICE), factors.to(DEVICE)


def exact(logits: Tensor, labels: Tensor, factors: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    wide = logits.double().requires_grad_()
    capped = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    lost = torch.nn.functional.cross_entropy(capped, labels, reduction="none") * factors
    lost.sum().backward()
    assert wide.grad is not None
    return lost.detach(), wide.grad


def close(found: Tensor, right: Tensor, relative: float) -> None:
    """By the norm of the error: every element of a gradient is rounded by itself."""
    error = (found.double() - right).norm() / right.norm()
    assert float(error) < relative, float(error)


@versions
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("shape", [(5, 1000), (3, 9001), (2, 16384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_and_the_gradient_written_over_the_logits(
    with_kernels: bool, softcap: float | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    logits, labels, factors = some(*shape, dtype)
    right, gradient = exact(logits, labels, factors, softcap)
    before = logits.clone()
    close(loss.entropy_(logits, labels, factors, softcap, False), right, 1e-6)
    assert torch.equal(logits, before)
    close(loss.entropy_(logits, labels, factors, softcap, True), right, 1e-6)
    close(logits, gradient, NARROW if dtype == torch.bfloat16 else 1e-5)


@versions
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("cuts", [(4500, 9001), (9001, 9001), (1, 9001)])  # the second: a rank with no columns
def test_parts_of_the_vocabulary_give_the_whole(
    with_kernels: bool, softcap: float | None, cuts: tuple[int, ...]
) -> None:
    logits, labels, factors = some(3, 9001, torch.bfloat16)
    right, gradient = exact(logits, labels, factors, softcap)
    starts = (0, *cuts[:-1])
    width = max(end - start for start, end in zip(starts, cuts)) + 3  # columns beyond the vocabulary
    parts, columns, found = [], [], []
    for start, end in zip(starts, cuts):
        part = torch.full((3, width), 777.0, dtype=logits.dtype, device=DEVICE)
        part[:, : end - start] = logits[:, start:end]
        column = torch.where((labels >= start) & (labels < end), labels - start, -1)
        parts.append(part)
        columns.append(column)
        found.append(loss.statistics(part, column, end - start, softcap))
    largest = torch.stack([one[0] for one in found]).amax(0)
    total = sum(one[1] * (one[0] - largest).exp() for one in found)
    label = sum(one[2] for one in found)
    close((total.log() + largest - label) * factors, right, 1e-6)
    for part, column, start, end in zip(parts, columns, starts, cuts):
        loss.differentiate_(part, column, factors, largest, total, end - start, softcap)
        assert not part[:, end - start :].any()
    whole = torch.cat([part[:, : end - start] for part, start, end in zip(parts, starts, cuts)], dim=1)
    close(whole, gradient, NARROW)


@versions
def test_the_product_in_another_format(with_kernels: bool) -> None:
    tensor, factor = torch.randn(3, 5001, device=DEVICE), torch.tensor(0.3, device=DEVICE)
    found = loss.scaled(tensor, factor, torch.bfloat16)
    torch.testing.assert_close(found.float(), tensor * factor, rtol=NARROW, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("with_kernels", [True])
@pytest.mark.parametrize("vocabulary", [4096, 5001])
@pytest.mark.parametrize("biased", [False, True])
def test_the_loss_of_hidden_states(with_kernels: bool, vocabulary: int, biased: bool) -> None:
    """With rows of logits that are no whole 16 bytes, too."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        (0.3 * torch.randn(shape, generator=draw)).to(DEVICE, torch.bfloat16).requires_grad_()  # small logits
        for shape in ((300, 64), (vocabulary, 64), (vocabulary,))
    )
    labels = torch.randint(vocabulary, (300,), generator=draw).to(DEVICE)
    labels[::7] = -100
    given = [hidden, weight, *([bias] if biased else [])]
    found = cross_entropy_sum(hidden, weight, bias if biased else None, labels)
    found.backward()
    wide = [one.detach().double().requires_grad_() for one in given]
    logits = wide[0] @ wide[1].T + (wide[2] if biased else 0)
    right = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    right.backward()
    close(found.detach(), right.detach(), 1e-3)
    for one, expected in zip(given, wide):
        assert one.grad is not None and expected.grad is not None
        close(one.grad, expected.grad, 6e-3)
