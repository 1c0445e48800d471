"""A frozen weight that is kept in fewer bits: it is made of codes and scales for each use, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import kernels
from shardwise.models.weight_formats import (
    FP8_BLOCK,
    LAYOUTS,
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4_CODE,
    Encoded,
    Region,
    TensorLayout,
    decode,
    dynamic_code,
    encode,
    whole_blocks,
)

# -- the weight of a linear layer, or of stacked experts -----------------------------------------------


class StoredWeight(nn.Module):
    """A frozen matrix, or a rank's part of one: ``region`` of a whole [rows, columns]; of experts several, whose rows
    follow each other.

    Its tensors have no gradients; data parallelism may divide their rows.
    """

    nested: Tensor
    offset: Tensor

    def __init__(self, form: str, whole: tuple[int, int], region: Region, matrices: int = 1) -> None:
        super().__init__()
        self.form, self.whole, self.region, self.matrices = form, whole, region, matrices
        rows, columns = (run[1] - run[0] for run in (region.rows, region.columns))
        self.rows, self.columns = rows, columns
        for layout in LAYOUTS[form]:
            shape = (matrices * -(-rows // layout.rows), -(-columns // layout.columns) if layout.columns else 1)
            tensor = torch.empty(shape, dtype=layout.dtype, device="meta")
            self.register_parameter(layout.name, nn.Parameter(tensor, requires_grad=False))
        if form.startswith("nf4"):
            self.register_buffer("code", torch.empty(len(NF4_CODE), device="meta"), persistent=False)
        if form == "nf4-double":
            self.register_buffer("scale_code", torch.empty(256, device="meta"), persistent=False)
            groups = -(-(whole[0] * whole[1] // NF4_BLOCK) // NESTED_BLOCK)
            self.register_buffer("nested", torch.empty(matrices, groups, device="meta"), persistent=False)
            self.register_buffer("offset", torch.empty(matrices, 1, device="meta"), persistent=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """As they are now: whole, or divided by data parallelism."""
        return {layout.name: getattr(self, layout.name) for layout in LAYOUTS[self.form]}

    @property
    def codes_of_values(self) -> dict[str, Tensor]:
        """The numbers that codes stand for, in the formats that list them."""
        return {name: buffer for name, buffer in self.named_buffers() if name in ("code", "scale_code")}

    def dense(self, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        """The weight [rows, columns], or of experts [experts, rows, columns].

        Only ``after`` a tensor is there: else a compiler would keep what the forward pass made for the backward pass.
        """
        tensors = [*self.tensors.values(), *(buffer for _, buffer in self.named_buffers())]
        if self.form == "bf16":
            made = tensors[0].view(torch.bfloat16).to(dtype).view(self.matrices, self.rows, self.columns)
        else:
            shape = [self.matrices, self.rows, self.columns, self.whole[1]]
            first = [self.region.rows[0], self.region.columns[0]]
            made = made_of_codes(self.form, tensors, shape + first, dtype, [] if after is None else [after])
        return made if self.matrices > 1 else made[0]


def _kernel_runs_on(device: torch.device, form: str) -> bool:
    if form == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return False  # Triton has no E4M3 there
    return kernels.run_on(device)


@torch.library.custom_op("shardwise::made_of_codes", mutates_args=())
def made_of_codes(
    form: str, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, after: Sequence[Tensor]
) -> Tensor:
    """The matrices of a `StoredWeight`, from its tensors and then its buffers, in their order.

    ``shape``: matrices, rows, columns; then columns of the whole, and of it the first row and column that are here.
    """
    if dtype == torch.float64 or not _kernel_runs_on(tensors[0].device, form):
        return _plainly_made(form, tensors, shape, dtype)
    from shardwise.models import triton_kernels

    matrices, rows, columns, across, first_row, first_column = shape
    codes, scales, *listed = (tensor.contiguous() for tensor in tensors)
    result = torch.empty((matrices, rows, columns), dtype=dtype, device=codes.device)
    if form in ("fp8", "int8"):
        height, width, most = (FP8_BLOCK, FP8_BLOCK, 1) if form == "fp8" else (1, triton_kernels.INT8_BLOCK, 0)
        tiles = -(-rows // height)
        triton_kernels.made_of_bytes[(matrices * tiles, -(-columns // width))](
            codes.view(torch.float8_e4m3fn) if form == "fp8" else codes, scales.view(torch.float32), result, rows,
            columns, tiles, scales.shape[1], STEP=most, HEIGHT=height, WIDTH=width, num_warps=8,
        )  # fmt: skip
        return result
    count, double = result.numel() // NF4_BLOCK, form == "nf4-double"
    code, scale_code, nested, offset = listed if double else [listed[0]] * 4
    triton_kernels.made_of_nf4[(-(-count // triton_kernels.NF4_SCALES),)](
        codes, scales if double else scales.view(torch.float32), result, code, scale_code, nested, offset, count, rows,
        columns // NF4_BLOCK, across // NF4_BLOCK, first_row, first_column // NF4_BLOCK, nested.shape[-1],
        DOUBLE=double, SCALES=triton_kernels.NF4_SCALES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return result


@made_of_codes.register_fake
def _(
    form: str, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype, after: Sequence[Tensor]
) -> Tensor:
    return tensors[0].new_empty(list(shape[:3]), dtype=dtype)


def _plainly_made(form: str, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    matrices, rows, columns, across, first_row, first_column = shape
    named = dict(zip(("codes", "scales", "code", "scale_code"), tensors))
    nested = None
    if form == "nf4-double":  # scales were grouped along the rows of the whole matrix
        groups, named["offset"] = tensors[4], tensors[5].repeat_interleave(rows, 0)
        row = torch.arange(first_row, first_row + rows, device=groups.device)[:, None] * (across // NF4_BLOCK)
        column = torch.arange(first_column // NF4_BLOCK, (first_column + columns) // NF4_BLOCK, device=groups.device)
        nested = groups[:, (row + column) // NESTED_BLOCK].flatten(0, 1)
    if form == "fp8":
        each = zip(*(named[name].chunk(matrices) for name in ("codes", "scales")))
        return torch.stack([decode(form, {"codes": codes, "scales": scales}, dtype) for codes, scales in each])
    return decode(form, named, dtype, nested).view(matrices, rows, columns)


Read = Callable[[int, Region], Tensor]  # of which matrix, and what of it


@torch.no_grad()
def fill_stored(stored: StoredWeight, read: Read, local: Callable[[Tensor], tuple[Tensor, int]]) -> None:
    """Quantises a weight on the way from where ``read`` reads it; only whole blocks around what is here are read.

    ``local`` gives of a tensor what this rank holds, and the number of its first row.
    """
    for name, code in stored.codes_of_values.items():
        code.copy_(torch.tensor(NF4_CODE if name == "code" else dynamic_code()))
    for matrix in range(stored.matrices):
        encoded: dict[Region, Encoded] = {}  # codes and scales are mostly of the same rows
        for layout in LAYOUTS[stored.form]:
            tensor, first = local(getattr(stored, layout.name))
            each = len(getattr(stored, layout.name)) // stored.matrices  # rows of one matrix
            start, stop = (min(max(row - matrix * each, 0), each) for row in (first, first + len(tensor)))
            if start < stop:
                here = _rows_of(stored, layout, start, stop)
                outer = whole_blocks(stored.form, here, *stored.whole)
                if outer not in encoded:
                    encoded[outer] = encode(stored.form, read(matrix, outer), tensor.device)
                at = matrix * each + start - first
                value = _part(encoded[outer][layout.name], layout, here.inside(outer))
                tensor[at : at + stop - start] = value.to(tensor.device)
        for codes in encoded.values():
            if "nested" in codes:
                stored.nested[matrix], stored.offset[matrix] = codes["nested"], codes["offset"]


def _rows_of(stored: StoredWeight, layout: TensorLayout, start: int, stop: int) -> Region:
    """What some rows of one of the tensors of a matrix stand for."""
    begin, end = stored.region.rows
    return Region((begin + start * layout.rows, min(begin + stop * layout.rows, end)), stored.region.columns)


def _part(encoded: Tensor, layout: TensorLayout, inner: Region) -> Tensor:
    unit = layout.columns
    columns = slice(inner.columns[0] // unit, -(-inner.columns[1] // unit)) if unit else slice(None)
    return encoded[inner.rows[0] // layout.rows : -(-inner.rows[1] // layout.rows), columns]


# -- products with a weight that is made anew for the backward pass ------------------------------------


def weight_of(linear: Any, dtype: torch.dtype) -> Tensor:
    """The weight of a linear layer, made for this use if it is stored."""
    stored: StoredWeight | None = getattr(linear, "stored", None)
    weight: Tensor = linear.weight if stored is None else stored.dense(dtype)
    return weight


def stored_product(inputs: Tensor, stored: StoredWeight, added: Tensor | None = None) -> Tensor:
    """A matmul of inputs and a stored weight, to which something is ``added``; only codes are kept for the backward
    pass."""
    product: Tensor = _StoredProduct.apply(inputs, stored, added)  # type: ignore[no-untyped-call]
    return product


class _StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, stored: StoredWeight, added: Tensor | None) -> Tensor:
        ctx.stored = stored
        weight = stored.dense(inputs.dtype)
        if added is None:
            return F.linear(inputs, weight)
        return torch.addmm(added.flatten(0, -2), inputs.flatten(0, -2), weight.T).view_as(added)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        of_inputs = gradient @ ctx.stored.dense(gradient.dtype, after=gradient) if ctx.needs_input_grad[0] else None
        return of_inputs, None, gradient if ctx.needs_input_grad[2] else None
