"""A Hugging Face folder, opened: its model, and its tensors read one at a time or a slice at a time.

Nothing is read before it is asked for: safetensors maps the files, and a slice touches only its own bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.interop import model_from_hf_config
from shardwise.models.huggingface.layouts import LAYOUTS, Layout
from shardwise.models.huggingface.places import Place, Slices, places_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Folder:
    """``model`` is what its config.json describes, without the modules for multi-token prediction."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        described = model_from_hf_config(self.path)
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        self.model: Model = replace(described, mtp_layers=0)
        self.layout = _layout_of(self.config)
        self.files = _files_of(self.path)
        self._opened: dict[str, Any] = {}
        self._check_names()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a `Decoder` of this model, by its name there, one after the other."""
        for name in self.places:
            yield name, self.slice(name, ())

    def slice(self, name: str, slices: Sequence[slice]) -> Tensor:
        """A slice of one tensor, by our name and in our layout; dimensions not named are taken whole."""
        place = self._place(name)
        given = (*slices, *(slice(None) for _ in place.shape[len(slices) :]))
        if not place.stacked:
            return self._read(place, place.names[0], given)
        return torch.stack([self._read(place, theirs, given[1:]) for theirs in place.names[given[0]]])

    @cached_property
    def places(self) -> dict[str, Place]:
        return places_of(self.model, self.layout, interleaved=self.config.get("rope_interleave") is not False)

    def _place(self, name: str) -> Place:
        if name == "head.weight" and self.model.tied_embeddings:
            name = "embedding.weight"
        if name not in self.places:
            raise SpecError(name, f"is no tensor of {self.model.name}", "name it as a Decoder of that model does")
        return self.places[name]

    def _read(self, place: Place, theirs: str, slices: Slices) -> Tensor:
        stored = self._file_of(theirs).get_slice(self._stored_name(theirs))
        shape = tuple(stored.get_shape())
        if shape != place.stored_shape:
            problem = f"is {list(shape)} in {self.path}, but config.json makes it {list(place.stored_shape)}"
            raise SpecError(theirs, problem, "use the config.json that belongs to these weights")
        tensor: Tensor = stored[place.stored_slices(slices)]
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            raise SpecError(theirs, f"is stored as {tensor.dtype}", "convert the checkpoint to bf16 first")
        return place.from_stored(tensor, slices)

    # -- names -----------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        """Raises SpecError for the first tensor that is missing or that no decoder of this model has."""
        needed = {self._stored_name(theirs): theirs for place in self.places.values() for theirs in place.names}
        for stored, theirs in needed.items():
            if stored not in self.files:
                remedy = "complete the download, or use the config.json that belongs to these weights"
                raise SpecError(theirs, f"is missing in {self.path}", remedy)
        for stored in sorted(self.files.keys() - needed.keys()):
            if "weight_scale" in stored:
                raise SpecError(stored, "is the scale of quantised weights", "convert the checkpoint to bf16 first")
            if not self._may_be_left(stored):
                problem = f"in {self.path} belongs to no part of {self.model.name} as config.json describes it"
                raise SpecError(stored, problem, "use the config.json that belongs to these weights")

    def _may_be_left(self, stored: str) -> bool:
        """Whether a tensor is none of ours: a constant, a tied head, or of a module for multi-token prediction."""
        if stored.endswith(self.layout.ignored):
            return True
        if stored == "lm_head.weight":
            return self.model.tied_embeddings
        before = self.layout.layer.split("{}")[0]
        index = stored.removeprefix(before).split(".")[0] if stored.startswith(before) else ""
        return index.isdigit() and int(index) >= self.model.layers and bool(self._prediction_modules())

    def _prediction_modules(self) -> Any:
        return self.config.get("num_nextn_predict_layers", 0)

    def _stored_name(self, theirs: str) -> str:
        """The published GPT-2 leaves out the prefix that the library writes."""
        bare = theirs.removeprefix(self.layout.prefix)
        return bare if theirs not in self.files and bare in self.files else theirs

    def _file_of(self, theirs: str) -> Any:
        name = self.files[self._stored_name(theirs)]
        if name not in self._opened:
            self._opened[name] = _open(self.path / name)
        return self._opened[name]


def _layout_of(config: dict[str, Any]) -> Layout:
    nested = config.get("text_config")
    model_type = config.get("model_type")
    if model_type in LAYOUTS:
        return LAYOUTS[model_type]
    what = "a part of a larger model" if isinstance(nested, dict) else shown(model_type)
    raise SpecError("model_type", f"the weights of {what} are not read", f"use one of {', '.join(LAYOUTS)}")


def _files_of(path: Path) -> dict[str, str]:
    """The file of every stored tensor."""
    index = path / INDEX
    if index.exists():
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SpecError(INDEX, f"in {path} is not an index of weights", "download it again") from None
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
    """The folder, opened once for many reads as long as it does not change."""
    path = Path(path).resolve()
    names = ("config.json", INDEX, SINGLE)
    return _opened(path, tuple((path / name).stat().st_mtime_ns for name in names if (path / name).exists()))


def read_model(folder: Path | str) -> Model:
    """The model that a folder holds."""
    return open_folder(folder).model


def read_tensors(folder: Path | str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a `Decoder` of the folder's model, by its name there, one in memory at a time.

    Raises SpecError, before the first, when a tensor is missing or one too many.
    """
    return open_folder(folder).tensors()


def read_slice(folder: Path | str, name: str, slices: Sequence[slice]) -> Tensor:
    """A slice of one tensor, by our name and in our layout; dimensions not named are taken whole."""
    return open_folder(folder).slice(name, slices)
