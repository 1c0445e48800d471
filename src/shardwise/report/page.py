"""A page: lines and tables in order, shown in a terminal, a file, a notebook, or as Markdown or CSV to paste."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, ParamSpec

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardwise.report import console as printing
from shardwise.report.tables import FittedTable, hanging

Form = Literal["text", "markdown", "csv"]
P = ParamSpec("P")


@dataclass(frozen=True)
class Line:
    """Text of one or more lines; ``fixed`` is a drawing, which nothing may fold."""

    text: str
    style: str = ""
    fixed: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.text.split("\n"):
            kept = self.fixed or options.no_wrap
            for part in [line] if kept else hanging(line, options.max_width):
                yield Text(part, style=self.style, no_wrap=True, overflow="ignore")


Piece = Line | FittedTable


@dataclass(frozen=True)
class Page:
    """The output of a verb, before it is known where it will be read."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece | str]) -> Page:
        return cls(tuple(Line(piece) if isinstance(piece, str) else piece for piece in pieces))

    def print(self, form: Form = "text") -> None:
        """Prints it on standard output, as wide as the console is."""
        if form == "text":
            self._draw(printing.console())
        else:
            print(self.markdown() if form == "markdown" else self.csv(), end="")

    def text(self) -> str:
        """The same without colour, as wide as the console is."""
        drawn = io.StringIO()
        self._draw(printing.console(drawn))
        return drawn.getvalue().rstrip("\n")

    def markdown(self) -> str:
        parts = []
        for piece in self.pieces:
            if isinstance(piece, FittedTable):
                parts.append(piece.markdown())
            elif piece.fixed:
                parts.append(f"```\n{piece.text}\n```\n")
            else:
                lines = [line for line in piece.text.split("\n") if line.strip()]
                parts.append("  \n".join(f"**{line}**" if piece.style == "bold" else line for line in lines) + "\n")
        return "\n".join(parts)

    def csv(self) -> str:
        """Its tables, one after the other with an empty line between; sentences have no columns and stay out."""
        return "\n".join(piece.csv() for piece in self.pieces if isinstance(piece, FittedTable))

    def html(self) -> str:
        from html import escape

        parts = []
        for piece in self.pieces:
            if isinstance(piece, FittedTable):
                parts.append(piece.html())
            elif piece.fixed:
                parts.append(f"<pre>{escape(piece.text)}</pre>")
            else:
                text = escape(piece.text.strip("\n")).replace("\n", "<br>")
                parts.append(f"<p><b>{text}</b></p>" if piece.style == "bold" else f"<p>{text}</p>")
        return "\n".join(parts)

    def _draw(self, out: Console) -> None:
        for piece in self.pieces:
            out.print(piece, crop=not (isinstance(piece, Line) and piece.fixed))


def paged(pieces: Callable[P, Iterable[Piece | str]]) -> Callable[P, Page]:
    """Makes a page of the lines and tables that a function yields."""

    @functools.wraps(pieces)
    def page(*arguments: P.args, **keywords: P.kwargs) -> Page:
        return Page.of(pieces(*arguments, **keywords))

    return page
