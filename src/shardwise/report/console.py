"""One way to print: tables a person reads at a glance, in a terminal or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 132  # where no terminal says how wide it is


def console() -> Console:
    """A console on standard output; in a pipe or file lines are long rather than cut."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], *, numbers_from: int = 1) -> Table:
    """A plain table: the first ``numbers_from`` columns hold words, the rest numbers."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for index, name in enumerate(columns):
        # Words may wrap; numbers never do.
        is_number = index >= numbers_from
        result.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        result.add_row(*row)
    return result


def bar(share: float, width: int = 40) -> str:
    """A bar of eighth blocks; shares above 1 fill it."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
