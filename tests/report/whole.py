"""Whether a table shows at some width what it holds: every number and every word whole, no line too long."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from shardwise.report.tables import Bar, FittedTable

WIDTHS = (60, 80, 100, 120, 160)
LEFT_OUT = "Not shown at this width:"
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")
_JOINTS = re.compile(r"[-/_=,·× ]")


def drawn(*objects: Any, width: int, bounded: bool = True, **settings: Any) -> str:
    """What a console of ``width`` prints."""
    out = io.StringIO()
    console = Console(file=out, width=width, soft_wrap=not bounded, color_system=None, highlight=False)
    console.print(*objects, **settings)
    return out.getvalue()


def check_whole(shown: FittedTable, width: int) -> None:
    """Raises AssertionError where a cell of a column that is shown is cut or printed vertically."""
    text = drawn(shown, width=width)
    check_lines(text, width)
    if shown.narrower is not None and drawn(shown.narrower, width=width) in text:
        check_whole(shown.narrower, width)
        return
    body, _, left_out = text.partition(LEFT_OUT)
    whole = set(_NUMBER.findall(body))
    gone = " ".join(left_out.split()).rstrip(".")
    for place, column in enumerate(shown.columns):
        if column.name and re.search(rf"(?:^|; ){re.escape(column.name)}(?:; |$)", gone):
            assert column.name in shown.optional or any(isinstance(row[place], Bar) for row in shown.rows)
            continue
        for row in shown.rows:
            cell = row[place]
            if isinstance(cell, Bar):
                continue
            for number in _NUMBER.findall(cell):
                assert number in whole, (number, text)
            for word in _JOINTS.split(cell):
                assert word in body or len(word) > width - 10, (word, text)


def check_lines(text: str, width: int) -> None:
    assert all(len(line) <= width for line in text.splitlines()), text
