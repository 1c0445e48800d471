"""A page: lines and tables in order, shown in a terminal, a file, a notebook, or as Markdown or CSV to paste."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardwise.report import console as printing
from shardwise.report.tables import FittedTable, hanging

if TYPE_CHECKING:  # few pages have drawings
    from shardwise.report.plot import Drawing

Form = Literal["text", "markdown", "csv"]
P = ParamSpec("P")


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""
    fixed: bool = False  # never folded: a drawing, or text to copy

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.text.split("\n"):
            kept = self.fixed or options.no_wrap
            for part in [line] if kept else hanging(line, options.max_width):
                yield Text(part, style=self.style, no_wrap=True, overflow="ignore")


Piece: TypeAlias = "Line | FittedTable | Drawing"


@dataclass(frozen=True)
class Page:
    """The output of a verb, independent of where it will be shown."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece | str]) -> Page:
        return cls(tuple(Line(piece) if isinstance(piece, str) else piece for piece in pieces))

    def print(self, form: Form = "text") -> None:
        if form == "text":
            self._draw(printing.console())
        else:
            print(self.markdown() if form == "markdown" else self.csv(), end="")

    def text(self) -> str:
        drawn = io.StringIO()
        self._draw(printing.console(drawn))
        return drawn.getvalue().rstrip("\n")

    def markdown(self) -> str:
        def written(line: Line) -> str:
            if line.fixed:
                return f"```\n{line.text}\n```\n"
            lines = [part for part in line.text.split("\n") if part.strip()]
            return "  \n".join(f"**{part}**" if line.style == "bold" else part for part in lines) + "\n"

        return "\n".join(written(piece) if isinstance(piece, Line) else piece.markdown() for piece in self._to_paste())

    def csv(self) -> str:
        """Its tables with an empty line between them; sentences are left out, they have no columns."""
        return "\n".join(piece.csv() for piece in self._to_paste() if isinstance(piece, FittedTable))

    def html(self) -> str:
        from html import escape

        def written(line: Line) -> str:
            if line.fixed:
                return f"<pre>{escape(line.text)}</pre>"
            text = escape(line.text.strip("\n")).replace("\n", "<br>")
            return f"<p><b>{text}</b></p>" if line.style == "bold" else f"<p>{text}</p>"

        return "\n".join(written(piece) if isinstance(piece, Line) else piece.html() for piece in self._to_paste())

    def _to_paste(self) -> list[Line | FittedTable]:
        """The pieces, with tables in place of drawings."""
        return [piece if isinstance(piece, Line | FittedTable) else piece.table() for piece in self.pieces]

    def _draw(self, out: Console) -> None:
        for piece in self.pieces:
            out.print(piece, crop=not (isinstance(piece, Line) and piece.fixed))


def paged(pieces: Callable[P, Iterable[Piece | str]]) -> Callable[P, Page]:
    """Makes a page of the lines and tables that a function yields."""

    @functools.wraps(pieces)
    def page(*arguments: P.args, **keywords: P.kwargs) -> Page:
        return Page.of(pieces(*arguments, **keywords))

    return page
