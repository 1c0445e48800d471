"""Documents read from files: plain text, JSON lines, Parquet, WebDataset tars; and the built-in corpus.

Files are read as streams whose memory is bounded, whatever their headers claim.
"""

from __future__ import annotations

import gzip
import sysconfig
import tarfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardwise.run.data.conversations import FIELDS, Content, RecordRules, Span, characters, content_of
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, bounded_lines, parse_json
from shardwise.spec.installation import require_packages
from shardwise.spec.units import readable_bytes

PIECE_BYTES = 2**20  # the most that is read from a stream at once; more than any sound tar header has
_BLOCK_BYTES = 512  # of a tar
TARS = (".tar", ".tar.gz", ".tgz")
_GZIP = b"\x1f\x8b"  # its first bytes (RFC 1952)
# What the readers raise for a file that is cut or holds something else.
DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, ArithmeticError, LookupError)
_AGAIN = "copy it again, or ⟨on_bad_record=skip⟩ leaves out the rest of it"


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked if its name ends in .gz, or if it is a packed tar, whatever its name."""
    name = path.name.lower()
    packed = name.endswith(".gz")
    if name.endswith(TARS):
        with path.open("rb") as file:
            packed = file.read(len(_GZIP)) == _GZIP
    return cast(BinaryIO, gzip.open(path, "rb") if packed else path.open("rb"))


def damaged(path: Path, where: str, error: Exception) -> SpecError:
    """What a reader raised, as one line; ``where`` says how far it came, such as "after line 12"."""
    reason = getattr(error, "strerror", None) or str(error)[:120] or type(error).__name__
    return SpecError(str(path), f"is damaged {where} ({reason})", _AGAIN)


def too_large(where: str, most: int) -> SpecError:
    return SpecError(where, f"is larger than {readable_bytes(most)}", "raise ⟨max_record⟩, or split it")


def read_at_most(file: BinaryIO, most: int) -> bytes | None:
    """All of a stream; None if it has more than ``most`` bytes."""
    pieces, held = [], 0
    while piece := file.read(PIECE_BYTES):
        held += len(piece)
        if held > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class Member:
    name: str
    content: bytes | None  # None if it is larger than allowed


def members_of(file: BinaryIO, suffixes: tuple[str, ...], most: int) -> Iterator[Member]:
    """The members with one of the suffixes, in the archive's order; raises one of `DAMAGED`."""
    blocks = _Blocks(file)
    before = -1
    with tarfile.open(fileobj=cast(Any, blocks), mode="r:") as archive:
        while (member := archive.next()) is not None:
            if member.size < 0 or member.offset <= before:
                raise tarfile.ReadError("a member of negative size")
            before = member.offset
            cast(Any, archive).members.clear()  # tarfile would keep a description of each
            if not member.isfile() or not member.name.lower().endswith(suffixes):
                continue
            content = None
            if member.size <= most:
                inner = archive.extractfile(member)
                assert inner is not None
                content = read_at_most(cast(BinaryIO, inner), most)
                if content is not None and len(content) != member.size:
                    raise tarfile.ReadError("unexpected end of data")
            yield Member(member.name, content)
        # tarfile takes anything that is not a header for the end of the archive.
        if blocks.last.strip(b"\0") or len(blocks.last) not in (0, _BLOCK_BYTES):
            raise tarfile.ReadError("a header is damaged or cut")


class _Blocks:
    """The file that tarfile reads: only forwards and in small pieces, since a header may ask for gigabytes, or again
    and again for more than there is.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._empty = 0
        self.last = b""

    def read(self, size: int) -> bytes:
        if not 0 <= size <= PIECE_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self.last = self._file.read(size)
        self._empty = 0 if self.last else self._empty + 1
        if self._empty > 4:
            raise tarfile.ReadError("unexpected end of data")
        return self.last

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, place: int) -> int:
        if not 0 <= place < 2**62:
            raise tarfile.ReadError("a member of an impossible size")
        return self._file.seek(place)


# -- documents -----------------------------------------------------------------------------------------


_PARQUET = (".parquet",)
_PARQUET_ROWS = 64  # read at a time, since a stored value may stand for many rows


@dataclass(frozen=True)
class ReadingRules(RecordRules):
    most_bytes: int = 32 * 2**20  # of a record
    raw: bool = True  # keeps bytes that are not UTF-8, for the byte tokenizer; otherwise they are replaced


@dataclass(frozen=True)
class SourceRecord:
    """A record's content, or the problem with it."""

    content: Content = ()
    problem: SpecError | None = None
    repaired: bool = False  # something in it was not a character, and was replaced


def read_records(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    """The records of a file, read by its suffix; a problem names the file and the record.

    Damage after which reading cannot go on ends the records.
    """
    for suffixes, read in _READERS:
        if path.name.lower().endswith(suffixes):
            return read(path, reading)
    raise _unknown(path)


def require_readable(path: Path) -> None:
    """Raises SpecError if a file is missing, of an unknown kind, or its kind needs a package that is not installed."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is not there"
        raise SpecError(str(path), problem, "name files, or a pattern that your shell expands")
    name = path.name.lower()
    if not any(name.endswith(suffixes) for suffixes, _ in _READERS):
        raise _unknown(path)
    if name.endswith(_PARQUET):
        require_packages(str(path), "pyarrow")


def _unknown(path: Path) -> SpecError:
    if path.name.lower().endswith(".json"):
        return SpecError(str(path), "is one document of JSON", "write a record in each line: jq -c '.[]', as .jsonl")
    known = ", ".join(suffix for suffixes, _ in _READERS for suffix in suffixes)
    return SpecError(str(path), "has an unknown suffix", f"use {known}")


def _text(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    try:
        with opened(path) as file:
            content = read_at_most(file, reading.most_bytes)
    except DAMAGED as error:
        yield SourceRecord(problem=damaged(path, "or cut", error))
        return
    if content is None:
        yield SourceRecord(problem=too_large(str(path), reading.most_bytes))
    elif content:
        yield _plain(content, reading)


def _plain(content: bytes, reading: ReadingRules) -> SourceRecord:
    try:
        return SourceRecord((Span(content.decode()),))
    except UnicodeDecodeError:
        text = content.decode(errors="surrogateescape" if reading.raw else "replace")
        return SourceRecord((Span(text),), repaired=not reading.raw)


def _json_lines(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    number = 0
    try:
        with opened(path) as file:
            for number, line in enumerate(bounded_lines(file, reading.most_bytes), 1):
                if line is None:
                    yield SourceRecord(problem=too_large(f"{path}:{number}", reading.most_bytes))
                elif text := (line.removeprefix(BOM_UTF8) if number == 1 else line).strip():
                    yield _json_record(text, reading, f"{path}:{number}")
    except DAMAGED as error:
        yield SourceRecord(problem=damaged(path, f"after line {number:,}", error))


def _json_record(text: bytes, reading: ReadingRules, where: str) -> SourceRecord:
    try:
        record = parse_json(text, where, most_values=IN_BULK, halves=True)
        content, repaired = content_of(record, reading, where)
    except SpecError as error:
        return SourceRecord(problem=error)
    return SourceRecord(content, repaired=repaired)


def _parquet(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    require_packages(str(path), "pyarrow")
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        schema = parquet.read_schema(path)
        used = [name for name in schema.names if name in (reading.field, *FIELDS)]
        # Columns are read in pieces; a value that stands for many rows is kept once.
        kinds = {name: schema.field(name).type for name in used}
        texts = [name for name, kind in kinds.items() if pyarrow.types.is_string(kind)]
        file: Any = parquet.ParquetFile(path, read_dictionary=texts, buffer_size=2**20, pre_buffer=False)
        for batch in file.iter_batches(_PARQUET_ROWS, columns=used, use_threads=False):
            for offset in range(batch.num_rows):
                yield _row(batch, offset, reading, f"{path}, row {row + offset}")
            row += batch.num_rows
    except (*DAMAGED, pyarrow.ArrowException, MemoryError, TypeError, NotImplementedError) as error:
        yield SourceRecord(problem=damaged(path, f"after row {row:,}", error))


def _row(batch: Any, row: int, reading: ReadingRules, where: str) -> SourceRecord:
    try:
        record = {name: batch.column(name)[row].as_py() for name in batch.schema.names}
    except UnicodeDecodeError:
        return SourceRecord(problem=SpecError(where, "is not text in UTF-8", "correct it"))
    try:
        given = {name: value for name, value in record.items() if value is not None}
        content, repaired = content_of(given, reading, where)
    except SpecError as error:
        return SourceRecord(problem=error)
    if characters(content) > reading.most_bytes:
        return SourceRecord(problem=too_large(where, reading.most_bytes))
    return SourceRecord(content, repaired=repaired)


def _tar(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    """Members named .txt or .json; nothing is unpacked to disk."""
    read = "at its beginning"
    try:
        with opened(path) as file:
            for member in members_of(file, (".txt", ".text", ".json"), reading.most_bytes):
                read, where = f"after {member.name}", f"{path}, {member.name}"
                if member.content is None:
                    yield SourceRecord(problem=too_large(where, reading.most_bytes))
                elif member.name.lower().endswith(".json"):
                    yield _json_record(member.content, reading, where)
                else:
                    yield _plain(member.content, reading)
    except DAMAGED as error:
        yield SourceRecord(problem=damaged(path, read, error))


_READERS: tuple[tuple[tuple[str, ...], Callable[[Path, ReadingRules], Iterator[SourceRecord]]], ...] = (
    ((".jsonl", ".jsonl.gz", ".ndjson"), _json_lines),
    (_PARQUET, _parquet),
    (TARS, _tar),
    ((".txt", ".text", ".md", ".py", ".txt.gz"), _text),
)


def standard_library() -> list[Path]:
    """The built-in corpus: Python files of the standard library in a fixed order, without tests and packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib"}
    files = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
