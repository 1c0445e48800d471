"""Casts and matmuls of FP8 as operators that the compiler and recompute see as one: kernels on a GPU, else emulated.

An emulated matmul multiplies the same FP8 numbers in fp32, so that a CPU computes what a GPU does but for the order of
additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.fp8.scaling import BLOCK, Form, cast, format_of, scale_shape, whole_matrix, whole_shape

Both = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("shardwise::fp8_cast", mutates_args=())
def fp8_cast(
    parts: Sequence[Tensor], largest: Sequence[Tensor], scaling: str, gradient: bool, stacked: bool, plain: bool,
    turned: bool,
) -> Both:  # fmt: skip
    """Values and scales of the plain and the turned form of matrices side by side, or of weights ``stacked``.

    ``largest`` is the result of `fp8_largest`, the largest of all for tensor scaling, or empty for block scaling.
    """
    dtype = format_of(scaling, gradient)
    if parts[0].is_cuda:
        from shardwise.engine.fp8.kernels import cast_forms

        return cast_forms(parts, largest, scaling, dtype, stacked, plain, turned)
    matrix = whole_matrix(parts, stacked)
    by_row, by_column = [*largest, *largest][:2] if largest else (None, None)
    forms: list[Tensor] = []
    for wanted, source, most in ((plain, matrix, by_row), (turned, matrix.T, by_column)):
        form = cast(source, most, scaling, dtype, stacked) if wanted else None
        forms += [form.values, form.scales] if form else [source.new_empty((0, 0), dtype=dtype), _no_scales(source)]
    values, scales, values_turned, scales_turned = forms
    return values, scales, values_turned, scales_turned


@fp8_cast.register_fake
def _(
    parts: Sequence[Tensor], largest: Sequence[Tensor], scaling: str, gradient: bool, stacked: bool, plain: bool,
    turned: bool,
) -> Both:  # fmt: skip
    first, dtype = parts[0], format_of(scaling, gradient)
    rows, columns = whole_shape(parts, stacked)
    outputs = []
    for wanted, shape in ((plain, (rows, columns)), (turned, (columns, rows))):
        outputs.append(first.new_empty(shape if wanted else (0, 0), dtype=dtype))
        of_scales = scale_shape(*shape, scaling, stacked)
        outputs.append(first.new_empty(of_scales, dtype=torch.float32) if wanted else _no_scales(first))
    values, scales, values_turned, scales_turned = outputs
    return values, scales, values_turned, scales_turned


def _no_scales(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


@torch.library.custom_op("shardwise::fp8_largest", mutates_args=())
def fp8_largest(parts: Sequence[Tensor], stacked: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each row and of each column, in one reading."""
    if parts[0].is_cuda:
        from shardwise.engine.fp8.kernels import largest_of

        return largest_of(parts, stacked)
    sizes = whole_matrix(parts, stacked).abs().float()
    return sizes.amax(1), sizes.amax(0)


@fp8_largest.register_fake
def _(parts: Sequence[Tensor], stacked: bool) -> tuple[Tensor, Tensor]:
    rows, columns = (parts[0].new_empty(size, dtype=torch.float32) for size in whole_shape(parts, stacked))
    return rows, columns


@torch.library.custom_op("shardwise::fp8_turned", mutates_args=())
def fp8_turned(values: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The turned form of stacked weights from the plain form of each, where both are the same numbers.

    This is so if all elements share a scale, or if blocks are square.
    """
    rows = torch.cat([part.view(torch.uint8) for part in values])  # bytes, since few operators know FP8
    turned = rows.T.contiguous().view(values[0].dtype)
    if scales[0].dim() == 0:
        return turned, scales[0].clone()
    blocks = -(-values[0].shape[1] // BLOCK)
    table = torch.cat([part[:, :blocks] for part in scales]).T
    return turned, F.pad(table, (0, -table.shape[1] % 4)).contiguous()


@fp8_turned.register_fake
def _(values: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    rows, columns = sum(part.shape[0] for part in values), values[0].shape[1]
    turned = values[0].new_empty((columns, rows))
    if scales[0].dim() == 0:
        return turned, torch.empty_like(scales[0])
    return turned, scales[0].new_empty(scale_shape(columns, rows, "block", True))


def product(left: Form, right: Form, dtype: torch.dtype, fast: bool) -> Tensor:
    """``left`` times the transpose of ``right``: sums along the rows of both.

    ``fast``: partial sums stay in the tensor cores' registers of 14 bits, which is accurate enough for a forward pass
    (Transformer Engine and torchao do the same), but not for gradients.
    """
    result: Tensor = fp8_product(left.values, left.scales, right.values, right.scales, right.square, dtype, fast)
    return result


@torch.library.custom_op("shardwise::fp8_product", mutates_args=())
def fp8_product(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, square: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    if not left.is_cuda:
        return (Form(left, left_scales).wide() @ Form(right, right_scales, square).wide().T).to(dtype)
    kinds = F.ScalingType
    of_left = of_right = kinds.TensorWise
    if left_scales.dim() == 1:
        of_left = of_right = kinds.RowWise
        left_scales, right_scales = left_scales[:, None], right_scales[None, :]
    elif left_scales.dim() == 2:
        of_left, of_right = kinds.BlockWise1x128, kinds.BlockWise128x128 if square else kinds.BlockWise1x128
        left_scales, right_scales = left_scales.T, right_scales.T
        fast = False  # blocks are added up in fp32
    return F.scaled_mm(
        left, right.T, left_scales, of_left, right_scales, of_right, output_dtype=dtype, use_fast_accum=fast
    )


@fp8_product.register_fake
def _(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, square: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=dtype)
