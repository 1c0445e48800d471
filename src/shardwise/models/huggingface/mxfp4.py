"""Experts whose weights are stored in MXFP4, as gpt-oss is published: read as the numbers that they stand for.

In place of a tensor X [experts, inputs, outputs] are ``X_blocks`` [experts, outputs, blocks, 16], with two codes of a
float of four bits (E2M1) in a byte, the first in the lower half, and ``X_scales`` [experts, outputs, blocks], the
exponents of the powers of two that each block of 32 inputs is multiplied by, plus 127 (OCP Microscaling Formats 1.0,
sections 5.3.3 and 5.4.1). bf16 holds every such number exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.spec.errors import SpecError

BLOCK = 32  # inputs
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_BLOCKS, _SCALES = "_blocks", "_scales"


def with_whole_names(files: Mapping[str, str]) -> dict[str, str]:
    """The file of every tensor, with X in place of its blocks and scales."""
    found = {}
    for name, file in files.items():
        whole = name.removesuffix(_BLOCKS)
        if whole != name and files.get(whole + _SCALES) == file:
            found[whole] = file
        elif not (name.endswith(_SCALES) and files.get(name.removesuffix(_SCALES) + _BLOCKS) == file):
            found[name] = file
    return found


def is_in_blocks(name: str, opened: Any) -> bool:
    return name + _BLOCKS in opened.keys()  # noqa: SIM118 (a file of safetensors is no mapping)


class MXFP4Tensor:
    """Looks like a slice of a safetensors file; only the blocks that hold the slice are read."""

    def __init__(self, opened: Any, name: str) -> None:
        self.blocks, self.scales = opened.get_slice(name + _BLOCKS), opened.get_slice(name + _SCALES)
        shape = self.blocks.get_shape()
        alike = shape[:-1] == self.scales.get_shape() and shape[-1] * 2 == BLOCK and len(shape) == 4
        if not alike or {self.blocks.get_dtype(), self.scales.get_dtype()} != {"U8"}:
            raise SpecError(name + _BLOCKS, "is not MXFP4 with a scale for 32 numbers", "download it again")
        self.shape = (shape[0], shape[2] * BLOCK, shape[1])

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, slices: Any) -> Tensor:
        experts, inputs, outputs = slices
        first, last, _ = inputs.indices(self.shape[1])
        some = slice(first // BLOCK, -(-last // BLOCK))
        packed = self.blocks[experts, outputs, some]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        exponents = self.scales[experts, outputs, some].int() - 127
        values = torch.ldexp(torch.tensor(_CODES)[codes.int()], exponents[..., None]).to(torch.bfloat16)
        before = first - some.start * BLOCK
        return values.flatten(-2)[..., before : before + last - first].transpose(1, 2)
