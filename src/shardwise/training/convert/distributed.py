"""Folders of PyTorch's distributed checkpoint, read without unpickling anything that could run code.

``.metadata`` lists the shape and type of every tensor and the boxes that it was saved in; each box lies in one of the
``.distcp`` files as ``torch.save`` wrote it. TorchTitan saves this way, and Megatron-LM with ``--ckpt-format
torch_dist``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.run.checkpoint.boxes import Box, fill
from shardwise.spec.errors import SpecError, shown
from shardwise.training.checkpoint.full_tensors import LazyTensor
from shardwise.training.convert.torch_file import fields_of, read_pickle, read_torch_bytes

METADATA = ".metadata"
_PREFIXES = ("app.", "state_dict.", "model.")
_NO_WEIGHTS = re.compile(r"(app\.)?(optimizers?|optim|lr_schedulers?|dataloader|train_state)\.")
_AGAIN = "copy the whole folder again"


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Mapping[Box, LazyTensor]

    def whole(self) -> LazyTensor:
        return self._within(Box((0,) * len(self.shape), self.shape), self.shape)

    def entry(self, number: int) -> LazyTensor:
        """An entry along the first dimension; only boxes that hold part of it are read."""
        rest = self.shape[1:]
        return self._within(Box((number, *(0 for _ in rest)), (1, *rest)), rest)

    def _within(self, wanted: Box, shape: tuple[int, ...]) -> LazyTensor:
        def read() -> Tensor:
            tensor = torch.empty(wanted.shape, dtype=self.dtype)
            for box, stored in self.boxes.items():
                common = box.common(wanted)
                if common is not None:
                    tensor[common.inside(wanted)] = stored.read()[common.inside(box)]
            return tensor.reshape(shape)

        return LazyTensor(shape, self.dtype, read)


def is_distributed(folder: Path) -> bool:
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by their names there; raises SpecError if a part of one is missing."""
    if not (folder / METADATA).is_file():
        raise SpecError(str(folder / METADATA), "is missing", _AGAIN)
    metadata = fields_of(read_pickle(folder / METADATA))
    described, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(described, dict) or not isinstance(storage, dict):
        raise SpecError(str(folder / METADATA), "describes no distributed checkpoint", _AGAIN)
    places = _places(storage)
    tensors = {}
    for name, description in described.items():
        about = fields_of(description)
        if isinstance(name, str) and "chunks" in about:  # others are bytes: numbers, settings, random states
            tensors[name] = _tensor(folder, name, about, places)
    return tensors


def model_tensors(folder: Path) -> dict[str, LazyTensor]:
    """The model's tensors, whatever their prefix, without the states of optimizer and run."""
    stored = stored_tensors(folder)
    held = {
        name: tensor.whole()
        for name, tensor in stored.items()
        if not _NO_WEIGHTS.match(name) and not _counts(name, tensor)
    }
    return without_prefixes(held, _PREFIXES)


def _counts(name: str, tensor: StoredTensor) -> bool:
    """Whether a tensor is a counter of the run (``step``, ``iteration``), not part of a module."""
    return "." not in name and math.prod(tensor.shape) == 1


def without_prefixes(held: Mapping[str, LazyTensor], prefixes: Sequence[str]) -> dict[str, LazyTensor]:
    """The tensors without those prefixes that all names share."""
    names = dict(held)
    while prefix := next(
        (candidate for candidate in prefixes if names and all(name.startswith(candidate) for name in names)), None
    ):
        names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    return names


def _places(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    """``storage_data`` by the tensor's name and the start of the box."""
    places = {}
    for index, where in storage.items():
        about = fields_of(index)
        if isinstance(about.get("fqn"), str):
            places[about["fqn"], tuple(about.get("offset") or ())] = fields_of(where)
    return places


def _tensor(folder: Path, name: str, about: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]]) -> StoredTensor:
    properties = getattr(about.get("properties"), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else fields_of(properties).get("dtype")
    shape = _sizes(about.get("size"), name, folder)
    if not isinstance(dtype, torch.dtype):
        raise SpecError(name, f"in {folder / METADATA} has no known type", _AGAIN)
    chunks = [fields_of(chunk) for chunk in about["chunks"]]
    boxes = [Box(*(_sizes(chunk.get(key), name, folder) for key in ("offsets", "sizes"))) for chunk in chunks]
    stored = {box: _stored_box(folder, name, box, dtype, places.get((name, box.start))) for box in boxes}
    if not fill(shape, boxes):
        raise SpecError(name, f"in {folder / METADATA} is not whole", _AGAIN)
    return StoredTensor(shape, dtype, stored)


def _stored_box(folder: Path, name: str, box: Box, dtype: torch.dtype, place: Mapping[str, Any] | None) -> LazyTensor:
    """A box of a tensor, where ``torch.save`` wrote it."""
    if place is None:
        raise SpecError(name, f"in {folder} has a part that is stored nowhere", _AGAIN)
    if place.get("transform_descriptors"):
        raise SpecError(name, f"in {folder} is compressed or encrypted", "save it without extensions")
    file, offset, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or Path(file).name != file:
        raise SpecError(str(folder / METADATA), f"names {shown(file)}, which is outside the folder", "do not trust it")
    path = folder / file
    if not path.is_file():
        raise SpecError(str(path), "is missing", _AGAIN)
    if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= path.stat().st_size:
        raise SpecError(str(path), f"is too short to hold {name}", _AGAIN)

    def read() -> Tensor:
        with path.open("rb") as opened:
            opened.seek(offset)
            tensor = read_torch_bytes(opened.read(length), path)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != box.shape or tensor.dtype != dtype:
            problem = f"holds at byte {offset:,} another tensor than {METADATA} says"
            raise SpecError(str(path), problem, _AGAIN)
        return tensor

    return LazyTensor(box.shape, dtype, read)


def _sizes(sizes: Any, name: str, folder: Path) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or any(type(size) is not int or size < 0 for size in sizes):
        raise SpecError(name, f"in {folder / METADATA} has an impossible shape", _AGAIN)
    return tuple(sizes)
