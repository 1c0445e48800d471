"""Weight gradients of compiled layers in fp32, as the matmul sums them.

A compiled layer rounds the gradient of a bf16 weight to bf16, and autograd widens it again to accumulate it in fp32: a
useless pass over every gradient. Matmuls of FP8 forms do not read the weight itself. So in compiled layers an fp32 leaf
without memory of its own takes its place, and hands its gradient over to the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def takes_wide_gradients(parameter: Tensor) -> bool:
    """Whether gradients of a 16-bit parameter are accumulated in fp32, by the parameter itself."""
    return parameter.is_leaf and parameter.dtype != torch.float32 and parameter.grad_dtype == torch.float32


def stand_in(parameter: nn.Parameter) -> Tensor:
    """A leaf of the same shape, all of whose elements are one zero; its gradient is handed over."""
    leaf = torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape).requires_grad_()

    def hand_over(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    leaf.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
    return leaf
