"""The manifest of a checkpoint: what was saved, in which files, with a checksum of each and one of itself."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.boxes import Box

TO_RESUME = ("optimizer_steps", "data", "losses")  # required to resume a run


def checked_numbers(found: Any) -> dict[str, Any]:
    """The same numbers; raises ValueError for what no run writes."""
    for name, value in _mapping(found).items():
        if name not in _CHECKS:
            raise ValueError(f"unknown number {name}")
        _CHECKS[name](value)
    return dict(found)


def count(value: Any, least: int = 0) -> int:
    """Raises ValueError for anything but an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError("no count")
    return value


def _amount(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("no number")


def _steps(value: Any) -> None:
    """Those of an optimizer are counted in floating point."""
    _amount(value)
    if not 0 <= value < math.inf:
        raise ValueError("no number of steps")


def _scale(value: Any) -> None:
    for one in _mapping(value).values():
        _amount(one)


def _losses(value: Any) -> None:
    for one in _sequence(value):
        _amount(one)


def _position(value: Any) -> None:
    """As `Position.to_numbers` writes it."""
    if _mapping(value).keys() != {"batch", "left_out", "sequences"}:
        raise ValueError("no position in the data")
    count(value["batch"])
    count(value["sequences"], 1)
    for one in _sequence(value["left_out"]):
        count(one)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no mapping")
    return value


def _sequence(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("no list")
    return value


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "optimizer_steps": _steps,
    "loss_scale": _scale,
    "inner_steps": count,
    "late_sums": count,
    "data": _position,
    "losses": _losses,
}


# -- manifest --------------------------------------------------------------------------------------
#
# The manifest of a checkpoint: what was saved, in which files, with a checksum of each and one of itself.
#
# It is JSON that ends in the SHA-256 checksum of everything before it. That is checked before anything is trusted; then
# types are checked, since a file with a valid checksum may still be wrong.


NAME = "manifest.json"
FORMAT = 1
MOST_BYTES = 2**30
_FILE = re.compile(r"shard-\d{5}\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{64})"}\Z')
_ANOTHER = "take another checkpoint"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class SavedPiece:
    """A box of a whole tensor, as the entry ``entry`` of ``file``."""

    file: str
    entry: str
    box: Box


@dataclass(frozen=True)
class FullTensor:
    """A tensor of the whole model and the pieces that it was saved in."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SavedPiece, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """A file of the checkpoint: its size and SHA-256 checksum."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    step: int
    job: dict[str, Any]
    numbers: dict[str, Any]
    tensors: dict[str, FullTensor]
    files: dict[str, Shard] = field(default_factory=dict)

    def entries(self) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """What each file has to hold: type and shape of every entry."""
        found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in self.files}
        for whole in self.tensors.values():
            for piece in whole.pieces:
                found[piece.file][piece.entry] = (whole.dtype, piece.box.shape)
        return found

    def to_bytes(self) -> bytes:
        """The manifest as the bytes of its file."""
        tensors = {
            key: {
                "shape": list(whole.shape),
                "dtype": whole.dtype,
                "pieces": [[one.file, one.entry, list(one.box.start), list(one.box.shape)] for one in whole.pieces],
            }
            for key, whole in self.tensors.items()
        }
        files = {name: {"bytes": shard.size, "sha256": shard.checksum} for name, shard in self.files.items()}
        document = {"format": FORMAT, "step": self.step, "job": self.job, "numbers": self.numbers, "files": files}
        document["tensors"] = tensors
        text = json.dumps(document).encode()
        return text[:-1] + f', "checksum": "{hashlib.sha256(text).hexdigest()}"}}'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Raises SpecError with what is wrong; no name in it can lead outside the folder."""
    path = folder / NAME
    try:
        if path.is_symlink() or path.stat().st_size > MOST_BYTES:
            raise SpecError(str(path), "is not a regular file of a sensible size", _ANOTHER)
        raw = path.read_bytes()
        document = json.loads(raw)
    except OSError as error:
        raise SpecError(str(path), f"cannot be read ({error.strerror})", _ANOTHER) from None
    except SpecError:
        raise
    except (ValueError, RecursionError):
        raise SpecError(str(path), "is not JSON", _ANOTHER) from None
    _require_seal(raw, path)
    try:
        if document["format"] is True or document["format"] != FORMAT:
            raise SpecError(str(path), f"has format {document['format']!r}", f"this reads format {FORMAT}")
        files = {_file(name): _shard(one) for name, one in document["files"].items()}
        tensors = {key: _whole(one, files) for key, one in document["tensors"].items()}
        numbers = checked_numbers(document["numbers"])
        return Manifest(count(document["step"]), _job(document["job"]), numbers, tensors, files)
    except SpecError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SpecError(str(path), "does not describe a checkpoint", _ANOTHER) from None


def _require_seal(raw: bytes, path: Path) -> None:
    """Every byte is as it was written."""
    seal = _SEAL.search(raw)
    if seal is None:
        raise SpecError(str(path), "is damaged: it does not end in its checksum", _ANOTHER)
    if hashlib.sha256(raw[: seal.start()] + b"}").hexdigest() != seal[1].decode():
        raise SpecError(str(path), "is damaged: its checksum differs", _ANOTHER)


def _file(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError("no name of a shard")
    return name


def _shard(one: Any) -> Shard:
    if not _CHECKSUM.fullmatch(one["sha256"]):
        raise ValueError("no checksum")
    return Shard(count(one["bytes"]), one["sha256"])


def _job(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("no job")
    return found


def _whole(one: Any, files: dict[str, Shard]) -> FullTensor:
    shape = tuple(count(size) for size in one["shape"])
    pieces = []
    for name, entry, start, size in one["pieces"]:
        box = Box(tuple(count(x) for x in start), tuple(count(x) for x in size))
        if name not in files or len(box.start) != len(shape) or len(box.shape) != len(shape):
            raise ValueError("a piece of another tensor")
        if any(a + n > whole for a, n, whole in zip(box.start, box.shape, shape)):
            raise ValueError("a piece beyond the tensor")
        if not isinstance(entry, str):
            raise ValueError("no name of an entry")
        pieces.append(SavedPiece(name, entry, box))
    if one["dtype"] not in ITEM_BYTES:
        raise ValueError("an unknown type")
    if sum(piece.box.elements for piece in pieces) != math.prod(shape) or _overlap([piece.box for piece in pieces]):
        raise ValueError("pieces that are not the whole")
    return FullTensor(shape, one["dtype"], tuple(pieces))


def _overlap(boxes: Sequence[Box]) -> bool:
    ordered = sorted(boxes, key=lambda box: box.start)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.start[:1] >= tuple(first + size for first, size in zip(one.start[:1], one.shape[:1])):
                break  # neither does any after it
            if one.common(other) is not None:
                return True
    return False


# -- contents --------------------------------------------------------------------------------------
#
# What a checkpoint holds, from its manifest alone: no tensor is read.


@dataclass(frozen=True)
class CheckpointTensor:
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
    tensors: tuple[CheckpointTensor, ...]

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
        tensors.append(CheckpointTensor(kind, name, whole.dtype, whole.shape, whole.size, len(whole.pieces)))
    return Contents(
        path=str(path),
        step=manifest.step,
        model=_name_of(manifest.job.get("model")),
        layout=_mapping_or_empty(manifest.job.get("strategy")),
        precision=_mapping_or_empty(manifest.job.get("training")).get("precision"),
        numbers=manifest.numbers,
        file_bytes={name: shard.size for name, shard in sorted(manifest.files.items())},
        tensors=tuple(tensors),
    )


def weight_keys(manifest: Manifest) -> list[str]:
    """The tensors that make the model what it is, without the states of an optimizer."""
    return [key for key in manifest.tensors if key.startswith(("weight/", "buffer/"))]


def _name_of(model: Any) -> str:
    return str(model.get("name", "custom")) if isinstance(model, dict) else str(model or "unknown")


def _mapping_or_empty(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
