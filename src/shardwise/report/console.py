"""The console that all output goes to, and short ways to make tables, bars and plain data."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Attributes of an object as plain data: ``names``, then ``key="path.of.another"``."""
    return {key: _plain(attrgetter(path)(source)) for key, path in {**dict(zip(names, names)), **renamed}.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, range)):
        return list(value)
    return value.to_dict() if hasattr(value, "to_dict") else value
