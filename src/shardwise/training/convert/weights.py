"""The weights of a model by the names of a `Decoder`, each read on demand: of state dicts, and of PyTorch's folders."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.interop.huggingface import read_config
from shardwise.interop.jobs import model_from
from shardwise.models import Decoder
from shardwise.models.huggingface.folder import files_of_index
from shardwise.models.huggingface.tensors import Naming, TensorPlace
from shardwise.models.layer import is_of_prediction
from shardwise.run.checkpoint.manifest import Box, fill
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import LazyTensor
from shardwise.training.convert.torch_file import fields_of, read_pickle, read_torch_bytes, read_torch_file

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OTHER_MODEL = "name the model that was trained (⟨model⟩)"


@dataclass(frozen=True)
class Weights:
    """All tensors of a model, wherever they come from."""

    model: Model
    tensors: dict[str, LazyTensor]
    buffers: frozenset[str]  # names of those tensors that are not parameters: they balance experts
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


# -- folders of PyTorch's distributed checkpoint, read without unpickling anything that could run code ---
# ``.metadata`` lists the shape and type of every tensor and the boxes that it was saved in; each box lies in one of the
# ``.distcp`` files as ``torch.save`` wrote it. TorchTitan saves this way, and Megatron-LM with ``--ckpt-format
# torch_dist``.

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


# -- state dicts -------------------------------------------------------------------------------------

INDEX = "pytorch_model.bin.index.json"
_WITHIN = ("model", "state_dict", "module", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
_MOST_NESTED = 4
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_ENDS = {"tok_embeddings.weight": "embedding.weight", "norm.weight": "norm.weight", "output.weight": "head.weight"}
_INSIDE = {
    "attention_norm": "attention_norm", "ffn_norm": "mlp_norm", "attention.wq": "attention.query",
    "attention.wk": "attention.key", "attention.wv": "attention.value", "attention.wo": "attention.output",
    "feed_forward.w1": "mlp.gate", "feed_forward.w2": "mlp.down", "feed_forward.w3": "mlp.up",
}  # fmt: skip
_CONSTANTS = ("rope.freqs", "freqs_cis")


@dataclass(frozen=True)
class Description:
    """The model that weights belong to; ``config`` is the content of its config.json, if there is one."""

    model: Model
    config: Mapping[str, Any] | None = None


def described(given: str | None, beside: Path) -> Description | None:
    """The model that the user named, or that a config.json beside the weights describes; None if there is neither."""
    path = Path(given) if given is not None else beside
    path = path / "config.json" if path.is_dir() else path
    if path.suffix.lower() == ".json" and path.is_file():
        return Description(model_from(str(path.absolute())), read_config(path))
    return None if given is None else Description(model_from(given))


def named_weights(stored: Mapping[str, LazyTensor], about: Description | None, origin: str, step: int = 0) -> Weights:
    """Weights from tensors under our names, those of a Hugging Face family, or Meta's for Llama."""
    if about is None:
        remedy = f"name one, or a config.json: {origin} does not name the model of its tensors"
        raise SpecError("⟨model⟩", "is missing", remedy)
    stored = without_prefixes(stored, _WRAPPERS)  # of DDP, torch.compile or an engine
    if "embedding.weight" in stored:
        return complete(about.model, stored, origin, step)
    if "tok_embeddings.weight" in stored:
        return _from_meta(about.model, stored, origin, step)
    config = Naming.of_model(about.model).config if about.config is None else about.config
    return from_family(Naming.of_config(config, about.model, stored.keys()), stored, origin, step)


def torch_files(paths: Sequence[Path]) -> dict[str, LazyTensor]:
    """The tensors of state dicts in files of ``torch.save``; their numbers stay on disk."""
    tensors: dict[str, LazyTensor] = {}
    for path in paths:
        tensors |= tensors_in(read_torch_file(path), str(path))
    return tensors


def tensors_in(content: Any, where: str) -> dict[str, LazyTensor]:
    """The state dict in what a file holds; raises SpecError if there is none."""
    for _ in range(_MOST_NESTED):
        if not isinstance(content, dict):
            break
        tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
        inner = next((content[key] for key in _WITHIN if isinstance(content.get(key), dict)), None)
        if inner is None and tensors:
            return {key: lazily(tensor) for key, tensor in tensors.items()}
        content = inner
    raise SpecError(where, "holds no state dict", f"it should have names of tensors, or have them in {_WITHIN[0]!r}")


def files_of_folder(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder without safetensors; empty if there are none."""
    if not (folder / INDEX).is_file():
        return [folder / "pytorch_model.bin"] if (folder / "pytorch_model.bin").is_file() else []
    return [folder / name for name in sorted(set(files_of_index(folder / INDEX).values()))]


def _from_meta(model: Model, stored: Mapping[str, LazyTensor], origin: str, step: int = 0) -> Weights:
    """Weights under Meta's names (``consolidated.00.pth``, TorchTitan), with query and key rows in our rope's order."""
    tensors = {}
    for name, tensor in stored.items():
        if name in _CONSTANTS:
            continue
        match = _LAYER.fullmatch(name)
        inner = _INSIDE.get(match[2]) if match else None
        if name not in _ENDS and inner is None:
            problem = f"in {origin} is not part of a Llama in Meta's naming"
            raise SpecError(name, problem, "convert it with its own tools")
        ours = _ENDS[name] if match is None else f"layers.{match[1]}.{inner}.weight"
        tensors[ours] = _reordered(tensor, model, name) if inner in ("attention.query", "attention.key") else tensor
    return complete(model, tensors, origin, step)


def _reordered(tensor: LazyTensor, model: Model, name: str) -> LazyTensor:
    """The rows 0, 2, 4, ... of each head, then 1, 3, 5, ...: Meta rotates neighbouring rows, we rotate halves."""
    if tensor.shape[0] % model.head_size or model.head_size % 2:
        problem = f"has {tensor.shape[0]} rows, not a whole number of heads of {model.head_size}"
        raise SpecError(name, problem, "name the right ⟨model⟩")

    def read() -> Tensor:
        pairs = torch.unflatten(tensor.read(), 0, (-1, model.head_size // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    return LazyTensor(tensor.shape, tensor.dtype, read)
