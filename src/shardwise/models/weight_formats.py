"""Formats of frozen weights in fewer bits: a matrix as codes and scales, and back.

Formats and their sources are those of `spec.fine_tuning.BASE_FORMATS`. NF4 is bitsandbytes' (QLoRA, arXiv 2305.14314;
functional.py): the same codes, scales and packing, the first of two weights in the upper half of a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.spec.errors import SpecError

# The quantiles of a normal distribution (QLoRA, appendix E), as bitsandbytes has them.
NF4_CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BLOCK, NESTED_BLOCK, FP8_BLOCK = 64, 256, 128
LARGEST_FP8 = 448.0
ELEMENTS_AT_ONCE = 2**24
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


def encode(form: str, matrix: Tensor, device: torch.device | None = None) -> Encoded:
    """``matrix`` [rows, columns] in a format; of `nf4-double` also ``nested`` scales and their ``offset``.

    On a ``device`` it is never whole in fp32: some rows are moved there at a time.
    """
    rows = max(1, ELEMENTS_AT_ONCE // (FP8_BLOCK * matrix.shape[1])) * FP8_BLOCK
    parts = [_encode_rows(form, some.to(device or some.device)) for some in torch.split(matrix, rows)]
    encoded = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    # On a CPU, so that the mean of the scales has the same bits everywhere.
    return {**encoded, **_double(encoded["scales"].cpu().view(torch.float32))} if form == "nf4-double" else encoded


def _encode_rows(form: str, matrix: Tensor) -> Encoded:
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
    return {"codes": (codes[:, ::2] << 4) | codes[:, 1::2], "scales": largest.view(torch.int32)}


def _double(largest: Tensor) -> Encoded:
    """Scales in eight bits around their mean, with an fp32 scale for every 256 of them (QLoRA, section 3)."""
    offset = largest.mean()
    flat = (largest - offset).flatten()
    padded = F.pad(flat, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = padded.abs().amax(1)
    scaled = (padded * (1.0 / nested.clamp(min=SMALLEST))[:, None]).clamp(-1, 1)
    codes = torch.bucketize(scaled, _bounds(torch.tensor(dynamic_code())), out_int32=True).to(torch.uint8)
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
