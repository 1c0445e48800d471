"""The loss: the gradient of the head, and a vocabulary that is no multiple of eight, padded with zeros on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import pieces
from shardwise.layout.pieces import padded_vocabulary
from shardwise.models import loss
from shardwise.models.loss import IGNORED, cross_entropy_sum


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_head_that_accumulates_in_fp32_gets_the_fp32_sum_itself(
    wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 8, 32, generator=random).bfloat16().requires_grad_()
    weight = torch.randn(64, 32, generator=random).bfloat16().requires_grad_()
    weight.grad_dtype = wanted
    sums: list[int] = []
    original = loss.scaled

    def seen(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        sums.append(tensor.data_ptr())
        return original(tensor, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(loss, "scaled", seen)
    labels = torch.randint(64, (1, 8), generator=random)
    (cross_entropy_sum(hidden, weight, None, labels) / 8).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and weight.grad.dtype == wanted
    assert wanted != torch.float32 or weight.grad.data_ptr() in sums
    wide, head = hidden.detach().double(), weight.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy((wide @ head.T)[0], labels[0]).backward()  # type: ignore[no-untyped-call]
    assert head.grad is not None
    torch.testing.assert_close(weight.grad.double(), head.grad, rtol=0.03, atol=2e-3)


def test_a_second_backward_pass_is_refused_in_words() -> None:
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 8), (16, 8)))
    total = cross_entropy_sum(hidden, weight, None, torch.arange(4))
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="compute the loss again"):
        total.backward()  # type: ignore[no-untyped-call]


def padded_as_on_a_gpu(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    beyond = padded_vocabulary(weight.shape[0]) - weight.shape[0]
    return F.pad(weight, (0, 0, 0, beyond)), None if bias is None else F.pad(bias, (0, beyond))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_columns_of_zeros_change_nothing(biased: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (10, 101))
    bias = torch.randn(101, requires_grad=True) if biased else None
    labels = torch.randint(101, (10,))
    labels[3] = IGNORED
    tensors = [one for one in (hidden, weight, bias) if one is not None]

    def run() -> list[Tensor]:
        lost = cross_entropy_sum(hidden, weight, bias, labels, softcap=softcap)
        return [lost.detach(), *torch.autograd.grad(0.3 * lost, tensors)]

    plain = run()
    monkeypatch.setattr(loss, "_in_whole_columns", padded_as_on_a_gpu)
    for found, expected in zip(run(), plain, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_vocabulary_of_whole_columns_stays() -> None:
    assert [padded_vocabulary(one) for one in (50257, 50264, 128256, 1)] == [50304, 50264, 128256, 64]


@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_head_has_its_logits_in_pieces_however_few_they_are(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden, labels = torch.randn(20, 16, requires_grad=True), torch.randint(64, (20,))
    weight = torch.randn(64, 16, requires_grad=trained)
    monkeypatch.setattr(pieces, "LOGITS_AT_ONCE", 64 * 6)
    made: list[int] = []

    def seen(logits: Tensor, *others: Any) -> Tensor:
        made.append(len(logits))
        return loss.entropy_(logits, *others)

    total = loss.summed_loss(hidden, weight, None, labels, None, None, seen)
    assert made == ([20] if trained else [6, 6, 6, 2])
    (found,) = torch.autograd.grad(total, [hidden])
    (expected,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"), [hidden])
    torch.testing.assert_close(found, expected)
