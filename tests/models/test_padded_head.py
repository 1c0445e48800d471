"""The loss of a vocabulary that is no multiple of eight, whose products have columns of zeros on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout.pieces import padded_vocabulary
from shardwise.models import loss
from shardwise.models.loss import IGNORED, cross_entropy_sum


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
