"""The console that all output goes to; short ways to make tables, bars and plain data; versions of that data."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, TextIO, TypeVar

from rich.console import Console

from shardwise.report.tables import Bar, Cell, Column, FittedTable

T = TypeVar("T")
_FILE_WIDTH = 132  # where no terminal says how wide it is


def console(file: TextIO | None = None) -> Console:
    """A console on standard output, or on ``file`` without colour; as wide as the terminal, or as COLUMNS says.

    In a pipe or a file, without COLUMNS, lines are not folded and tables show all columns.
    """
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if bounded and file is not None else None if bounded else _FILE_WIDTH
    return Console(file=file, width=width, soft_wrap=not bounded, highlight=False)


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[Cell]],
    *,
    numbers_from: int = 1,
    optional: Sequence[str] = (),
) -> FittedTable:
    """A table under its title: the first ``numbers_from`` columns hold words, the rest numbers.

    ``optional`` names the columns that a narrow console leaves out, in this order.
    """
    described = tuple(Column(name, numeric=index >= numbers_from) for index, name in enumerate(columns))
    return FittedTable(title, described, tuple(tuple(row) for row in rows), tuple(optional))


def table_of(
    title: str,
    items: Iterable[T],
    columns: Mapping[str, Callable[[T], Cell]],
    *,
    numbers_from: int = 1,
    optional: Sequence[str] = (),
) -> FittedTable:
    """A `table` with a row per item; ``columns`` maps headings to what an item shows below them."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return table(title, columns, rows, numbers_from=numbers_from, optional=optional)


def spoken(algorithm: str) -> str:
    """An algorithm's name for people, with spaces after commas, so that a narrow column can fold it."""
    return algorithm.replace("_", " ").replace(",", ", ")


def bar(share: float, width: int = 40) -> Cell:
    """A bar for a table; on a narrow console it shrinks, then is left out."""
    return Bar(share, width)


def picked(source: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Attributes of an object as `plain` data: ``names``, then ``key="path.of.another"``."""
    return {key: plain(attrgetter(path)(source)) for key, path in {**dict(zip(names, names)), **renamed}.items()}


def all_fields(source: Any) -> dict[str, Any]:
    """The fields of a dataclass as `plain` data."""
    return picked(source, *(field.name for field in fields(source)))


def plain(value: Any) -> Any:
    """Data for JSON: fields by name, lists for tuples, None for NaN and infinity; a `to_dict` decides for itself."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return all_fields(value)
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- versions of the data that `--json` prints, and what changed between them ------------------------
# docs/json.md is made from this. A version grows when a key is renamed, removed or means something else; a new key does
# not change it.

FIRST = "as of 0.1.0"
# By verb: what each version changed; the last one is printed.
CHANGES: dict[str, tuple[str, ...]] = {
    "analyze": (FIRST, "parts, bottleneck, advice and scaling are of the predicted step, before of its floor"),
    "predict": (FIRST,),
    "plan": (FIRST,),
    "report": (FIRST,),
    "explain": (FIRST, "every figure is a number keyed by its unit, before text"),
    "export": (FIRST,),
    "verify": (FIRST,),
    "dryrun": (FIRST,),
    "train": (FIRST,),
    "train --on": (FIRST,),
    "finetune": ("new in 0.3.0",),
    "status": (FIRST,),
    "compare": (FIRST,),
    "calibrate": (FIRST,),
    "validate": (FIRST,),
    "generate": (FIRST,),
    "convert": (FIRST,),
    "data build": (FIRST,),
    "data show": ("the first",),
    "checkpoint inspect": (FIRST,),
    "checkpoint reshard": (FIRST,),
    "doctor": (FIRST,),
    "bench step": (FIRST,),
    "bench parameter-server": (FIRST,),
    "lab": (FIRST,),
}


def versioned(verb: str, data: dict[str, Any]) -> dict[str, Any]:
    """The data of a verb as it is printed: its version as `format`, first."""
    return {"format": len(CHANGES[verb]), **data}


def formats_table() -> Iterator[str]:
    """The lines of the table in docs/json.md."""
    yield "| verb | `format` | what it changed |"
    yield "|---|---|---|"
    for verb, changes in CHANGES.items():
        for version, change in enumerate(changes, 1):
            yield f"| {f'`{verb}`' if version == 1 else ''} | {version} | {change} |"
