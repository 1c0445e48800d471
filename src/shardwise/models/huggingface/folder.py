"""A Hugging Face folder, opened: its model, and its tensors, read one at a time or a slice at a time; and written.

Nothing is read before it is asked for: safetensors maps the files, and a slice touches only its own bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwise.interop.companions import CONFIG, copy_companions
from shardwise.interop.huggingface import model_from_hf_config, read_config
from shardwise.models.huggingface.bitsandbytes import QuantisedTensor, is_part, state_of
from shardwise.models.huggingface.mxfp4 import MXFP4Tensor, is_in_blocks, with_whole_names
from shardwise.models.huggingface.tensors import Naming, Slices, TensorPlace
from shardwise.models.layer import is_behind_layers
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
        files = _files_of(self.path)
        files = with_whole_names(files)
        self.states = {name: state for name in files if (state := state_of(name, files)) is not None}
        self.files = {name: file for name, file in files.items() if not is_part(name, files)}
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
            opened = self._opened[file]
            if name in self.states:
                stored: Any = QuantisedTensor(opened, name, self.states[name])
            else:
                stored = MXFP4Tensor(opened, name) if is_in_blocks(name, opened) else opened.get_slice(name)
        except SafetensorError:
            raise SpecError(theirs, f"is not in {self.path / file}", "download it again") from None
        shape = tuple(stored.get_shape())
        if shape != place.stored_shape:
            problem = f"is {list(shape)} in {self.path}, but config.json makes it {list(place.stored_shape)}"
            raise SpecError(theirs, problem, "use the config.json that belongs to these weights")
        return stored


def files_of_index(index: Path) -> dict[str, str]:
    """The file of every tensor that an index of weights lists, a line for each."""
    try:
        files = read_json(index, "index of weights", MOST_INDEX_CHARACTERS, IN_BULK)["weight_map"]
        file_of = {str(name): str(file) for name, file in files.items()}
    except (KeyError, TypeError, AttributeError):
        raise SpecError(index.name, f"in {index.parent} is not an index of weights", "download it again") from None
    for file in file_of.values():
        if Path(file).name != file:
            raise SpecError(
                index.name, f"in {index.parent} names {shown(file)}, which leads out of it", "do not trust it"
            )
    return file_of


def _files_of(path: Path) -> dict[str, str]:
    """The file of every stored tensor."""
    if (path / INDEX).exists():
        return files_of_index(path / INDEX)
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


# -- Writing a folder, a file of bounded size at a time --------------------------------------------


MAX_SHARD_BYTES = 5 * 10**9
_TYPE_KEYS = ("dtype", "torch_dtype")  # since transformers 5, and before


def write_folder(
    folder: Path | str,
    model: Model,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source: Path | None = None,
) -> None:
    """Writes ``tensors``, named as in a `Decoder` of ``model``, in the layout and with the names of a family.

    ``source`` is the folder that the weights came from, or one with its small files: it determines the family, what is
    still true of its config.json is kept, and its other files are copied (`interop.companions`).

    No more than one file's tensors are held at a time. The index is written last, so a folder left unfinished is
    never taken for a whole one. Raises SpecError when a tensor is missing, unknown, twice there or of another
    shape, when no family can express the model, and when the folder already holds weights.
    """
    folder = Path(folder)
    naming = Naming.of_model(model, source)
    folder.mkdir(parents=True, exist_ok=True)
    if any((folder / name).exists() for name in (INDEX, SINGLE)):
        raise SpecError(str(folder), "already holds weights", "name a new folder")
    if source is not None:
        copy_companions(source, folder, leave_out=(CONFIG,))
    files = _Files(folder, max_shard_bytes)
    for name, tensor in stored_tensors(naming, tensors):
        files.add(name, tensor)
    index = files.finish()
    stored_as = [name for name in _TYPE_KEYS if name in naming.config] or _TYPE_KEYS
    config = {"architectures": [naming.layout.architecture], **naming.config, **dict.fromkeys(stored_as, files.dtype)}
    _write_json(folder / CONFIG, config)
    _write_json(folder / INDEX, index)


def stored_tensors(naming: Naming, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model as its family stores them; parts of a fused tensor wait until all are there.

    Prediction modules are left out if the family has no names for them.
    """
    model, places = naming.model, naming.places
    waiting: dict[str, list[tuple[TensorPlace, Tensor]]] = {}
    left = dict(places)
    for name, tensor in tensors:
        if name == "head.weight" and model.tied_embeddings:
            continue
        if model.mtp_layers == 0 and is_behind_layers(name, model):
            continue
        yield from ((copy, tensor.detach().clone()) for copy in naming.copies(name))
        place = _checked(name, tensor, left, places)
        for theirs, stored in place.to_stored(tensor.detach()):
            if place.whole is None:
                yield theirs, stored
                continue
            parts = waiting.setdefault(theirs, [])
            parts.append((place, stored))
            if sum(part.shape[place.outputs] for _, part in parts) == place.whole:
                whole = stored.new_empty(place.stored_shape)
                for part_place, part in waiting.pop(theirs):
                    part_place.put(part, whole)
                yield theirs, whole
    if left:
        name = next(iter(left))
        raise SpecError(name, f"of {model.name} was not given", "write every tensor of the model")
    for index in range(model.layers):
        for constant, value in naming.layout.constants.items():
            yield naming.layout.layer.format(index) + constant, torch.tensor(value, dtype=tensor.dtype)


def _checked(name: str, tensor: Tensor, left: dict[str, TensorPlace], places: dict[str, TensorPlace]) -> TensorPlace:
    if name not in places:
        raise SpecError(name, "is not a tensor of this model", "name tensors as a Decoder of the model does")
    if name not in left:
        raise SpecError(name, "was given twice", "write every tensor once")
    if tuple(tensor.shape) != places[name].shape:
        problem = f"is {list(tensor.shape)}, but the model makes it {list(places[name].shape)}"
        raise SpecError(name, problem, "give whole tensors of this model")
    return left.pop(name)


class _Files:
    """Collects tensors up to a size and writes them; files get their names, which count them, at the end."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = self.total_bytes = 0
        self.written: list[list[str]] = []
        self.dtype = "float32"

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.held and self.held_bytes + size > self.max_bytes:
            self._flush()
        if not self.held and not self.written:
            self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.held[name] = tensor.to("cpu").contiguous()
        self.held_bytes += size
        self.total_bytes += size

    def finish(self) -> dict[str, Any]:
        """Writes what is held, gives the files their names, and returns their index."""
        self._flush()
        files = {}
        for number, names in enumerate(self.written, 1):
            file = f"model-{number:05}-of-{len(self.written):05}.safetensors"
            self._partial(number).rename(self.folder / file)
            files.update(dict.fromkeys(names, file))
        return {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(files.items()))}

    def _flush(self) -> None:
        if self.held:
            save_file(self.held, self._partial(len(self.written) + 1), metadata={"format": "pt"})
            self.written.append(list(self.held))
            self.held, self.held_bytes = {}, 0

    def _partial(self, number: int) -> Path:
        return self.folder / f"model-{number:05}.partial"


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
