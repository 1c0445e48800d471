"""A table of measurements on disk: rows of cells, and what completes them; a bad cell is reported in one line."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_text
from shardwise.spec.stack import Stack

# The tables that come with the package; the rest of the folder is read by tests and by the documents.
FOLDER = Path(__file__).with_name("tables")
TRAINING_RUNS = ("training_runs", "training_runs_2", "training_runs_3")
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


# -- how a source is completed: what all its rows share, and what some of them change ----------------

Cells = Mapping[str, str]


def matches(cells: Cells, row: TableRow) -> bool:
    """Whether every column of ``cells`` matches its pattern in the row."""
    return all(re.search(pattern, row.text(column), re.IGNORECASE) for column, pattern in cells.items())


@dataclass(frozen=True)
class Variant:
    """Rows whose cells match ``cells`` (column → pattern) and whose container is from ``since`` to ``until``."""

    rows: str  # in words
    reason: str
    cells: Cells
    since: str = ""
    until: str = "~"  # after any digit
    fill: Cells = field(default_factory=dict)  # what the source leaves empty, as if it had printed it
    model: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""  # of the stack, where it is not the source's
    stack: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, row: TableRow) -> bool:
        return self.since <= release(row) <= self.until and matches(self.cells, row)

    def on(self, stack: Stack) -> Stack:
        """The stack with what this variant sets; overlap is changed dimension by dimension."""
        changes = dict(self.stack)
        if "overlap" in changes:
            changes["overlap"] = replace(stack.overlap, **changes["overlap"])
        return stack.stated(**changes) if changes else stack


def release(row: TableRow) -> str:
    """The release that a row names, like "26.06" or "26.06.01"; one that names none is older than any."""
    match = re.search(r"(?<![\d.])2\d\.[01]\d(\.\d\d)?(?!\d)", f"{row.text('locator')} {row.text('row_id')}")
    return match[0] if match else ""


Microbatch = Literal["one", "local batch"]


@dataclass(frozen=True)
class Source:
    """Defaults of one source for fields its tables leave out."""

    name: str
    pattern: str  # in the row's source column
    stack: str
    reason: str
    cells: Cells = field(default_factory=dict)  # further columns that its rows match
    convention: str = "causal"  # how its TFLOP/s or MFU count a token, unless the row says
    counts_recomputed: bool = False
    peak: float | None = None  # FLOP/s behind its MFU; None: the device's 16-bit peak
    zero: int = 1
    fp32_gradients: bool = False  # 16-bit training accumulates in fp32, unless the row says
    # Without a pipeline a rank's whole share of the batch, or one sequence; with one always one sequence.
    microbatch: Microbatch = "one"
    layer_per_chunk: bool = False  # pipelines interleave down to one layer per chunk
    vocab: int = 32_000
    context_method: str = "ring"
    machines: Mapping[str, str] = field(default_factory=dict)  # clusters in place of a device's usual one
    stages_by_cost: bool = False  # a pipeline stage ends with the layer that passes its share of the matmuls
    memory: Literal["as printed", "first rank", "reserved, first rank"] = "as printed"  # what a figure of memory counts
    fitted: bool = True  # constants of devices are fitted on its rows
    untimed: tuple[Cells, ...] = ()  # rows whose time the host or slow kernels set: only their memory is read
    variants: tuple[Variant, ...] = ()

    def times(self, row: TableRow) -> bool:
        return not any(matches(cells, row) for cells in self.untimed)

    def covers(self, row: TableRow) -> bool:
        return matches({"source": self.pattern, **self.cells}, row)

    def filled(self, row: TableRow) -> TableRow:
        """The row with the cells that its variants fill where it has none."""
        cells = {name: text for variant in self.variants if variant.applies(row) for name, text in variant.fill.items()}
        return TableRow({**row.cells, **{name: text for name, text in cells.items() if not row.text(name)}})
