"""Writing a Hugging Face folder, a file of bounded size at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from shardwise.interop.companions import CONFIG, copy_companions
from shardwise.models.huggingface.folder import INDEX, SINGLE
from shardwise.models.huggingface.tensors import Naming, TensorPlace
from shardwise.models.prediction import is_behind_layers
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model

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
