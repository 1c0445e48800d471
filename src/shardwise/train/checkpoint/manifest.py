"""The manifest of a checkpoint: what was saved, in which files, with a checksum of each. JSON, checked when read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError
from shardwise.train.checkpoint.boxes import Box

NAME = "manifest.json"
FORMAT = 1
MOST_BYTES = 2**30
_FILE = re.compile(r"shard-\d{5}\.safetensors")
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, as the entry ``entry`` of ``file``."""

    file: str
    entry: str
    box: Box


@dataclass(frozen=True)
class Whole:
    """A tensor of the whole model and the pieces that it was saved in."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

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
    tensors: dict[str, Whole]
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
        return json.dumps({**document, "checksum": _checksum(document)}).encode()


def read_manifest(folder: Path) -> Manifest:
    """Raises SpecError that says what is wrong; no name in it can lead out of the folder."""
    path = folder / NAME
    try:
        if path.is_symlink() or path.stat().st_size > MOST_BYTES:
            raise SpecError(str(path), "is no plain file of a sensible size", "take another checkpoint")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(str(path), f"cannot be read ({error.strerror})", "take another checkpoint") from None
    except (ValueError, RecursionError):
        raise SpecError(str(path), "is no JSON", "take another checkpoint") from None
    try:
        if document["format"] != FORMAT:
            raise SpecError(str(path), f"has format {document['format']!r}", f"this reads format {FORMAT}")
        files = {
            _file(name): Shard(_count(one["bytes"]), str(one["sha256"])) for name, one in document["files"].items()
        }
        tensors = {str(key): _whole(one, files) for key, one in document["tensors"].items()}
        if document.pop("checksum") != _checksum(document):
            raise SpecError(str(path), "is damaged: its checksum differs", "take another checkpoint")
        return Manifest(_count(document["step"]), dict(document["job"]), dict(document["numbers"]), tensors, files)
    except SpecError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SpecError(str(path), "does not describe a checkpoint", "take another checkpoint") from None


def _checksum(document: dict[str, Any]) -> str:
    """Of all else in the manifest, as JSON is written here: a number that was changed on disk is no longer it."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _file(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError("no name of a shard")
    return name


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("no count")
    return value


def _whole(one: Any, files: dict[str, Shard]) -> Whole:
    shape = tuple(_count(size) for size in one["shape"])
    pieces = []
    for name, entry, start, size in one["pieces"]:
        box = Box(tuple(_count(x) for x in start), tuple(_count(x) for x in size))
        if name not in files or len(box.start) != len(shape) or len(box.shape) != len(shape):
            raise ValueError("a piece of another tensor")
        if any(a + n > whole for a, n, whole in zip(box.start, box.shape, shape)):
            raise ValueError("a piece beyond the tensor")
        pieces.append(Piece(name, str(entry), box))
    if one["dtype"] not in ITEM_BYTES:
        raise ValueError("an unknown type")
    return Whole(shape, one["dtype"], tuple(pieces))
