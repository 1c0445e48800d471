"""What a checkpoint holds, from its manifest alone: no tensor is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.training.checkpoint.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: ``kind`` is weight, buffer or a state of the optimizer."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    pieces: int


@dataclass(frozen=True)
class Contents:
    """``layout`` is the strategy that the checkpoint was saved under, as its job file had it."""

    path: str
    step: int
    model: str
    layout: dict[str, Any]
    precision: str | None
    numbers: dict[str, Any]
    file_bytes: dict[str, int]
    tensors: tuple[SavedTensor, ...]

    def bytes_of_kinds(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self.tensors:
            found[one.kind] = found.get(one.kind, 0) + one.bytes
        return found


def contents_of(path: Path) -> Contents:
    """Raises SpecError if the manifest is damaged."""
    manifest = read_manifest(path)
    tensors = []
    for key, whole in manifest.tensors.items():
        kind, _, name = key.partition("/")
        tensors.append(SavedTensor(kind, name, whole.dtype, whole.shape, whole.size, len(whole.pieces)))
    return Contents(
        path=str(path),
        step=manifest.step,
        model=_name_of(manifest.job.get("model")),
        layout=_mapping(manifest.job.get("strategy")),
        precision=_mapping(manifest.job.get("training")).get("precision"),
        numbers=manifest.numbers,
        file_bytes={name: shard.size for name, shard in sorted(manifest.files.items())},
        tensors=tuple(tensors),
    )


def weight_keys(manifest: Manifest) -> list[str]:
    """The tensors that make the model what it is, without the states of an optimizer."""
    return [key for key in manifest.tensors if key.startswith(("weight/", "buffer/"))]


def _name_of(model: Any) -> str:
    return str(model.get("name", "custom")) if isinstance(model, dict) else str(model or "unknown")


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
