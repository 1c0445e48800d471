"""One way to print: tables a person reads at a glance, in a terminal or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 132  # where no terminal says how wide it is


def console() -> Console:
    """A console on standard output; in a pipe or file lines are long rather than cut."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, numbers_from: int = 1
) -> RenderableType:
    """A plain table under its title: the first ``numbers_from`` columns hold words, the rest numbers."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(columns):
        # Words may wrap; numbers never do.
        is_number = index >= numbers_from
        result.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        result.add_row(*row)
    return Group(Text(title, style="bold"), result) if title else result


def spoken(algorithm: str) -> str:
    """An algorithm's name for people; commas may break, so that a narrow column shows all of it."""
    return algorithm.replace("_", " ").replace(",", ", ")


def bar(share: float, width: int = 40) -> str:
    """A bar of eighth blocks; shares above 1 fill it."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
