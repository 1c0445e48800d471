"""A table of measurements on disk: rows of cells; a bad cell is reported in one line."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_text

# The tables that come with the package; the rest of the folder is read by tests and by the documents.
FOLDER = Path(__file__).with_name("tables")
TRAINING_RUNS = ("training_runs", "training_runs_2")
SCORED = (*TRAINING_RUNS, "memory_runs", "collectives", "pipeline_bubble")
_MOST_CELLS = 2_000_000
# What people write into an empty cell.
_BLANK = ("", "-", "—", "?", "na", "n/a", "nan", "none", "null", "unknown")


def table_path(named: str) -> Path:
    """A table that comes with the package by its name, or the file that a user names."""
    return FOLDER / f"{named}.csv" if named in SCORED else Path(named)


@dataclass(frozen=True)
class TableRow:
    """One row: a cell by its column, a missing cell as an empty one."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """The number in a cell, None if it has none; a measurement or a size is above 0."""
        text = self.text(column)
        if text.lower() in _BLANK:
            return None
        try:
            value = float(text)
        except ValueError:
            raise SpecError(column, f"{shown(text)} is not a number", "write a number or leave it empty") from None
        if not math.isfinite(value) or value < 0:
            raise SpecError(column, f"{shown(text)} is not an amount", "write 0 or more, or leave it empty")
        return value

    def needed(self, column: str) -> float:
        value = self.number(column)
        if value is None:
            raise SpecError(column, "is empty", "write a number")
        return value

    def whole(self, column: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.number(column)
        if value is None and default is not None:
            return default
        if value is None or value != int(value) or value < minimum:
            problem = (
                "is empty" if value is None else f"{shown(self.text(column))} is not a whole number from {minimum}"
            )
            raise SpecError(column, problem, "write one")
        return int(value)

    def flag(self, column: str) -> bool | None:
        """Whether a cell says yes; None if it says nothing."""
        text = self.text(column).lower()
        if text in _BLANK and text != "none":
            return None
        return text in ("1", "1.0", "yes", "y", "true", "on")

    @property
    def assumed(self) -> tuple[str, ...]:
        """The fields that the table's author filled in because the source does not print them."""
        outside = re.sub(r"\([^)]*\)", "", self.text("assumed_fields"))
        return tuple(words.split()[0].lower() for words in re.split(r"[,;]", outside) if words.strip())

    def printed(self, cells: Mapping[str, str]) -> TableRow:
        """The row as it would be had the source printed ``cells``, and all else besides."""
        return TableRow({**self.cells, **cells, "assumed_fields": ""})


def columns_of(path: Path | str) -> tuple[str, ...]:
    return _read(path)[0]


def read_table(path: Path | str, columns: Sequence[str], what: str) -> list[TableRow]:
    """The rows of a table that must have ``columns``."""
    present, rows = _read(path)
    if not present:
        raise SpecError("table", f"{shown(str(path))} is empty", f"a table of {what} has {', '.join(columns)}")
    for column in columns:
        if column not in present:
            raise SpecError("table", f"column {column!r} is missing", f"a table of {what} has {', '.join(columns)}")
    if not rows:
        raise SpecError("table", f"{shown(str(path))} has no rows", "give at least one")
    return rows


def _read(path: Path | str) -> tuple[tuple[str, ...], list[TableRow]]:
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, "table").removeprefix("\ufeff"), newline=""))
        columns = tuple(name.strip() for name in reader.fieldnames or ())
        most = _MOST_CELLS // max(1, len(columns))
        rows = [TableRow(row) for row in islice(reader, most + 1)]
        if len(rows) > most:
            raise SpecError("table", f"{shown(str(path))} holds more than {_MOST_CELLS:,} cells", "is it a table?")
        return columns, rows
    except csv.Error:
        raise SpecError("table", f"{shown(str(path))} is not a CSV table", "check the file") from None
