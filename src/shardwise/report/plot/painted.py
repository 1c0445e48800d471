"""A line of characters, each with an optional tone, and the legend that names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len

from shardwise.report.charts.chart import Tone

# Distinguishable without colours, highest contrast first.
FILLS = "█▒░▓▚▤▥◫▨▦▩"


@dataclass(frozen=True)
class Painted:
    """Parts of a line, each with its tone; None is plain."""

    parts: tuple[tuple[str, Tone | None], ...]

    @property
    def text(self) -> str:
        return "".join(part for part, _ in self.parts)


def plain(text: str) -> Painted:
    return Painted(((text, None),))


def joined(cells: Iterable[tuple[str, Tone | None]], before: str = "", after: str = "") -> Painted:
    """A line of single characters; neighbours of the same tone become one part."""
    runs = (
        ("".join(character for character, _ in run), tone) for tone, run in groupby(cells, key=lambda cell: cell[1])
    )
    return Painted(tuple(part for part in ((before, None), *runs, (after, None)) if part[0]))


def legend_lines(entries: Iterable[tuple[str, str, Tone | None]], width: int) -> Iterator[Painted]:
    """Marks with their names, as many on a line as fit."""
    line: list[tuple[str, Tone | None]] = []
    taken = 0
    for mark, name, tone in entries:
        size = cell_len(mark) + 1 + cell_len(name) + 3
        if line and taken + size - 3 > width:
            yield Painted(tuple(line))
            line, taken = [], 0
        line += [(mark, tone), (f" {name}   ", None)]
        taken += size
    if line:
        yield Painted(tuple(line))


def labelled(label: str, room: int) -> str:
    """A label padded to ``room`` characters, or cut with an ellipsis."""
    cut = label if cell_len(label) <= room else label[: room - 1] + "…"
    return cut + " " * (room - cell_len(cut))
