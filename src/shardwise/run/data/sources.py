"""Documents read from files: plain text, JSON lines, Parquet, WebDataset tars; and a text on every machine."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.run.data.archives import DAMAGED, TARS, damaged, members_of, opened, read_at_most, too_large
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, bounded_lines, parse_json
from shardwise.spec.installation import require_packages

_PARQUET = (".parquet",)
_PARQUET_ROWS = 64  # read at a time: a value may stand for many rows
_ANSWERS = ("answer", "completion", "response")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_INSTEAD = "\ufffd"  # Unicode's replacement character, which tokenizers know


@dataclass(frozen=True)
class ReadingRules:
    """How files are read: a record of JSON or Parquet has its text in ``field``, and none has more than ``most_bytes``.

    Bytes of a text that are not UTF-8 stay as they are if ``raw``, for a tokenizer of bytes; else they are replaced.
    """

    field: str = "text"
    most_bytes: int = 32 * 2**20
    raw: bool = True


@dataclass(frozen=True)
class Span:
    """A piece of a document, and whether the loss counts it."""

    text: str
    counted: bool = True


Document = tuple[Span, ...]


@dataclass(frozen=True)
class SourceRecord:
    """A record's document, or the ``problem`` with it; ``repaired`` if something in it was no character."""

    document: Document = ()
    problem: SpecError | None = None
    repaired: bool = False


def read_records(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    """The records of one file by its suffix; a problem names the file and the record.

    A record of JSON lines or Parquet has its text in a field; or ``prompt`` and ``answer`` (``completion``,
    ``response``), or ``messages`` with a role each: then only what the assistant says counts. Nothing follows what
    cannot be read on from.
    """
    for suffixes, read in _READERS:
        if path.name.lower().endswith(suffixes):
            return read(path, reading)
    raise _unknown(path)


def require_readable(path: Path) -> None:
    """Raises SpecError if a file is missing, of an unknown kind, or its kind needs a package that is not installed."""
    if not path.is_file():
        raise SpecError(str(path), "is not there", "name files, or a pattern that your shell expands")
    name = path.name.lower()
    if not any(name.endswith(suffixes) for suffixes, _ in _READERS):
        raise _unknown(path)
    if name.endswith(_PARQUET):
        require_packages(str(path), "pyarrow")


def _unknown(path: Path) -> SpecError:
    known = ", ".join(suffix for suffixes, _ in _READERS for suffix in suffixes)
    return SpecError(str(path), "has an unknown suffix", f"use {known}")


def _text(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    """The whole file is one document."""
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
                elif line.strip():
                    yield _json_record(line.strip(), reading, f"{path}:{number}")
    except DAMAGED as error:
        yield SourceRecord(problem=damaged(path, f"after line {number:,}", error))


def _json_record(text: bytes, reading: ReadingRules, where: str) -> SourceRecord:
    try:
        return _record(parse_json(text, where, most_values=IN_BULK, halves=True), reading.field, where)
    except SpecError as error:
        return SourceRecord(problem=error)


def _parquet(path: Path, reading: ReadingRules) -> Iterator[SourceRecord]:
    require_packages(str(path), "pyarrow")
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        names: list[str] = parquet.read_schema(path).names
        used = [name for name in names if name in (reading.field, "prompt", *_ANSWERS, "messages")]
        # A column is read in pieces, and a value that stands for many rows is kept once.
        whole = [name for name in used if name != "messages"]
        file: Any = parquet.ParquetFile(path, read_dictionary=whole, buffer_size=2**20, pre_buffer=False)
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
        parsed = _record({name: value for name, value in record.items() if value is not None}, reading.field, where)
    except SpecError as error:
        return SourceRecord(problem=error)
    if sum(len(span.text) for span in parsed.document) > reading.most_bytes:
        return SourceRecord(problem=too_large(where, reading.most_bytes))
    return parsed


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


def _record(record: Any, field: str, where: str) -> SourceRecord:
    """With halves of characters, which JSON can write and no text can hold, replaced."""
    document = _document(record, field, where)
    whole = tuple(replace(span, text=_HALF_CHARACTER.sub(_INSTEAD, span.text)) for span in document)
    return SourceRecord(whole, repaired=whole != document)


def _document(record: Any, field: str, where: str) -> Document:
    if not isinstance(record, dict):
        raise SpecError(where, "is not an object", 'write {"text": "..."}')
    if isinstance(record.get(field), str):
        return (Span(record[field]),)
    answer = next((record[name] for name in _ANSWERS if name in record), None)
    if isinstance(record.get("prompt"), str) and isinstance(answer, str):
        return (Span(record["prompt"], counted=False), Span(answer))
    if isinstance(record.get("messages"), list):
        return tuple(_message(message, where) for message in record["messages"])
    raise SpecError(where, f"has no text in {field!r}", "name the field: --field, or give prompt and answer")


def _message(message: Any, where: str) -> Span:
    try:
        role, content = message["role"], message["content"]
    except (KeyError, TypeError):
        raise SpecError(where, "has a message without role and content", "write both") from None
    if not isinstance(role, str) or not isinstance(content, str):
        raise SpecError(where, "has a message whose role or content is not text", "write text")
    return Span(f"{role}: {content}\n", counted=role == "assistant")


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
