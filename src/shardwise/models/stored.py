"""Frozen weights in fewer bits: codes and scales, from which a weight is made for each use, forward and backward.

Formats and their sources are those of `spec.fine_tuning.BASE_FORMATS`. NF4 is bitsandbytes' (QLoRA, arXiv 2305.14314;
functional.py): the same codes, scales and packing, the first of two weights in the upper half of a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.spec.errors import SpecError

# The quantiles of a normal distribution (QLoRA, appendix E), as bitsandbytes has them.
NF4_CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BLOCK, NESTED_BLOCK, FP8_BLOCK = 64, 256, 128
LARGEST_FP8 = 448.0
SMALLEST = 1e-38  # as in bitsandbytes: what a block of zeros is divided by


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a stored matrix [rows, columns]: a row for each ``rows`` of the matrix."""

    name: str
    rows: int  # rows of the matrix that one of its rows stands for
    columns: int  # columns of the matrix that one of its columns stands for; 0: all of them
    dtype: torch.dtype


# Scales are kept as integers of the same bits, which no mixed precision rounds.
LAYOUTS: dict[str, tuple[TensorLayout, ...]] = {
    "bf16": (TensorLayout("codes", 1, 1, torch.int16),),
    "fp8": (
        TensorLayout("codes", 1, 1, torch.uint8),
        TensorLayout("scales", FP8_BLOCK, FP8_BLOCK, torch.int32),
    ),
    "int8": (TensorLayout("codes", 1, 1, torch.int8), TensorLayout("scales", 1, 0, torch.int32)),
    "nf4": (TensorLayout("codes", 1, 2, torch.uint8), TensorLayout("scales", 1, NF4_BLOCK, torch.int32)),
    "nf4-double": (TensorLayout("codes", 1, 2, torch.uint8), TensorLayout("scales", 1, NF4_BLOCK, torch.uint8)),
}


@dataclass(frozen=True)
class Region:
    """Rows and columns of a whole matrix."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    def of(self, matrix: Tensor) -> Tensor:
        return matrix[self.rows[0] : self.rows[1], self.columns[0] : self.columns[1]]

    def inside(self, outer: Region) -> Region:
        pairs = ((self.rows, outer.rows), (self.columns, outer.columns))
        rows, columns = ((mine[0] - other[0], mine[1] - other[0]) for mine, other in pairs)
        return Region(rows, columns)


def whole_blocks(form: str, region: Region, rows: int, columns: int) -> Region:
    """The smallest region with whole blocks around a region of a matrix: what must be read to quantise it."""
    if form == "nf4-double":
        return Region((0, rows), (0, columns))
    if form == "int8":
        return Region(region.rows, (0, columns))
    if form == "fp8":
        return Region(_around(region.rows, rows), _around(region.columns, columns))
    return region


def require_whole_blocks(form: str, name: str, whole: tuple[int, int], region: Region) -> None:
    """Raises SpecError where a block of a matrix would be cut, or where rows do not end with their blocks."""
    cut = [
        bound % FP8_BLOCK > 0
        for run, size in zip((region.rows, region.columns), whole)
        for bound in run
        if bound < size
    ]
    if form == "fp8" and any(cut):
        problem = f"{name} [{whole[0]}, {whole[1]}] would be cut inside its blocks of {FP8_BLOCK} x {FP8_BLOCK}"
    elif form.startswith("nf4") and any(bound % NF4_BLOCK for bound in region.columns):
        problem = f"{name} [{whole[0]}, {whole[1]}] has rows that do not divide into blocks of {NF4_BLOCK}"
    else:
        return
    raise SpecError("training.base_precision", problem, "a smaller tp, or another base_precision")


def _around(run: tuple[int, int], most: int) -> tuple[int, int]:
    return run[0] // FP8_BLOCK * FP8_BLOCK, min(-(-run[1] // FP8_BLOCK) * FP8_BLOCK, most)


# -- a matrix, or whole blocks of one, as codes and scales ---------------------------------------------

Encoded = dict[str, Tensor]


def encode(form: str, matrix: Tensor) -> Encoded:
    """``matrix`` [rows, columns] in a format; of `nf4-double` also ``nested`` scales and their ``offset``."""
    if form == "bf16":
        return {"codes": matrix.to(torch.bfloat16).view(torch.int16)}
    wide = matrix.float()
    if form == "int8":
        scales = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / 127
        return {"codes": (wide / scales).round().to(torch.int8), "scales": scales.view(torch.int32)}
    if form == "fp8":
        blocks = _blocked(wide)
        scales = blocks.abs().amax((1, 3)).clamp(min=SMALLEST) / LARGEST_FP8
        scaled = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[: wide.shape[0], : wide.shape[1]]
        return {"codes": scaled.to(torch.float8_e4m3fn).view(torch.uint8), "scales": scales.view(torch.int32)}
    blocks = wide.reshape(wide.shape[0], -1, NF4_BLOCK)
    largest = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / largest.clamp(min=SMALLEST))[..., None]).clamp(-1, 1)
    bounds = _bounds(torch.tensor(NF4_CODE, device=wide.device))
    codes = torch.bucketize(scaled.reshape(wide.shape).contiguous(), bounds, out_int32=True).to(torch.uint8)
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]
    if form == "nf4":
        return {"codes": packed, "scales": largest.view(torch.int32)}
    return {"codes": packed, **_double(largest)}


def _double(largest: Tensor) -> Encoded:
    """Scales in eight bits around their mean, with an fp32 scale for every 256 of them (QLoRA, section 3)."""
    offset = largest.mean()
    flat = (largest - offset).flatten()
    padded = F.pad(flat, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = padded.abs().amax(1)
    scaled = (padded * (1.0 / nested.clamp(min=SMALLEST))[:, None]).clamp(-1, 1)
    codes = torch.bucketize(scaled, _bounds(torch.tensor(dynamic_code(), device=largest.device)), out_int32=True).to(
        torch.uint8
    )
    return {"scales": codes.flatten()[: len(flat)].view(largest.shape), "nested": nested, "offset": offset}


def decode(form: str, tensors: Mapping[str, Tensor], dtype: torch.dtype, nested: Tensor | None = None) -> Tensor:
    """The matrix [rows, columns] of codes and scales; ``nested`` is the nested scale of each scale."""
    codes = tensors["codes"]
    if form == "bf16":
        return codes.view(torch.bfloat16).to(dtype)
    if form == "int8":
        return (codes.float() * tensors["scales"].view(torch.float32)).to(dtype)
    if form == "fp8":
        scales = tensors["scales"].view(torch.float32)
        wide = codes.view(torch.float8_e4m3fn).float()
        blocks = _blocked(wide) * scales[:, None, :, None]
        return blocks.flatten(2).flatten(0, 1)[: wide.shape[0], : wide.shape[1]].to(dtype)
    apart = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
    if nested is None:
        scales = tensors["scales"].view(torch.float32)
    else:
        scales = tensors["scale_code"][tensors["scales"].int()] * nested + tensors["offset"]
    values = tensors["code"][apart.int()].view(codes.shape[0], -1, NF4_BLOCK) * scales[..., None]
    return values.flatten(1).to(dtype)


def _blocked(matrix: Tensor) -> Tensor:
    """[blocks of rows, 128, blocks of columns, 128], padded with zeros."""
    padded = F.pad(matrix, (0, -matrix.shape[1] % FP8_BLOCK, 0, -matrix.shape[0] % FP8_BLOCK))
    return padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)


def _bounds(code: Tensor) -> Tensor:
    return (code[:-1] + code[1:]) / 2


def _linspace(steps: int) -> Any:
    """0.1 to 1 in fp32 with the rounding of `torch.linspace`: from both ends to the middle, rounded once."""
    first, last = np.float32(0.1), np.float32(1)
    step, places = np.float64((last - first) / np.float32(steps - 1)), np.arange(steps, dtype=np.float64)
    halves = np.where(places < steps // 2, first + step * places, last - step * (steps - 1 - places))
    return halves.astype(np.float32)


@lru_cache(maxsize=1)
def dynamic_code() -> tuple[float, ...]:
    """The signed eight-bit numbers of bitsandbytes' `create_dynamic_map` (arXiv 1511.04561): the larger the exponent,
    the more bits of fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = _linspace(2**exponent + 1)
        means = np.float32(10 ** (exponent - 6)) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(values))


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

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns], or of experts [experts, rows, columns]."""
        tensors, nested = {**self.tensors, **self.codes_of_values}, None
        if self.form == "nf4-double":
            tensors["offset"] = self.offset.repeat_interleave(self.rows, 0)
            nested = self._nested()
        if self.form == "fp8" and self.matrices > 1:
            each = zip(*(tensors[name].chunk(self.matrices) for name in ("codes", "scales")))
            return torch.stack([decode("fp8", {"codes": codes, "scales": of}, dtype) for codes, of in each])
        matrix = decode(self.form, tensors, dtype, nested)
        return matrix if self.matrices == 1 else matrix.view(self.matrices, self.rows, self.columns)

    def _nested(self) -> Tensor:
        """The nested scale of each of the scales here; they were grouped along the rows of the whole matrix."""
        across, device = self.whole[1] // NF4_BLOCK, self.nested.device
        rows = torch.arange(*self.region.rows, device=device)[:, None] * across
        columns = torch.arange(*(bound // NF4_BLOCK for bound in self.region.columns), device=device)
        return self.nested[:, (rows + columns) // NESTED_BLOCK].flatten(0, 1)


Read = Callable[[int, Region], Tensor]  # of which matrix, and what of it


@torch.no_grad()
def fill_stored(stored: StoredWeight, read: Read, local: Callable[[Tensor], tuple[Tensor, int]]) -> None:
    """Quantises a weight on the way from where ``read`` reads it; only whole blocks around what is here are read.

    ``local`` gives of a tensor what this rank holds, and the number of its first row.
    """
    for name, code in stored.codes_of_values.items():
        code.copy_(torch.tensor(NF4_CODE if name == "code" else dynamic_code()))
    for layout in LAYOUTS[stored.form]:
        tensor, first = local(getattr(stored, layout.name))
        each = len(getattr(stored, layout.name)) // stored.matrices  # rows of one matrix
        for matrix in range(stored.matrices):
            start, stop = (min(max(row - matrix * each, 0), each) for row in (first, first + len(tensor)))
            if start < stop:
                value = _encoded(stored, layout, read, matrix, (start, stop))
                at = matrix * each + start - first
                tensor[at : at + stop - start] = value.to(tensor.device)


def _encoded(stored: StoredWeight, layout: TensorLayout, read: Read, matrix: int, rows: tuple[int, int]) -> Tensor:
    """Some rows of one of the tensors."""
    begin = stored.region.rows[0]
    last = stored.region.rows[1]
    here = Region((begin + rows[0] * layout.rows, min(begin + rows[1] * layout.rows, last)), stored.region.columns)
    outer = whole_blocks(stored.form, here, *stored.whole)
    encoded = encode(stored.form, read(matrix, outer))
    if "nested" in encoded:
        stored.nested[matrix] = encoded["nested"].to(stored.nested.device)
        stored.offset[matrix] = encoded["offset"].to(stored.offset.device)
    inner, unit = here.inside(outer), layout.columns
    columns = slice(inner.columns[0] // unit, -(-inner.columns[1] // unit)) if unit else slice(None)
    return encoded[layout.name][inner.rows[0] // layout.rows : -(-inner.rows[1] // layout.rows), columns]


# -- products with a weight that is made anew for the backward pass ------------------------------------


def weight_of(linear: Any, dtype: torch.dtype) -> Tensor:
    """The weight of a linear layer, made for this use if it is stored."""
    stored: StoredWeight | None = getattr(linear, "stored", None)
    weight: Tensor = linear.weight if stored is None else stored.dense(dtype)
    return weight


def stored_product(inputs: Tensor, stored: StoredWeight) -> Tensor:
    """A matmul of inputs and a stored weight; only its codes are kept for the backward pass."""
    product: Tensor = _StoredProduct.apply(inputs, stored)  # type: ignore[no-untyped-call]
    return product


class _StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, stored: StoredWeight) -> Tensor:
        ctx.stored = stored
        return F.linear(inputs, stored.dense(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.stored.dense(gradient.dtype), None
