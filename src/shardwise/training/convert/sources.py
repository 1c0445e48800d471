"""Weights at a path, whichever tool wrote them: what it holds, and how they are written for another tool."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.interop.companions import folder_of_model, has_companions, keep_companions, require_companions
from shardwise.interop.jobs import model_from
from shardwise.models.huggingface.adapters import is_adapter
from shardwise.models.huggingface.folder import DTYPES, open_folder, stored_tensors, write_folder
from shardwise.models.huggingface.folder import INDEX as SAFE_INDEX
from shardwise.models.huggingface.folder import SINGLE as SAFE_SINGLE
from shardwise.models.huggingface.tensors import Naming
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder, sync_folder
from shardwise.run.checkpoint.folder import folder_at, kept_companions, newest_at
from shardwise.run.checkpoint.manifest import BASE, Manifest, weight_keys
from shardwise.run.checkpoint.manifest import NAME as MANIFEST
from shardwise.run.storage.place import Place
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_json
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import (
    LazyTensor,
    full_tensors,
    read_in_turn,
    require_space,
    write_checkpoint,
)
from shardwise.training.checkpoint.load import require_intact
from shardwise.training.checkpoint.shards import Entry, write_shard
from shardwise.training.convert.adapters import (
    is_adapter_checkpoint,
    opened_adapter,
    require_its_base,
    saved_adapter,
    with_adapter,
    write_peft,
)
from shardwise.training.convert.deepspeed import deepspeed_weights, is_deepspeed
from shardwise.training.convert.megatron import is_megatron, megatron_weights
from shardwise.training.convert.weights import (
    Description,
    Weights,
    complete,
    described,
    files_of_folder,
    is_distributed,
    model_tensors,
    named_weights,
    torch_files,
)

# -- what a path holds -------------------------------------------------------------------------------

MODEL_KEY = "shardwise.model"  # the metadata entry that describes the model of a file that we write
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_READ = (
    "name a checkpoint or run of ours, a Hugging Face folder, a .safetensors or torch (.pt, .pth, .bin) file, or a "
    "folder of DeepSpeed, Megatron-LM or PyTorch's distributed checkpoint"
)


def open_weights(source: Path, given: str | None = None, adapters: Sequence[Path] = ()) -> Weights:
    """The weights at a path, complete and of the right shapes; their values are not read yet.

    ``given`` names the model if the source does not. ``adapters`` are added in turn: folders of PEFT, or runs of ours.
    Raises SpecError for what is damaged or unknown.
    """
    weights = replace(_opened(source, given), companions=_companions_of(source, given))
    for number, path in enumerate(adapters):
        adapter = opened_adapter(path, weights)
        if number == 0:  # the next may have been trained over this one
            require_its_base(adapter, source, weights, str(path))
        weights = with_adapter(weights, adapter, f"the adapter {path}")
    return weights


def _companions_of(source: Path, given: str | None) -> Path | None:
    """The folder with the config.json that the user names, that is beside the weights, or that a checkpoint keeps."""
    if given is not None:
        return folder_of_model(given)
    if source.is_dir() and _is_ours(source):
        folder = kept_companions(newest_at(source))
    else:
        folder = source if source.is_dir() else source.parent
    return folder if has_companions(folder) else None


def _opened(source: Path, given: str | None) -> Weights:
    if source.is_file():
        return _from_file(source, given)
    if not source.is_dir():
        raise SpecError(str(source), "is not there", _READ)
    if _is_ours(source):
        return _from_checkpoint(newest_at(source), given)
    if is_adapter(source):
        raise SpecError(str(source), "is an adapter, which needs its base", f"name the base, and ⟨adapter={source}⟩")
    if is_deepspeed(source):
        return deepspeed_weights(source, described(given, source))
    if is_megatron(source):
        return megatron_weights(source, None if given is None else model_from(given))
    if is_distributed(source):
        return named_weights(model_tensors(source), described(given, source), f"the distributed checkpoint {source}")
    if (source / "config.json").is_file() and any((source / name).is_file() for name in (SAFE_INDEX, SAFE_SINGLE)):
        return _from_huggingface(source, given)
    if files := files_of_folder(source):
        return named_weights(torch_files(files), described(given, source), f"the folder {source}")
    raise SpecError(str(source), "holds no weights in a known format", _READ)


def _is_ours(source: Path) -> bool:
    return (source / MANIFEST).is_file() or bool(folder_at(source).committed())


def _from_checkpoint(folder: Place, given: str | None) -> Weights:
    manifest = require_intact(folder)
    if BASE in manifest.numbers:
        return _beside_its_base(folder, manifest)
    model = model_from(given if given is not None else manifest.job.get("model"))
    keys = weight_keys(manifest)
    tensors = {key.partition("/")[2]: tensor for key, tensor in full_tensors(folder, manifest, keys).items()}
    return complete(model, tensors, f"the checkpoint {folder}", manifest.step)


def _beside_its_base(folder: Place, manifest: Manifest) -> Weights:
    """The weights that a run froze, from where it started, with what it trained."""
    base = manifest.job.get("run", {}).get("start_from")
    if base is None or not Path(base).exists():
        problem = f"lacks the weights that its run froze, and {base or 'where they came from'} is not there"
        raise SpecError(str(folder), problem, f"name the base, and ⟨adapter={folder}⟩")
    adapter = saved_adapter(folder, manifest)
    return replace(with_adapter(open_weights(Path(base)), adapter, f"the checkpoint {folder}"), step=manifest.step)


def _from_huggingface(source: Path, given: str | None) -> Weights:
    folder = open_folder(source)
    model = folder.model if given is None else model_from(given)

    def lazily(name: str, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor(shape, folder.dtype(name), lambda: folder.slice(name, ()))

    tensors = {name: lazily(name, place.shape) for name, place in folder.naming.places.items()}
    return complete(model, tensors, f"the Hugging Face folder {source}")


def _from_file(source: Path, given: str | None) -> Weights:
    about = described(given, source.parent)
    if source.suffix.lower() in _TORCH:
        return named_weights(torch_files([source]), about, f"the file {source}")
    if source.suffix.lower() != ".safetensors":
        raise SpecError(str(source), f"has the suffix {shown(source.suffix)}, which is not supported", _READ)
    try:
        file: Any = safe_open(str(source), "pt")
        described_model = (file.metadata() or {}).get(MODEL_KEY)
        stored = {name: _of_file(file, name, source) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SpecError(str(source), f"cannot be read ({shown(str(error))})", "get another copy") from None
    if given is None and described_model is not None:
        about = Description(_model_of(described_model, source))
    return named_weights(stored, about, f"the file {source}")


def _of_file(opened: Any, name: str, source: Path) -> LazyTensor:
    part = opened.get_slice(name)
    dtype = part.get_dtype()
    if dtype not in DTYPES:
        raise SpecError(name, f"in {source} is stored as {dtype}", "convert the weights to bf16 first")
    return LazyTensor(tuple(part.get_shape()), DTYPES[dtype], lambda: opened.get_tensor(name))


def _model_of(text: str, source: Path) -> Model:
    try:
        return model_from(parse_json(text, str(source)))
    except ValueError as error:  # SpecError is one
        problem = f"does not say which model it is ({shown(str(error))})"
        raise SpecError(str(source), problem, "name it: ⟨model⟩") from None


# -- writing: files and folders appear once complete -------------------------------------------------

Progress = Callable[[int], None]
SHARD_BYTES = 5 * 10**9


def write_file(weights: Weights, path: Path, progress: Progress, *, family_names: bool = False) -> Path:
    """One safetensors file under our names, or under those of a Hugging Face family."""
    metadata = {"format": "pt"}
    if not family_names:
        metadata[MODEL_KEY] = json.dumps(presets.shorten(weights.model))
    with _new(path, weights.size) as part:
        if family_names:
            naming = Naming.of_model(weights.model, weights.companions)
            # Done on meta tensors first, for the names, types and shapes in the header.
            empty = (
                (n, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
                for n, tensor in weights.tensors.items()
            )
            entries = [Entry(n, tensor.dtype, tuple(tensor.shape)) for n, tensor in stored_tensors(naming, empty)]
            tensors = (tensor.contiguous() for _, tensor in stored_tensors(naming, _in_turn(weights, progress)))
            write_shard(part, entries, tensors, metadata)
        else:
            entries = [Entry(name, tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()]
            write_shard(part, entries, read_in_turn(list(weights.tensors.values()), progress), metadata)
    return path


def write_huggingface(weights: Weights, path: Path, progress: Progress) -> Path:
    """A folder that the transformers library loads: config.json, safetensors, their index, and what came with them."""
    with _new(path, weights.size) as part:
        write_folder(part, weights.model, _in_turn(weights, progress), SHARD_BYTES, weights.companions)
        for file in filter(Path.is_file, part.rglob("*")):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_folder(part)
    return path


def write_as_adapter(source: Path, path: Path) -> Path:
    """What one of our runs trained beside frozen weights, as a folder that `peft` loads."""
    if not is_adapter_checkpoint(source):
        problem = "is not a run or checkpoint of ours beside frozen weights"
        raise SpecError(str(source), problem, "⟨to=adapter⟩ writes what training.adapters trained")
    with _new(path, 0) as part:
        write_peft(source, _companions_of(source, None), part)
        sync_folder(part)
    return path


def write_as_checkpoint(weights: Weights, path: Path, progress: Progress) -> Path:
    """A weights-only checkpoint in the folder ``path``: `run.start_from` takes it in any layout."""
    keyed = {
        f"{'buffer' if name in weights.buffers else 'weight'}/{name}": tensor
        for name, tensor in weights.tensors.items()
    }
    about = Manifest(weights.step, {"model": presets.shorten(weights.model)}, {}, {})
    shards = max(1, min(len(keyed), -(-weights.size // SHARD_BYTES)))
    if weights.companions is not None:
        require_companions(weights.companions, path)
    made = write_checkpoint(CheckpointFolder(path), about, keyed, shards, progress)
    if weights.companions is not None:
        keep_companions(weights.companions, path)
    return path / made.name


def _in_turn(weights: Weights, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    return zip(weights.tensors, read_in_turn(list(weights.tensors.values()), progress))


@contextmanager
def _new(path: Path, size: int) -> Iterator[Path]:
    """A temporary path that is renamed to ``path`` at the end; a failure leaves nothing behind."""
    if path.exists() or path.is_symlink():
        raise SpecError(str(path), "is already there", "name another place")
    require_space(path.parent, size)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        if path.exists():
            raise SpecError(str(path), "was created in the meantime", "name another place")
        part.rename(path)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or shown(str(error))
        raise SpecError(str(path), f"cannot be written ({why})", "free space there") from None
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
