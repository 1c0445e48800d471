"""Writes weights as one safetensors file, a Hugging Face folder or a checkpoint, which appear once complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from shardwise.interop.companions import keep_companions, require_companions
from shardwise.models.huggingface.tensors import Naming
from shardwise.models.huggingface.writer import stored_tensors, write_folder
from shardwise.run.checkpoint.checkpoint_folder import CheckpointFolder, sync_folder
from shardwise.run.checkpoint.manifest import Manifest
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown
from shardwise.training.checkpoint.full_tensors import read_in_turn, require_space, write_checkpoint
from shardwise.training.checkpoint.shards import Entry, write_shard
from shardwise.training.convert.sources import MODEL_KEY
from shardwise.training.convert.weights import Weights

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
        for file in part.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
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
