"""What a path holds: one of our checkpoints, a Hugging Face folder, files of torch, DeepSpeed or Megatron-LM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shardwise.interop.companions import folder_of_model, has_companions
from shardwise.interop.jobs import model_from
from shardwise.models.huggingface.folder import DTYPES, open_folder
from shardwise.models.huggingface.folder import INDEX as SAFE_INDEX
from shardwise.models.huggingface.folder import SINGLE as SAFE_SINGLE
from shardwise.run.checkpoint.folder import folder_at, kept_companions, newest_at
from shardwise.run.checkpoint.manifest import NAME as MANIFEST
from shardwise.run.checkpoint.manifest import weight_keys
from shardwise.run.storage.place import Place
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import parse_json
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import LazyTensor, full_tensors
from shardwise.training.checkpoint.load import require_intact
from shardwise.training.convert.deepspeed import deepspeed_weights, is_deepspeed
from shardwise.training.convert.distributed import is_distributed, model_tensors
from shardwise.training.convert.megatron import is_megatron, megatron_weights
from shardwise.training.convert.state_dict import Description, described, files_of_folder, named_weights, torch_files
from shardwise.training.convert.weights import Weights, complete

MODEL_KEY = "shardwise.model"  # the metadata entry that describes the model of a file that we write
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_READ = (
    "name a checkpoint or run of ours, a Hugging Face folder, a .safetensors or torch (.pt, .pth, .bin) file, or a "
    "folder of DeepSpeed, Megatron-LM or PyTorch's distributed checkpoint"
)


def open_weights(source: Path, given: str | None = None) -> Weights:
    """The weights at a path, complete and of the right shapes; their values are not read yet.

    ``given`` names the model if the source does not. Raises SpecError for what is damaged or unknown.
    """
    return replace(_opened(source, given), companions=_companions_of(source, given))


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
    model = model_from(given if given is not None else manifest.job.get("model"))
    keys = weight_keys(manifest)
    tensors = {key.partition("/")[2]: tensor for key, tensor in full_tensors(folder, manifest, keys).items()}
    return complete(model, tensors, f"the checkpoint {folder}", manifest.step)


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
        raise SpecError(str(source), problem, "name it: --model") from None
