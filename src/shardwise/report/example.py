"""A sequence of training data on the console: what the loss counts in colour, or between marks where there is none."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.report.console import console, versioned
from shardwise.run.data.example import Example, ExampleDocument
from shardwise.spec.units import counted

# What a terminal would obey, or would write from right to left.
_RANGES = ((0, 8), (0x0B, 0x1F), (0x7F, 0x9F), (0x202A, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
_NOT_SHOWN = {code: "\ufffd" for first, last in _RANGES for code in range(first, last + 1)}
_COUNTED, _OTHER = "bold green", "dim"
_MARKS = "{+", "+}"  # as git marks words that were added


def show_example(shown: Example, to: Console | None = None) -> None:
    to = to or console()
    coloured = to.is_terminal and not to.no_color
    how = "in green" if coloured else f"between {_MARKS[0]} and {_MARKS[1]}"
    left = f", {shown.left:,} of them empty" if shown.left else ""
    to.print(
        f"sequence {shown.number:,} of {shown.sequences:,}: {shown.seq:,} tokens{left}; the loss counts what is {how}"
    )
    for number, document in enumerate(shown.documents, 1):
        to.print(Text(_heading(number, document), style="cyan" if coloured else ""))
        to.print(_text(document, coloured=coloured), soft_wrap=True)


def example_data(shown: Example) -> dict[str, Any]:
    return versioned("data show", asdict(shown))


def _heading(number: int, document: ExampleDocument) -> str:
    answer = f" ({document.answer})" if document.answer else ""
    return f"── document {number}{answer}: {counted(document.tokens, 'token')}, {document.counted:,} counted ──"


def _text(document: ExampleDocument, *, coloured: bool) -> Text:
    text = Text()
    for piece in document.pieces:
        safe = piece.text.translate(_NOT_SHOWN)
        if coloured:
            text.append(safe, style=_COUNTED if piece.counted else _OTHER)
        else:
            text.append(f"{_MARKS[0]}{safe}{_MARKS[1]}" if piece.counted else safe)
    return text
