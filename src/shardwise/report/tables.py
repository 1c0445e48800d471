"""Tables that fit a console of any width: columns fold, then drop in a stated order, then rows become records.

Numbers are never cut and never broken over two lines. Words wrap between words. A column that its table calls optional
may be left out where the console is narrow, and the output says so; what still does not fit is printed as records, a
block of ``name: value`` for every row. As Markdown, CSV or HTML, to paste, a table has all columns and no drawings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_EDGE, _GAP = 1, 2  # columns of space before the first column and after the last, and between two
_READABLE = 14  # words wrap in a column of this width without becoming hard to read
_BETWEEN_PAIRS, _JOINED = "   ", "\u00a0"
# Where a line may be broken: between words, and not between a number and its unit.
_SPACE = re.compile(r"[ \t\n]+(?!(?<=\d )(?:[mnµ]?s|[KMGTPE]?i?B|tokens/s)\b)")
# Where a word that is longer than its column may be broken: after a joint, never before a digit.
_JOINT = re.compile(r"(?<=\S[-/_=,·×])(?=[^\W\d])")


@dataclass(frozen=True)
class Bar:
    """A share drawn as a bar of eighth blocks."""

    share: float  # drawn as if it were 1 where it is more
    width: int = 40  # characters of a share of 1

    def drawn(self, scale: float = 1.0) -> str:
        eighths = round(max(0.0, min(1.0, self.share)) * self.width * scale * 8)
        full, rest = divmod(eighths, 8)
        return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


Cell = str | Bar


@dataclass(frozen=True)
class Column:
    """A column: words, left-aligned and wrapped, or numbers, right-aligned."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class FittedTable:
    """A table under its title, which adapts to the width of the console."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    optional: tuple[str, ...] = ()  # columns that a narrow console drops, in this order
    narrower: FittedTable | None = None
    """Replaces the table where it does not fit even then; without one, rows become records."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            for line in wrapped(self.title, options.max_width) if not options.no_wrap else [self.title]:
                yield Text(line, style="bold")
        # A console without a bound (a file, a pipe) shows every column, on lines as long as they have to be.
        bounded = not options.no_wrap
        for line, style in self._lines(options.max_width, bounded):
            yield Text(line, style=style, no_wrap=True, overflow="ignore")

    def _lines(self, width: int, bounded: bool) -> Iterator[tuple[str, str]]:
        for gone in self._drops():
            shown = [index for index in range(len(self.columns)) if index not in gone]
            widths = self._widths(shown, width)
            if widths is None and not bounded:
                widths = [self._least(index) for index in shown]
            if widths is not None:
                yield from self._drawn(shown, widths)
                yield from self._left_out(gone, width)
                return
        if self.narrower is not None:
            yield from self.narrower._lines(width, bounded)
            kept = {column.name for column in self.narrower.columns}
            names = [name for name in self.optional if name not in kept]
            yield from self._left_out(
                frozenset(n for n, column in enumerate(self.columns) if column.name in names), width
            )
            return
        yield from self._records(width)
        yield from self._left_out(self._bars(), width)

    def _drops(self) -> Iterator[frozenset[int]]:
        """Ever larger sets of columns to leave out: none, the bars, then one more optional column at a time."""
        gone: frozenset[int] = frozenset()
        yield gone
        bars = self._bars()
        if bars:
            gone |= bars
            yield gone
        for name in self.optional:
            gone |= {index for index, column in enumerate(self.columns) if column.name == name}
            yield gone

    def _bars(self) -> frozenset[int]:
        return frozenset(index for row in self.rows for index, cell in enumerate(row) if isinstance(cell, Bar))

    def _left_out(self, gone: frozenset[int], width: int) -> Iterator[tuple[str, str]]:
        names = list(dict.fromkeys(self.columns[index].name or "bars" for index in sorted(gone)))
        if names:
            for line in wrapped(f"Not shown at this width: {'; '.join(names)}.", width):
                yield line, "dim"
            yield "", ""

    # -- to paste --------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """A GitHub Markdown table under its title, without bars."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        columns, rows = self._without_bars()
        rules = ["---:" if column.numeric else "---" for column in columns]
        lines = [line(column.name for column in columns), line(rules), *map(line, rows)]
        return (f"**{self.title}**\n\n" if self.title else "") + "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Comma-separated values under a comment with the title, without bars."""
        import csv
        import io

        text, (columns, rows) = io.StringIO(), self._without_bars()
        if self.title:
            text.write(f"# {self.title}\n")
        writer = csv.writer(text, lineterminator="\n")
        if any(column.name for column in columns):
            writer.writerow([column.name for column in columns])
        writer.writerows(rows)
        return text.getvalue()

    def html(self) -> str:
        from html import escape

        columns, rows = self._without_bars()
        sides = ["right" if column.numeric else "left" for column in columns]

        def line(tag: str, cells: Iterable[str]) -> str:
            made = (f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for side, cell in zip(sides, cells))
            return f"<tr>{''.join(made)}</tr>"

        headings = [column.name for column in columns]
        head = [f"<thead>{line('th', headings)}</thead>"] if any(headings) else []
        caption = f'<caption style="text-align:left"><b>{escape(self.title)}</b></caption>' if self.title else ""
        body = "\n".join(line("td", row) for row in rows)
        return "\n".join([f"<table>{caption}", *head, f"<tbody>{body}</tbody>", "</table>"])

    def _without_bars(self) -> tuple[list[Column], list[list[str]]]:
        bars = self._bars()
        shown = [index for index in range(len(self.columns)) if index not in bars]
        return [self.columns[n] for n in shown], [[str(row[n]).strip() for n in shown] for row in self.rows]

    # -- a table ---------------------------------------------------------------------------------------------

    def _widths(self, shown: Sequence[int], width: int) -> list[int] | None:
        """A width for every column shown; None if they do not fit even at their smallest widths."""
        room = width - 2 * _EDGE - _GAP * (len(shown) - 1)
        least = [self._least(index) for index in shown]
        if sum(least) > room:
            return None
        natural = [max(self._natural(index), low) for index, low in zip(shown, least)]
        level = max(natural, default=0)  # no column is wider: the widest shrink first, to the same width
        while sum(max(low, min(full, level)) for low, full in zip(least, natural)) > room:
            level -= 1
        widths = [max(low, min(full, level)) for low, full in zip(least, natural)]
        for place, full in enumerate(natural):
            widths[place] += min(full - widths[place], room - sum(widths), 1)
        return widths

    def _cells(self, index: int) -> Iterator[Cell]:
        return (row[index] for row in self.rows)

    def _natural(self, index: int) -> int:
        widths = (len(cell.drawn()) if isinstance(cell, Bar) else cell_len(cell) for cell in self._cells(index))
        return max(cell_len(self.columns[index].name), max(widths, default=0))

    def _least(self, index: int) -> int:
        column = self.columns[index]
        heading = _longest_piece(column.name)
        if column.numeric:
            return max(heading, max((cell_len(str(cell)) for cell in self._cells(index)), default=0))
        longest = max((0 if isinstance(cell, Bar) else _longest_piece(cell) for cell in self._cells(index)),
                      default=0)  # fmt: skip
        return max(heading, longest, min(self._natural(index), _READABLE))

    def _drawn(self, shown: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[str, str]]:
        yield "", ""
        if not any(self.columns[index].name for index in shown):  # names and values need no headings
            yield from self._body(shown, widths)
            return
        headings = [wrapped(self.columns[index].name, width) for index, width in zip(shown, widths)]
        tallest = max(map(len, headings), default=0)
        for line in self._aligned([[""] * (tallest - len(lines)) + lines for lines in headings], shown, widths):
            yield line, "bold"
        yield " " * _EDGE + "─" * (sum(widths) + _GAP * (len(widths) - 1)), ""
        yield from self._body(shown, widths)

    def _body(self, shown: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[str, str]]:
        for row in self.rows:
            cells = [self._folded(row[index], index, width) for index, width in zip(shown, widths)]
            for line in self._aligned(cells, shown, widths):
                yield line, ""
        yield "", ""

    def _folded(self, cell: Cell, index: int, width: int) -> list[str]:
        if isinstance(cell, Bar):
            return [cell.drawn(min(1.0, width / max(1, self._natural(index))))]
        return [cell] if self.columns[index].numeric else wrapped(cell, width)

    def _aligned(self, cells: list[list[str]], shown: Sequence[int], widths: Sequence[int]) -> Iterator[str]:
        for number in range(max(map(len, cells), default=0)):
            parts = []
            for lines, index, width in zip(cells, shown, widths):
                text = lines[number] if number < len(lines) else ""
                blank = " " * (width - cell_len(text))
                parts.append(blank + text if self.columns[index].numeric else text + blank)
            yield (" " * _EDGE + (" " * _GAP).join(parts)).rstrip()

    # -- records ---------------------------------------------------------------------------------------------

    def _records(self, width: int) -> Iterator[tuple[str, str]]:
        """The first column heads a block; the others follow as ``name: value``, as many on a line as fit."""
        for row in self.rows:
            yield "", ""
            pairs = [_pair(column, cell) for column, cell in zip(self.columns, row)
                     if isinstance(cell, str) and cell]  # fmt: skip
            if row[0] and pairs:
                for line in wrapped(pairs.pop(0), width - 1):
                    yield f" {line}".replace(_JOINED, " "), "bold"
            for line in _flowed(pairs, width - 3):
                yield f"   {line}".replace(_JOINED, " "), ""
        yield "", ""


def _pair(column: Column, value: str) -> str:
    """A number and its unit stay on one line."""
    shown = value.replace(" ", _JOINED) if column.numeric else value
    return f"{column.name}: {shown}" if column.name else shown


def _flowed(pairs: Iterable[str], width: int) -> Iterator[str]:
    """Pairs side by side, as many as fit on a line; a pair longer than a line gets lines of its own."""
    line = ""
    for pair in pairs:
        longer = line + _BETWEEN_PAIRS + pair if line else pair
        if cell_len(longer) <= width:
            line = longer
            continue
        if line:
            yield line
        *full, line = wrapped(pair, width)
        yield from full
    if line:
        yield line


def _longest_piece(text: str) -> int:
    return max((cell_len(piece) for word in text.split() for piece in _JOINT.split(word)), default=0)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width``: broken between words; within a word only if it is longer than a line."""
    lines: list[str] = []
    for word in _SPACE.split(text.strip()):
        for part in [word] if cell_len(word) <= width else _broken(word, width):
            if lines and cell_len(lines[-1]) + 1 + cell_len(part) <= width:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
    return lines or [""]


def hanging(text: str, width: int) -> list[str]:
    """A line folded at ``width``; where it is indented, what follows is indented a little more."""
    indent = " " * (len(text) - len(text.lstrip(" ")))
    first, *rest = wrapped(text, width - len(indent) - (2 if indent else 0))
    return [indent + first, *(f"{indent}{'  ' if indent else ''}{line}" for line in rest)]


def _broken(word: str, width: int) -> list[str]:
    """A word that is longer than a line: broken at its joints, or anywhere if it has none."""
    lines = [""]
    for piece in _JOINT.split(word):
        if cell_len(lines[-1] + piece) <= width:
            lines[-1] += piece
            continue
        while cell_len(piece) > width:
            lines.append(piece[: max(1, width)])
            piece = piece[max(1, width) :]
        lines.append(piece)
    return [line for line in lines if line]
