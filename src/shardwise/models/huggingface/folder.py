"""A Hugging Face folder, opened: its model, and its tensors read one at a time or a slice at a time.

Nothing is read before it is asked for: safetensors maps the files, and a slice touches only its own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.interop.huggingface import model_from_hf_config, read_config
from shardwise.models.huggingface.tensors import Naming, Slices, TensorPlace
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import IN_BULK, read_json
from shardwise.spec.model import Model

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_INDEX_CHARACTERS = 64 * 2**20
_TO_BF16 = "convert the checkpoint to bf16 first"


class Folder:
    """``model`` is what its config.json describes, with multi-token-prediction modules if they are stored."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        described = model_from_hf_config(self.path)
        config = read_config(self.path)
        self.files = _files_of(self.path)
        self.naming = Naming.of_config(config, described, self.files)
        self.model: Model = self.naming.model
        self._opened: dict[str, Any] = {}
        self.naming.check(self.files, str(self.path))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a `Decoder` of this model, by its name there, one in memory at a time."""
        for name in self.naming.places:
            yield name, self.slice(name, ())

    def slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        """A slice of one tensor, by our name and in our layout; dimensions not named are taken whole."""
        place = self._place(name)
        given = (*slices, *(slice(None) for _ in place.shape[len(slices) :]))
        if not place.stacked:
            return self._read(place, place.names[0], given)
        return torch.stack([self._read(place, theirs, given[1:]) for theirs in place.names[given[0]]])

    def dtype(self, name: str) -> torch.dtype:
        """The format in which a tensor is stored, after a check of its shape; nothing of it is read."""
        place = self._place(name)
        stored = {self._stored(place, theirs).get_dtype() for theirs in place.names}
        if len(stored) > 1 or not stored <= DTYPES.keys():
            raise SpecError(name, f"is stored as {', '.join(sorted(stored))}", _TO_BF16)
        return DTYPES[stored.pop()]

    def require(self, name: str) -> None:
        """Raises SpecError if a tensor could not be read; nothing of it is."""
        place = self._place(name)
        for theirs in place.names:
            if (stored := self._stored(place, theirs).get_dtype()) not in DTYPES:
                raise SpecError(theirs, f"is stored as {stored}", _TO_BF16)

    def _place(self, name: str) -> TensorPlace:
        if name == "head.weight" and self.model.tied_embeddings:
            name = "embedding.weight"
        if name not in self.naming.places:
            raise SpecError(name, f"is not a tensor of {self.model.name}", "name it as a Decoder of that model does")
        return self.naming.places[name]

    def _read(self, place: TensorPlace, theirs: str, slices: Slices) -> Tensor:
        tensor: Tensor = self._stored(place, theirs)[place.stored_slices(slices)]
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            raise SpecError(theirs, f"is stored as {tensor.dtype}", _TO_BF16)
        return place.from_stored(tensor, slices)

    def _stored(self, place: TensorPlace, theirs: str) -> Any:
        """A stored tensor that can be sliced; raises SpecError if its shape is wrong."""
        name = self.naming.stored_name(theirs, self.files)
        file = self.files[name]
        if file not in self._opened:
            self._opened[file] = _open(self.path / file)
        try:
            stored = self._opened[file].get_slice(name)
        except SafetensorError:
            raise SpecError(theirs, f"is not in {self.path / file}", "download it again") from None
        shape = tuple(stored.get_shape())
        if shape != place.stored_shape:
            problem = f"is {list(shape)} in {self.path}, but config.json makes it {list(place.stored_shape)}"
            raise SpecError(theirs, problem, "use the config.json that belongs to these weights")
        return stored


def read_index(path: Path) -> Any:
    """The content of an index of weights: a line for every tensor."""
    return read_json(path, "index of weights", MOST_INDEX_CHARACTERS, IN_BULK)


def _files_of(path: Path) -> dict[str, str]:
    """The file of every stored tensor."""
    index = path / INDEX
    if index.exists():
        try:
            files = read_index(index)["weight_map"]
            file_of = {str(name): str(file) for name, file in files.items()}
        except (KeyError, TypeError, AttributeError):
            raise SpecError(INDEX, f"in {path} is not an index of weights", "download it again") from None
        for file in file_of.values():
            if Path(file).name != file:
                raise SpecError(INDEX, f"in {path} names {shown(file)}, which leads out of it", "do not trust it")
        return file_of
    if not (path / SINGLE).exists():
        raise SpecError(SINGLE, f"is not in {path}, nor is {INDEX}", "convert the weights to safetensors")
    return dict.fromkeys(_open(path / SINGLE).keys(), SINGLE)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise SpecError(path.name, f"is not in {path.parent}", "complete the download") from None
    except (SafetensorError, OSError) as error:
        raise SpecError(path.name, f"cannot be read: {shown(str(error))}", "download it again") from None


@lru_cache(maxsize=2)
def _opened(path: Path, written: tuple[int, ...]) -> Folder:
    return Folder(path)


def open_folder(path: Path | str) -> Folder:
    """The folder, opened once for many reads as long as it does not change.

    Raises SpecError when a tensor is missing or one too many.
    """
    path = Path(path).resolve()
    names = ("config.json", INDEX, SINGLE)
    return _opened(path, tuple((path / name).stat().st_mtime_ns for name in names if (path / name).exists()))
