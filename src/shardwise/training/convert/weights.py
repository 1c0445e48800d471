"""The weights of a model, wherever they come from: by the names of a `Decoder`, each read on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.models import Decoder
from shardwise.models.huggingface.tensors import Naming, TensorPlace
from shardwise.models.prediction import is_of_prediction
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import LazyTensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OTHER_MODEL = "name the model that was trained (⟨model⟩)"


@dataclass(frozen=True)
class Weights:
    """All tensors of a model, wherever they come from."""

    model: Model
    tensors: dict[str, LazyTensor]
    buffers: frozenset[str]  # names of those tensors that are no parameters: they balance experts
    origin: str  # where they come from, in words
    step: int = 0  # how long they were trained, if known
    companions: Path | None = None  # folder with the small files of the Hugging Face folder that they once came from

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(tensor.size for tensor in self.tensors.values())

    def as_type(self, name: str | None) -> Weights:
        """With parameters in another type; buffers stay. Without a name all types must be among those we write."""
        wanted = None if name is None else DTYPES[name]
        changed = {
            key: tensor if key in self.buffers and tensor.dtype in DTYPES.values() else _cast(key, tensor, wanted)
            for key, tensor in self.tensors.items()
        }
        return replace(self, tensors=changed)


def complete(model: Model, tensors: Mapping[str, LazyTensor], origin: str, step: int = 0) -> Weights:
    """Weights with exactly the model's tensors, all of the right shape; raises SpecError otherwise.

    Prediction modules are kept if all of their tensors are present; some tools leave them out.
    """
    with torch.device("meta"):
        decoder = Decoder(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder.named_tensors()}
    if any(is_of_prediction(name, model) and name not in tensors for name in shapes):
        tensors = {name: tensor for name, tensor in tensors.items() if not is_of_prediction(name, model)}
        shapes = {name: shape for name, shape in shapes.items() if not is_of_prediction(name, model)}
        model = replace(model, mtp_layers=0)
    tied = {"head.weight"} if model.tied_embeddings else set()
    for name, shape in shapes.items():
        if name not in tensors:
            raise SpecError(name, f"of {model.name} is missing in {origin}", _OTHER_MODEL)
        if tensors[name].shape != shape:
            problem = f"is {list(tensors[name].shape)} in {origin}, but {model.name} makes it {list(shape)}"
            raise SpecError(name, problem, _OTHER_MODEL)
    for name in sorted(tensors.keys() - shapes.keys() - tied):
        raise SpecError(name, f"in {origin} belongs to no part of {model.name}", _OTHER_MODEL)
    buffers = frozenset(name for name, _ in decoder.named_buffers() if name in shapes)
    return Weights(model, {name: tensors[name] for name in shapes}, buffers, origin, step)


def from_family(naming: Naming, stored: Mapping[str, LazyTensor], origin: str, step: int = 0) -> Weights:
    """As `complete`, from tensors with the names and layout of a Hugging Face family."""
    naming.check(stored.keys(), origin)
    tensors = {name: _placed(place, naming, stored, origin) for name, place in naming.places.items()}
    return complete(naming.model, tensors, origin, step)


def lazily(tensor: Tensor) -> LazyTensor:
    """A tensor that exists already: in memory, or in a mapped file."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def _placed(place: TensorPlace, naming: Naming, stored: Mapping[str, LazyTensor], origin: str) -> LazyTensor:
    parts = [stored[naming.stored_name(theirs, stored.keys())] for theirs in place.names]
    for theirs, part in zip(place.names, parts):
        if part.shape != place.stored_shape:
            problem = f"is {list(part.shape)} in {origin}, but {naming.model.name} makes it {list(place.stored_shape)}"
            raise SpecError(theirs, problem, _OTHER_MODEL)
    whole = tuple(slice(None) for _ in (place.shape[1:] if place.stacked else place.shape))

    def read() -> Tensor:
        ours = [place.from_stored(part.read()[place.stored_slices(whole)], whole) for part in parts]
        return torch.stack(ours) if place.stacked else ours[0]

    return LazyTensor(place.shape, parts[0].dtype, read)


def _cast(name: str, tensor: LazyTensor, wanted: torch.dtype | None) -> LazyTensor:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
        raise SpecError(name, f"is stored as {tensor.dtype}", "convert the weights to bf16 first")
    if wanted is None and tensor.dtype not in DTYPES.values():
        raise SpecError(name, f"is stored as {tensor.dtype}", f"choose a type: ⟨dtype⟩ {', '.join(DTYPES)}")
    if wanted is None or wanted == tensor.dtype:
        return tensor

    def cast() -> Tensor:
        before = tensor.read()
        after = before.to(wanted)
        if wanted == torch.float16 and bool(after.isinf().any()) and not bool(before.isinf().any()):
            raise SpecError(name, "holds numbers that are too large for fp16", "use ⟨dtype⟩ bf16 or fp32")
        return after

    return LazyTensor(tensor.shape, wanted, cast)
