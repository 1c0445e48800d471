"""Documents read from files: plain text, JSON lines, Parquet, WebDataset tars; and a text on every machine."""

from __future__ import annotations

import gzip
import json
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError
from shardwise.spec.installation import require_packages

_PARQUET = (".parquet",)


@dataclass(frozen=True)
class Span:
    """A piece of a document, and whether the loss counts it."""

    text: str
    counted: bool = True


Document = tuple[Span, ...]


def read_documents(path: Path, field: str = "text") -> Iterator[Document]:
    """The documents of one file by its suffix; raises SpecError naming the file and the line.

    A record of JSON lines or Parquet has its text in ``field``; or ``prompt`` and ``answer`` (``completion``,
    ``response``), or ``messages`` with a role each: then only what the assistant says counts.
    """
    for suffixes, read in _READERS:
        if path.name.lower().endswith(suffixes):
            return read(path, field)
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


def _text(path: Path, field: str) -> Iterator[Document]:
    """The whole file is one document."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="surrogateescape", newline="") as file:
        if text := file.read():
            yield (Span(text),)


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                raise SpecError(f"{path}:{number}", "is not JSON", "one object on every line") from None
            yield _record(record, field, f"{path}:{number}")


def _parquet(path: Path, field: str) -> Iterator[Document]:
    require_packages(str(path), "pyarrow")
    from pyarrow import parquet

    file: Any = parquet.ParquetFile(path)
    records = (record for batch in file.iter_batches(batch_size=1024) for record in batch.to_pylist())
    for row, record in enumerate(records):
        yield _record(record, field, f"{path}, row {row}")


def _tar(path: Path, field: str) -> Iterator[Document]:
    """Members named .txt or .json, in the order of the archive; nothing is unpacked to disk."""
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            suffix = Path(member.name).suffix.lower()
            if not member.isfile() or suffix not in (".txt", ".text", ".json"):
                continue
            opened = archive.extractfile(member)
            assert opened is not None
            content = opened.read().decode("utf-8", "surrogateescape")
            if suffix == ".json":
                try:
                    yield _record(json.loads(content), field, f"{path}, {member.name}")
                except json.JSONDecodeError:
                    raise SpecError(f"{path}, {member.name}", "is not JSON", "one object in every member") from None
            else:
                yield (Span(content),)


def _record(record: Any, field: str, where: str) -> Document:
    if not isinstance(record, dict):
        raise SpecError(where, "is not an object", 'write {"text": "..."}')
    if isinstance(record.get(field), str):
        return (Span(record[field]),)
    answer = next((record[name] for name in ("answer", "completion", "response") if name in record), None)
    if isinstance(record.get("prompt"), str) and isinstance(answer, str):
        return (Span(record["prompt"], counted=False), Span(answer))
    if isinstance(record.get("messages"), list):
        return tuple(_message(one, where) for one in record["messages"])
    raise SpecError(where, f"has no text in {field!r}", "name the field: --field, or give prompt and answer")


def _message(message: Any, where: str) -> Span:
    try:
        role, content = message["role"], message["content"]
    except (KeyError, TypeError):
        raise SpecError(where, "has a message without role and content", "write both") from None
    if not isinstance(role, str) or not isinstance(content, str):
        raise SpecError(where, "has a message whose role or content is not text", "write text")
    return Span(f"{role}: {content}\n", counted=role == "assistant")


_READERS: tuple[tuple[tuple[str, ...], Callable[[Path, str], Iterator[Document]]], ...] = (
    ((".jsonl", ".jsonl.gz", ".ndjson"), _json_lines),
    (_PARQUET, _parquet),
    ((".tar", ".tar.gz", ".tgz"), _tar),
    ((".txt", ".text", ".md", ".py", ".txt.gz"), _text),
)


def standard_library() -> list[Path]:
    """The built-in corpus: Python files of the standard library in a fixed order, without tests and packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib"}
    files = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
