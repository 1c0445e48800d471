"""Token shards as Megatron-LM's pair of files: ``NAME.bin`` holds tokens, ``NAME.idx`` says where documents lie.

The format is that of `megatron/core/datasets/indexed_dataset.py`; Megatron-LM reads what is written here. Beside a pair
there may be two files that it does not know: ``NAME.sums.json`` with checksums, and ``NAME.mask`` with a byte for every
token, 1 if the loss counts it. Pairs in an object store are read block by block, as slices are asked for.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from shardwise.run.data.lengths import ABOUT, LENGTHS, summary
from shardwise.run.storage.place import BlockCache, BlockReader, Place, RemotePlace, block_sum, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json
from shardwise.spec.installation import require_packages

BLOCK_BYTES = 2**20  # where no checksums determine it
MOST_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RemoteArray:
    """An array in an object store that reads like a mapped file: ``array[start:stop]`` fetches the blocks it needs."""

    reader: BlockReader
    dtype: Any

    def __len__(self) -> int:
        return self.reader.size // int(np.dtype(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        return self.reader.size

    def __getitem__(self, index: slice) -> np.ndarray[Any, np.dtype[Any]]:
        first, last, _ = index.indices(len(self))
        item = int(np.dtype(self.dtype).itemsize)
        return np.frombuffer(self.reader.read(first * item, last * item), self.dtype)


@cache
def cache_of(limit_bytes: float) -> BlockCache:
    """The cache that all arrays of this process share."""
    return BlockCache(limit_bytes)


def remote_array(place: RemotePlace, size: int, dtype: Any, sums: RemoteSums, limit_bytes: float) -> RemoteArray:
    """An object of ``size`` bytes as an array whose blocks are compared with their checksums, if there are any."""
    suffix = f".{place.name.rpartition('.')[2]}"
    block_bytes, own = sums.block_bytes, sums.files.get(suffix)
    if own is not None and len(own) != -(-size // block_bytes):
        raise SpecError(str(place), f"has {size:,} bytes, its checksums are of another size", "copy it again")
    limit = max(limit_bytes, 2 * block_bytes)
    return RemoteArray(BlockReader(place, size, block_bytes, cache_of(limit), own), dtype)


@dataclass(frozen=True)
class RemoteSums:
    """The checksums of all blocks of a pair's files, by suffix."""

    block_bytes: int
    files: Mapping[str, Sequence[str]]


def remote_sums(sidecar: RemotePlace) -> RemoteSums:
    """From the file beside a pair; empty if there is none."""
    try:
        document = parse_json(sidecar.read_bytes(), str(sidecar), most_values=IN_BULK)
        block_bytes, files = (
            int(document["chunk_bytes"]),
            {str(suffix): list(of) for suffix, of in document["files"].items()},
        )
    except FileNotFoundError:
        return RemoteSums(BLOCK_BYTES, {})
    except (KeyError, ValueError, TypeError, AttributeError):
        raise SpecError(str(sidecar), "holds no checksums", "copy all files of the pair again") from None
    if not 0 < block_bytes <= MOST_BLOCK_BYTES:
        raise SpecError(str(sidecar), f"has blocks of {block_bytes:,} bytes", "copy all files of the pair again")
    return RemoteSums(block_bytes, files)


# -- pairs of files ------------------------------------------------------------------------------------


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CHUNK_BYTES = 2**20  # each with a checksum, which locates damage; the unit of reads from a store
CACHE_BYTES = 2**28
LONGEST_SEQUENCE = (
    2**30
)  # tokens; an index has 31 bits for the length of a sequence, and a document may have several sequences
Tokens = np.ndarray[Any, np.dtype[Any]]
AnyPlace = TypeVar("AnyPlace", bound=Place)


def token_dtype(vocab: int) -> type:
    """The type that Megatron-LM chooses for a vocabulary."""
    return np.uint16 if vocab < 65_500 else np.int32


@dataclass(frozen=True)
class TokenFiles:
    """An open pair, mapped into memory, or read from a store on demand."""

    prefix: Place
    tokens: Tokens | RemoteArray  # of all documents, end to end
    starts: Tokens  # first token of every document, and the number of all tokens at the end
    mask: Tokens | RemoteArray | None  # 1 where the loss counts a token; None if it counts all

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


def open_pair(prefix: Place | str, cache_bytes: float = CACHE_BYTES) -> TokenFiles:
    """Maps a pair and checks that it is complete; raises SpecError naming the file and the problem.

    ``cache_bytes`` of what was last read from pairs in a store stay in memory.
    """
    prefix = place_of(prefix) if isinstance(prefix, str) else prefix
    index, tokens = _path(prefix, ".idx"), _path(prefix, ".bin")
    for path in (index, tokens):
        if not path.is_file() and _path(pairs_of_preferences(prefix)[0], ".idx").is_file():
            names = " and ".join(f"{prefix}{suffix}" for suffix in PREFERENCES)
            raise SpecError(str(prefix), "holds preferences, which are two pairs", f"name one: {names}")
        if not path.is_file():
            raise SpecError(str(path), "is not there", "name the pair without .bin or .idx, or build it: data build")
    dtype, lengths, pointers, ends = _read_index(index)
    held = tokens.stat().st_size
    size = np.dtype(dtype).itemsize
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if not np.array_equal(pointers, starts[:-1] * size):
        raise SpecError(str(index), "its sequences do not follow each other in the .bin", "build it again: data build")
    if held != starts[-1] * size:
        raise SpecError(str(tokens), f"has {held:,} bytes, its index says {starts[-1] * size:,}", "copy it again")
    if isinstance(tokens, RemotePlace):
        return _remote_pair(tokens, held, dtype, starts[ends], cache_bytes)
    mapped: Tokens = np.memmap(tokens, dtype, "r") if held else np.zeros(0, dtype)
    mask = _path(prefix, ".mask")
    masked = _has_mask(mask, len(mapped)) and held > 0
    return TokenFiles(prefix, mapped, starts[ends], np.memmap(str(mask), np.uint8, "r") if masked else None)


def _remote_pair(tokens: RemotePlace, held: int, dtype: Any, starts: Tokens, cache_bytes: float) -> TokenFiles:
    prefix = tokens.with_name(tokens.name.removesuffix(".bin"))
    sums = remote_sums(_path(prefix, ABOUT))
    array = remote_array(tokens, held, dtype, sums, cache_bytes)
    mask = _path(prefix, ".mask")
    masked = _has_mask(mask, len(array))
    return TokenFiles(
        prefix, array, starts, remote_array(mask, len(array), np.uint8, sums, cache_bytes) if masked else None
    )


PREFERENCES = (".chosen", ".rejected")


def pairs_of_preferences(prefix: AnyPlace) -> tuple[AnyPlace, AnyPlace]:
    """The pairs of the preferred answers and of the others, each after its prompt, in the same order."""
    chosen, rejected = (_path(prefix, suffix) for suffix in PREFERENCES)
    return chosen, rejected


def _path(prefix: AnyPlace, suffix: str) -> AnyPlace:
    return cast(AnyPlace, prefix.with_name(prefix.name + suffix))


def _read_index(path: Place) -> tuple[Any, Tokens, Tokens, Tokens]:
    """The data type, the length and place of every sequence, and the sequence that each document begins with."""
    raw = path.read_bytes()
    if len(raw) < _HEADER.size or raw[: len(MAGIC)] != MAGIC:
        problem = "is not an index of token shards (its first bytes differ)"
        raise SpecError(str(path), problem, "build it again: data build")
    _, version, code, sequences, documents = _HEADER.unpack_from(raw)
    if version != VERSION:
        raise SpecError(str(path), f"has version {version}", f"this reads version {VERSION}")
    if code not in _DTYPES:
        known = ", ".join(map(str, _DTYPES))
        raise SpecError(str(path), f"has tokens of the unknown type {code}", f"use one of {known}")
    wanted = _HEADER.size + 12 * sequences + 8 * documents
    if len(raw) not in (wanted, wanted + sequences):  # with a mode for every sequence
        raise SpecError(str(path), f"has {len(raw):,} bytes, its header says {wanted:,}", "copy it again")
    at = _HEADER.size
    lengths = np.frombuffer(raw, np.int32, sequences, at)
    pointers = np.frombuffer(raw, np.int64, sequences, at + 4 * sequences)
    ends = np.frombuffer(raw, np.int64, documents, at + 12 * sequences)
    if sequences and int(lengths.min()) < 0:
        raise SpecError(str(path), "has a sequence of negative length", "copy it again")
    rising = len(ends) > 0 and ends[0] == 0 and ends[-1] == sequences and bool((np.diff(ends) >= 0).all())
    if not rising:
        raise SpecError(str(path), "its documents are not in order", "copy it again")
    return _DTYPES[code], lengths, pointers, ends


def _has_mask(path: Place, tokens: int) -> bool:
    if not path.is_file():
        return False
    if path.stat().st_size != tokens:
        raise SpecError(str(path), f"has {path.stat().st_size:,} bytes for {tokens:,} tokens", "build the pair again")
    return True


class PairWriter:
    """Writes a pair document by document; the files get their names when `close` has synced them to disk."""

    def __init__(
        self, prefix: Path | str, dtype: type, *, masked: bool = False, about: Mapping[str, Any] | None = None
    ) -> None:
        self.prefix = Path(prefix)
        self._about = dict(about or {})  # kept beside the checksums
        self._counted = 0
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._code = next(code for code, known in _DTYPES.items() if np.dtype(known) == self.dtype)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._lengths: list[int] = []  # of sequences
        self._ends = [0]  # of documents, in sequences
        self._tokens = self._open(".bin")
        self._mask = self._open(".mask") if masked else None
        self.skipped = 0  # records left out of the pair, noted beside its checksums

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def add(self, tokens: Tokens, mask: Tokens | None = None) -> None:
        """Adds a document; without ``mask`` the loss counts all of its tokens."""
        limits = np.iinfo(self.dtype)
        if len(tokens) and (int(tokens.min()) < limits.min or int(tokens.max()) > limits.max):
            raise SpecError("tokens", f"do not fit in {self.dtype}", f"vocabularies up to {limits.max + 1:,} do")
        self._tokens.write(np.ascontiguousarray(tokens, self.dtype).tobytes())
        if self._mask:
            counted = np.ones(len(tokens), np.uint8) if mask is None else np.ascontiguousarray(mask, np.uint8)
            self._mask.write(counted.tobytes())
            self._counted += int(counted.sum())
        else:
            self._counted += len(tokens)
        whole, rest = divmod(len(tokens), LONGEST_SEQUENCE)
        self._lengths += [LONGEST_SEQUENCE] * whole + ([rest] if rest or not whole else [])
        self._ends.append(len(self._lengths))

    def close(self) -> None:
        index = self._open(".idx")
        lengths = np.array(self._lengths, np.int32)
        pointers = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        index.write(_HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._ends)))
        index.write(lengths.tobytes() + pointers.tobytes() + np.array(self._ends, np.int64).tobytes())
        files = [self._tokens, index, *([self._mask] if self._mask else [])]
        for file in files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for suffix in (".bin", *([".mask"] if self._mask else []), ".idx"):  # the index last: it completes the pair
            _path(self.prefix, suffix + ".part").replace(_path(self.prefix, suffix))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[self._ends]
        skipped = {"skipped_records": self.skipped} if self.skipped else {}
        measured = {LENGTHS: summary(np.diff(starts), self._counted)}
        write_checksums(self.prefix, {**skipped, **self._about, **measured})

    def abandon(self) -> None:
        for file in (self._tokens, self._mask):
            if file:
                file.close()
                Path(file.name).unlink(missing_ok=True)

    def _open(self, suffix: str) -> BinaryIO:
        return _path(self.prefix, suffix + ".part").open("wb")


def write_checksums(prefix: Path, about: Mapping[str, Any]) -> None:
    """Beside a pair, with what else there is to say ``about`` it."""
    paths = {suffix: _path(prefix, suffix) for suffix in (".bin", ".idx", ".mask")}
    files = {suffix: _sums(path) for suffix, path in paths.items() if path.exists()}
    content = json.dumps({"format": 1, "chunk_bytes": CHUNK_BYTES, **about, "files": files}, indent=1)
    _path(prefix, ABOUT).write_text(content, encoding="utf-8")


def check_sums(prefix: Place | str) -> bool:
    """Whether there are checksums; raises SpecError naming the first damaged file and offset."""
    prefix = place_of(prefix) if isinstance(prefix, str) else prefix
    sidecar = _path(prefix, ABOUT)
    if not sidecar.is_file():
        return False
    try:
        document = parse_json(sidecar.read_bytes(), str(sidecar), most_values=IN_BULK)
        chunk_bytes = int(document["chunk_bytes"])
        recorded = {suffix: list(sums) for suffix, sums in document["files"].items()}
        actual = {suffix: _sums(_path(prefix, suffix), chunk_bytes) for suffix in recorded}
    except (KeyError, ValueError, TypeError, AttributeError, OSError):
        raise SpecError(str(sidecar), "does not fit its files", "copy all files of the pair again") from None
    for suffix, sums in recorded.items():
        differing = [
            number for number, (expected, two) in enumerate(zip_longest(sums, actual[suffix])) if expected != two
        ]
        if differing:
            place = f"is damaged near byte {differing[0] * chunk_bytes:,}"
            raise SpecError(str(_path(prefix, suffix)), place, "copy or build it again")
    return True


def _sums(path: Place, chunk_bytes: int = CHUNK_BYTES) -> list[str]:
    with path.open("rb") as file:
        return [block_sum(chunk) for chunk in iter(lambda: file.read(chunk_bytes), b"")]


# -- tokenizers --------------------------------------------------------------------------------------

FILE = "tokenizer.json"
BYTES = "bytes"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>")


def _split(tokens: Sequence[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == at:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


class ByteTokenizer:
    """Every byte of UTF-8 is a token."""

    vocab = 257
    end = 256
    """The token that ends a document."""

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)

    def encode_counted(self, text: str, counted: Sequence[tuple[int, int]]) -> tuple[Tokens, Tokens]:
        """The tokens of a text, and 1 for those with a character in one of the ranges, which are in order."""
        edges = [0, *(edge for part in counted for edge in part), len(text)]
        pieces = [self.encode(text[begin:end]) for begin, end in pairwise(edges)]
        flags = [np.full(len(piece), number % 2, np.uint8) for number, piece in enumerate(pieces)]
        return np.concatenate(pieces), np.concatenate(flags)

    def encode_prompt(self, text: str) -> list[int]:
        return [int(token) for token in self.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def decode_all(self, tokens: Sequence[int]) -> str:
        """With the tokens that are not text, as people write them."""
        return "<end>".join(self.decode(part) for part in _split(tokens, self.end))

    def required_end(self) -> int:
        return self.end


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, or the folder that holds one; ``end``, the token that ends a text, is None if unknown."""

    def __init__(self, path: Path) -> None:
        require_packages("tokenizer", "tokenizers")
        from tokenizers import Tokenizer as Model

        self.file = path / FILE if path.is_dir() else path
        if not self.file.is_file():
            remedy = "name a tokenizer.json or a folder that holds one, or: bytes"
            raise SpecError(str(self.file), "is not there", remedy)
        try:
            self._model: Any = Model.from_file(str(self.file))
        except Exception as error:  # its parser raises plain Exception
            raise SpecError(str(self.file), f"is not a tokenizer ({error})", "download it again") from None
        self._model.no_truncation()
        self._model.no_padding()
        self.vocab = int(self._model.get_vocab_size(with_added_tokens=True))
        known = (self._model.token_to_id(text) for text in _ENDS)
        self.end: int | None = next((int(number) for number in known if number is not None), None)

    def required_end(self) -> int:
        """Raises SpecError if no token is known to end a text."""
        if self.end is None:
            raise SpecError(str(self.file), "has no token that ends a text", "one of " + ", ".join(_ENDS))
        return self.end

    def encode(self, text: str) -> Tokens:
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_counted(self, text: str, counted: Sequence[tuple[int, int]]) -> tuple[Tokens, Tokens]:
        """The tokens of a text, and 1 for those with a character in one of the ranges, which are in order."""
        encoded = self._model.encode(text, add_special_tokens=False)
        before = np.zeros(len(text) + 1, np.int64)  # characters that count, before each place
        for begin, end in counted:
            before[begin + 1 : end + 1] = 1
        np.cumsum(before, out=before)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        mask = before[offsets[:, 1]] > before[offsets[:, 0]]
        return np.array(encoded.ids, np.int32), mask.astype(np.uint8)

    def encode_prompt(self, text: str) -> list[int]:
        """With the tokens that begin a text, if the model was trained with any."""
        return [int(token) for token in self._model.encode(text, add_special_tokens=True).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens), skip_special_tokens=True)
        return text

    def decode_all(self, tokens: Sequence[int]) -> str:
        """With the tokens that are not text."""
        text: str = self._model.decode(list(tokens), skip_special_tokens=False)
        return text


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def tokenizer_from(name: str) -> Tokenizer:
    """``bytes``, or the path of a Hugging Face tokenizer."""
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name))
