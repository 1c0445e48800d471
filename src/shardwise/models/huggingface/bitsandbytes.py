"""Weights that bitsandbytes has quantised to NF4, as `transformers` saves them: read as the numbers they stand for.

Beside ``X.weight`` (two codes in a byte) lie ``.absmax`` (a scale for each block), ``.quant_map`` (what codes mean) and
``.quant_state.bitsandbytes__nf4`` (JSON); with double quantisation scales are codes too: ``.nested_quant_map`` times
``.nested_absmax``, around an offset (bitsandbytes, functional.py: `QuantState.as_dict`).
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json

STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def is_part(name: str, names: Collection[str]) -> bool:
    """Whether a stored tensor only says how another one is to be read."""
    weight = name.partition(STATE)[0]
    for part in _PARTS:
        weight = weight.removesuffix(part)
    return weight != name and state_of(weight, names) is not None


def state_of(weight: str, names: Collection[str]) -> str | None:
    """The name of the tensor that describes a quantised weight; None for a plain one."""
    return next((name for kind in ("nf4", "fp4") if (name := f"{weight}{STATE}{kind}") in names), None)


class QuantisedTensor:
    """Looks like a slice of a safetensors file; rows are made of their own blocks where these end with them."""

    def __init__(self, opened: Any, name: str, state: str) -> None:
        self.opened, self.name = opened, name
        try:
            about = parse_json(bytes(opened.get_tensor(state).tolist()), state)
            self.shape = tuple(int(size) for size in about["shape"])
            self.block, self.offset = int(about["blocksize"]), float(about.get("nested_offset", 0.0))
            self.nested_block = int(about.get("nested_blocksize", 0))
        except (ValueError, KeyError, TypeError):
            raise SpecError(state, "does not describe a quantised weight", "download it again") from None
        stored = opened.get_slice(name)
        if stored.get_dtype() != "U8" or prod(stored.get_shape()) * 2 != prod(self.shape) or self.block <= 0:
            raise SpecError(name, "is not a weight of two codes in a byte", "quantise it with quant_storage uint8")

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, slices: Any) -> Tensor:
        rows, *others = slices if isinstance(slices, tuple) else (slices,)
        width = prod(self.shape[1:])
        first, last, _ = rows.indices(self.shape[0])
        if width % self.block:  # blocks run on from row to row
            return self._values(0, prod(self.shape)).view(self.shape)[slices]
        some = self._values(first * width, last * width)
        return some.view(last - first, *self.shape[1:])[(slice(None), *others)]

    def _values(self, first: int, last: int) -> Tensor:
        packed = self.opened.get_slice(self.name)[first // 2 : -(-last // 2)].flatten()
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: last - first]
        blocks = slice(first // self.block, -(-last // self.block))
        scales = self._scales(blocks)
        values: Tensor = self.opened.get_tensor(f"{self.name}.quant_map")[codes.int()]
        return values * scales.repeat_interleave(self.block)[: len(values)]

    def _scales(self, blocks: slice) -> Tensor:
        scales: Tensor = self.opened.get_slice(f"{self.name}.absmax")[blocks]
        if not self.nested_block:
            return scales
        numbers = torch.arange(blocks.start, blocks.start + len(scales)) // self.nested_block
        code, nested = (self.opened.get_tensor(f"{self.name}.nested_{part}") for part in ("quant_map", "absmax"))
        return code[scales.int()] * nested[numbers] + self.offset  # type: ignore[no-any-return]
