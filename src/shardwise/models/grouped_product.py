"""One matrix product for each group of rows, all in one call, without the host knowing the sizes of the groups.

In bf16 it is torch's own, which the compiler knows. In other formats torch computes it but refuses to compile it, and
its backward refuses a gradient that a broadcast has made: a small operator of our own stands in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """``rows`` [n, inputs] times ``matrices`` [groups, inputs, outputs]; a group's rows stop at its entry of ``ends``.

    ``ends`` is int32 and stays on the device. Rows behind the last end are left undefined.
    """
    product: Tensor
    if rows.dtype == torch.bfloat16:
        product = _DenseGradient.apply(F.grouped_mm(rows, matrices, offs=ends))  # type: ignore[no-untyped-call]
    else:
        product = _product_in_any_format(rows, matrices, ends)
    return product


class _DenseGradient(torch.autograd.Function):
    """The identity, with a gradient that lies in memory as one block."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


@torch.library.custom_op("shardwise::grouped_product", mutates_args=())
def _product_in_any_format(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, matrices, offs=ends)


@_product_in_any_format.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[-1])


@torch.library.custom_op("shardwise::grouped_product_of_columns", mutates_args=())
def _product_of_columns(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """For each group its rows, transposed, times their gradient: [groups, inputs, outputs]."""
    return F.grouped_mm(rows.T, gradient, offs=ends)


@_product_of_columns.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    for_rows = _product_in_any_format(gradient, matrices.transpose(-1, -2), ends)
    return for_rows, _product_of_columns(rows, gradient, ends), None


_product_in_any_format.register_autograd(_backward, setup_context=_save)
