"""Weights in a state dict: found in what a file holds, stripped of wrappers' prefixes, and given our names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.interop.huggingface import read_config
from shardwise.interop.jobs import model_from
from shardwise.models.huggingface.folder import read_index
from shardwise.models.huggingface.tensors import Naming
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import LazyTensor
from shardwise.training.convert.distributed import without_prefixes
from shardwise.training.convert.torch_file import read_torch_file
from shardwise.training.convert.weights import Weights, complete, from_family, lazily

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
        raise SpecError("--model", "is missing", remedy)
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
    try:
        names = sorted({str(file) for file in read_index(folder / INDEX)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError):
        raise SpecError(str(folder / INDEX), "is not an index of weights", "download it again") from None
    for name in names:
        if Path(name).name != name:
            raise SpecError(str(folder / INDEX), f"names {shown(name)}, which is outside the folder", "do not trust it")
    return [folder / name for name in names]


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
        raise SpecError(name, problem, "name the right --model")

    def read() -> Tensor:
        pairs = torch.unflatten(tensor.read(), 0, (-1, model.head_size // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    return LazyTensor(tensor.shape, tensor.dtype, read)
