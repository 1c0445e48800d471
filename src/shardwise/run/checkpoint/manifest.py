"""The manifest of a checkpoint: what was saved in which files, with their checksums.

It is JSON that ends in the SHA-256 checksum of everything before it. The checksum is verified before anything is
trusted, then all types: a file with a valid checksum may still be wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product, starmap
from typing import Any

from shardwise.run.storage.place import Place
from shardwise.run.storage.stores import StoreError
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json

# -- which elements of a full tensor a rank holds: boxes of it, and their offsets in the local tensor ---

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A block of a full tensor: its first element in every dimension, and its size."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        start = tuple(max(a, b) for a, b in zip(self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape)]
        shape = tuple(last - first for first, last in zip(start, stop))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

    def inside(self, outer: Box) -> Index:
        """The slices of this box in a tensor that holds just ``outer``."""
        return tuple(slice(a - b, a - b + size) for a, b, size in zip(self.start, outer.start, self.shape))


@dataclass(frozen=True)
class ContiguousRun:
    """Consecutive elements along one dimension."""

    start: int | None  # place of the first in the full tensor; None for padding
    size: int


@dataclass(frozen=True)
class PlacedBox:
    """A box of the full tensor, and where it lies in the local one."""

    box: Box
    local: Index


def taken(runs: Sequence[ContiguousRun], first: int, last: int) -> list[ContiguousRun]:
    """Elements ``first`` up to ``last`` of runs laid end to end; what lies beyond their end is padding."""
    part, at = [], 0
    for run in runs:
        low, high = max(first, at), min(last, at + run.size)
        if low < high:
            part.append(ContiguousRun(None if run.start is None else run.start + low - at, high - low))
        at += run.size
    if last > at:
        part.append(ContiguousRun(None, last - max(first, at)))
    return part


def placed(dimensions: Sequence[Sequence[ContiguousRun]]) -> list[PlacedBox]:
    """The boxes that the runs along all dimensions form, without padding."""
    return [
        PlacedBox(
            Box(tuple(run.start or 0 for run, _ in chosen), tuple(run.size for run, _ in chosen)),
            tuple(slice(at, at + run.size) for run, at in chosen),
        )
        for chosen in product(*(zip(runs, accumulate((run.size for run in runs), initial=0)) for runs in dimensions))
        if all(run.start is not None for run, _ in chosen)
    ]


def fill(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes cover a tensor of that shape exactly: inside it, without overlaps or gaps."""
    if any(not len(box.start) == len(box.shape) == len(shape) for box in boxes):
        return False
    within = all(a + n <= size for box in boxes for a, n, size in zip(box.start, box.shape, shape))
    return within and sum(box.elements for box in boxes) == math.prod(shape) and not _overlap(boxes)


def _overlap(boxes: Sequence[Box]) -> bool:
    ordered = sorted(boxes, key=lambda box: box.start)
    for number, earlier in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.start[:1] >= tuple(first + size for first, size in zip(earlier.start[:1], earlier.shape[:1])):
                break  # nor does any later one overlap
            if earlier.common(other) is not None:
                return True
    return False


# -- the manifest ------------------------------------------------------------------------------------

NAME = "manifest.json"
FORMAT = 1
MOST_BYTES = 2**30
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BASE = "base"  # the fingerprint of the frozen weights that a checkpoint lacks
TO_RESUME = ("optimizer_steps", "data", "losses")  # required to resume a run
# In a store without rename the files of several saves lie side by side: the second part names the save.
_FILE = re.compile(r"shard-\d{5}(\.[0-9a-f]{8}-\d{1,9})?\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{64})"}\Z')
_ANOTHER = "take another checkpoint"


@dataclass(frozen=True)
class SavedPiece:
    """A box of a full tensor, saved as ``entry`` of ``file``."""

    file: str
    entry: str
    box: Box


@dataclass(frozen=True)
class FullTensor:
    """An unsharded tensor of the model, and the pieces in which it was saved."""

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
        """The type and shape of every entry that each file must hold."""
        entries: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in self.files}
        for full in self.tensors.values():
            for piece in full.pieces:
                entries[piece.file][piece.entry] = (full.dtype, piece.box.shape)
        return entries

    def to_bytes(self) -> bytes:
        tensors = {
            key: {
                "shape": list(full.shape),
                "dtype": full.dtype,
                "pieces": [
                    [piece.file, piece.entry, list(piece.box.start), list(piece.box.shape)] for piece in full.pieces
                ],
            }
            for key, full in self.tensors.items()
        }
        files = {name: {"bytes": shard.size, "sha256": shard.checksum} for name, shard in self.files.items()}
        document = {"format": FORMAT, "step": self.step, "job": self.job, "numbers": self.numbers, "files": files}
        document["tensors"] = tensors
        text = json.dumps(document).encode()
        return text[:-1] + f', "checksum": "{hashlib.sha256(text).hexdigest()}"}}'.encode()


def read_manifest(folder: Place) -> Manifest:
    """Raises SpecError if the manifest is damaged, StoreError if it cannot be read; no file name leaves the folder."""
    path = folder / NAME
    try:
        if path.is_symlink() or path.stat().st_size > MOST_BYTES:
            raise SpecError(str(path), "is not a regular file of a sensible size", _ANOTHER)
        raw = path.read_bytes()
        document = parse_json(raw, str(path), most_values=IN_BULK)
    except StoreError:  # the checkpoint may be intact: a run must not start over because of this
        raise
    except OSError as error:
        raise SpecError(str(path), f"cannot be read ({error.strerror})", _ANOTHER) from None
    _require_seal(raw, path)
    try:
        if document["format"] is True or document["format"] != FORMAT:
            raise SpecError(str(path), f"has format {document['format']!r}", f"this reads format {FORMAT}")
        files = dict(starmap(_file, document["files"].items()))
        tensors = {key: _full_tensor(entry, files) for key, entry in document["tensors"].items()}
        for name, value in _dict(document["numbers"]).items():
            _CHECKS[name](value)
        return Manifest(_count(document["step"]), _dict(document["job"]), document["numbers"], tensors, files)
    except SpecError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SpecError(str(path), "does not describe a checkpoint", _ANOTHER) from None


def _require_seal(raw: bytes, path: Place) -> None:
    """Raises SpecError unless every byte is as it was written."""
    seal = _SEAL.search(raw)
    if seal is None:
        raise SpecError(str(path), "is damaged: it does not end in its checksum", _ANOTHER)
    if hashlib.sha256(raw[: seal.start()] + b"}").hexdigest() != seal[1].decode():
        raise SpecError(str(path), "is damaged: its checksum differs", _ANOTHER)


def _file(name: Any, entry: Any) -> tuple[str, Shard]:
    _require(_FILE.fullmatch(name) is not None and _CHECKSUM.fullmatch(entry["sha256"]) is not None)
    return name, Shard(_count(entry["bytes"]), entry["sha256"])


def _full_tensor(document: Any, files: Mapping[str, Shard]) -> FullTensor:
    shape = tuple(_count(size) for size in document["shape"])
    pieces = []
    for name, entry, start, size in document["pieces"]:
        _require(name in files and isinstance(entry, str))
        box = Box(tuple(_count(x) for x in start), tuple(_count(x) for x in size))
        pieces.append(SavedPiece(name, entry, box))
    _require(document["dtype"] in ITEM_BYTES and fill(shape, [piece.box for piece in pieces]))
    return FullTensor(shape, document["dtype"], tuple(pieces))


def _position(value: Any) -> None:
    """As `Position.to_numbers` writes it."""
    _require(_dict(value).keys() == {"batch", "left_out", "sequences"} and isinstance(value["left_out"], list))
    _count(value["sequences"], 1)
    for number in (value["batch"], *value["left_out"]):
        _count(number)


def _count(value: Any, least: int = 0) -> int:
    _require(_is_number(value) and isinstance(value, int) and value >= least)
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dict(value: Any) -> dict[str, Any]:
    _require(isinstance(value, dict))
    return dict(value)


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


# The state beside the tensors, as `start.state_numbers` and `state.numbers` write it; optimizers count their steps in
# floating point.
_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "optimizer_steps": lambda value: _require(_is_number(value) and 0 <= value < math.inf),
    "loss_scale": lambda value: _require(all(map(_is_number, _dict(value).values()))),
    "inner_steps": _count,
    "late_sums": _count,
    BASE: lambda value: _require(isinstance(value, str)),
    "data": _position,
    "losses": lambda values: _require(isinstance(values, list) and all(map(_is_number, values))),
}


def contents_of(path: Place) -> dict[str, Any]:
    """What a checkpoint holds, from its manifest alone; raises SpecError if that is damaged.

    ``layout`` is the strategy of the job that saved it.
    """
    manifest = read_manifest(path)
    model, layout, training = (manifest.job.get(name) for name in ("model", "strategy", "training"))
    tensors, sizes = [], Counter[str]()
    for key, full in manifest.tensors.items():
        kind, _, name = key.partition("/")
        sizes[kind] += full.size
        about = {"kind": kind, "name": name, "dtype": full.dtype, "shape": list(full.shape)}
        tensors.append({**about, "bytes": full.size, "pieces": len(full.pieces)})
    return {
        "path": str(path),
        "step": manifest.step,
        "model": str(model.get("name", "custom")) if isinstance(model, dict) else str(model or "unknown"),
        "layout": layout if isinstance(layout, dict) else {},
        "precision": training.get("precision") if isinstance(training, dict) else None,
        "numbers": manifest.numbers,
        "files": {name: shard.size for name, shard in sorted(manifest.files.items())},
        "tensors": tensors,
        "bytes": dict(sizes),
    }


def weight_keys(manifest: Manifest) -> list[str]:
    """The tensors of the model, without the states of the optimizer."""
    return [key for key in manifest.tensors if key.startswith(("weight/", "buffer/"))]
