"""The gradient of the head: in fp32 where that is what accumulates, and then without a copy."""

from __future__ import annotations

import pytest
import torch

from shardwise.models import loss
from shardwise.models.loss import cross_entropy_sum


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
