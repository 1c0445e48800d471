"""Charts drawn with characters, as wide as the console; readable without colours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardwise.report.charts.chart import (
    BarChart,
    BarSeries,
    Chart,
    ChartAxis,
    ChartLimit,
    LineChart,
    LineSeries,
    MeshChart,
    SpanChart,
    Tone,
    readable,
)
from shardwise.report.tables import Column, FittedTable, wrapped

# -- lines of characters, each with an optional tone -------------------------------------------------

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


def painted_cells(cells: Iterable[tuple[str, Tone | None]], before: str = "", after: str = "") -> Painted:
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


# -- bars, rows over time, and nodes with their ranks ------------------------------------------------

_LIMIT = "│"
_SHORT = 26  # a longer name stands above its bar


def bar_lines(chart: BarChart, width: int) -> Iterator[Painted]:
    shown = [series for series in chart.series if any(series.values)]
    marks = {id(series): FILLS[number % len(FILLS)] for number, series in enumerate(shown)}
    single = len(chart.categories) > 1 and all(sum(map(bool, series.values)) <= 1 for series in shown)
    if single:  # the names of the bars say what they are
        marks = dict.fromkeys(marks, FILLS[0])
    rows = [_row(chart, shown, number) for number in range(len(chart.categories))]
    most = max(
        (sum(max(0.0, value) for _, value in bars) for _, bars in (bar for row in rows for bar in row)), default=0.0
    )
    limits = [limit for limit in chart.limits if limit.value <= 4 * most]
    most = max([most, *(limit.value for limit in limits)]) or 1.0
    texts = [readable(sum(value for _, value in bars), chart.axis.unit) for row in rows for _, bars in row]
    names = max(map(cell_len, chart.categories), default=0)
    own_line = names > _SHORT
    first = 2 if own_line else names + 1
    room = max(8, width - first - max(map(len, texts), default=0) - 2)
    places = {round(limit.value / most * (room - 1)) for limit in limits}
    for category, row in zip(chart.categories, rows):
        if own_line:
            yield from (plain(line) for line in wrapped(category, width))
        for number, (_, bars) in enumerate(row):
            before = labelled("" if own_line or number else category, first)
            value = readable(sum(value for _, value in bars), chart.axis.unit)
            yield painted_cells(_cells(bars, marks, most, room, places), before, f" {value}")
    if not single and len(shown) > 1:
        yield from legend_lines(((marks[id(series)], series.name, series.tone) for series in shown), width)
    for limit in limits:
        yield plain(f"{_LIMIT} {limit.label}, {readable(limit.value, chart.axis.unit)}")


def _row(chart: BarChart, shown: Sequence[BarSeries], number: int) -> list[tuple[str, list[tuple[BarSeries, float]]]]:
    """The bars of a category: all series stacked in one bar, or a bar for each."""
    values = [(series, series.values[number]) for series in shown]
    if chart.is_stacked:
        return [("", values)]
    return [(series.name, [(series, value)]) for series, value in values]


def _cells(
    bars: Sequence[tuple[BarSeries, float]], marks: dict[int, str], most: float, room: int, limits: set[int]
) -> list[tuple[str, Tone | None]]:
    cells: list[tuple[str, Tone | None]] = [(" ", None)] * room
    total = 0.0
    for series, value in bars:
        start, total = total, total + max(0.0, value)
        for place in range(round(start / most * room), min(room, round(total / most * room))):
            cells[place] = (marks[id(series)], series.tone)
    if total > 0 and all(cell == (" ", None) for cell in cells):  # too short to draw, but there
        cells[0] = ("▏", max(bars, key=lambda part: part[1])[0].tone)
    for place in limits:
        if cells[place][1] is None:
            cells[place] = (_LIMIT, "red")
    return cells


_IDLE = "·"


def span_lines(chart: SpanChart, width: int) -> Iterator[Painted]:
    """A character per row and slice of time; kinds that share slices appear in proportion to their time."""
    first = max(map(cell_len, chart.rows), default=0) + 1
    room = max(10, width - first)
    seconds = chart.end / room
    busy = [[[0.0] * len(chart.kinds) for _ in range(room)] for _ in chart.rows]
    for row, start, end, kind, _ in chart.spans:
        for place in range(int(start / seconds), min(room - 1, int(end / seconds)) + 1):
            own = min(end, (place + 1) * seconds) - max(start, place * seconds)
            busy[row][place][kind] += max(0.0, own)
    for name, shares in zip(chart.rows, busy):
        yield painted_cells(_span_cells(chart, shares, seconds), labelled(name, first))
    left, right = readable(0.0, chart.axis.unit), readable(chart.end, chart.axis.unit)
    yield plain(f"{' ' * first}{left}{right:>{room - len(left)}}")
    marks = [(FILLS[number % len(FILLS)], kind.name, kind.tone) for number, kind in enumerate(chart.kinds)]
    yield from legend_lines([*marks, (_IDLE, "idle", None)], width)


def _span_cells(chart: SpanChart, busy: list[list[float]], seconds: float) -> Iterator[tuple[str, Tone | None]]:
    """The kind drawn in each slice: the one whose time so far exceeds what was drawn of it by most."""
    due = [0.0] * (len(chart.kinds) + 1)
    for own in busy:
        shares = [*own, seconds - sum(own)]
        due = [owed + share / seconds for owed, share in zip(due, shares)]
        kind = max((index for index, share in enumerate(shares) if share > 0), key=lambda index: due[index])
        due[kind] -= 1
        idle = kind == len(chart.kinds)
        yield (_IDLE, None) if idle else (FILLS[kind % len(FILLS)], chart.kinds[kind].tone)


def mesh_lines(chart: MeshChart, width: int) -> Iterator[Painted]:
    """A line per node with the labels of its ranks, folded where it is long."""
    room = max((cell_len(box.label) for box in chart.boxes), default=0) + 1
    for box in chart.boxes:
        labels = " | ".join(cell.label or "rank" for cell in box.cells)
        for number, line in enumerate(wrapped(labels, max(10, width - room))):
            yield Painted(((labelled("" if number else box.label, room), None), (line, box.cells[0].tone)))


# -- lines and points of braille dots over two axes; a letter marks the points of each series --------

_HEIGHT = 14  # lines of characters
_ACROSS, _DOWN = 2, 4  # dots of a character
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of Unicode's braille, by line and column
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_FEW = 24  # points that get a letter each; in a longer line only the last does


def curve_lines(chart: LineChart, width: int) -> Iterator[Painted]:
    if chart.is_stacked:
        yield from _area_lines(chart, width)
        return
    points = [point for series in chart.series for point in series.points]
    limits = _near_limits(chart.limits, max(y for _, y in points))
    x = _AxisScale(chart.x, [across for across, _ in points])
    y = _AxisScale(chart.y, [*(up for _, up in points), *(limit.value for limit in limits)], margin=True)
    margin = max(len(y.text(share)) for share in (0.0, 0.5, 1.0)) + 1
    canvas = _Canvas(max(10, width - margin - 1), _HEIGHT)
    for limit in limits:
        canvas.line((0.0, y.share(limit.value)), (1.0, y.share(limit.value)), "red", 3)
    for number, series in enumerate(chart.series):
        _draw(canvas, series, _LETTERS[number % len(_LETTERS)], x, y)
    yield from _framed(canvas, x, y, margin, chart)
    entries = [
        (_LETTERS[number % len(_LETTERS)], series.name, series.tone) for number, series in enumerate(chart.series)
    ]
    yield from legend_lines(entries, width)
    yield from (plain(f"⠒ {limit.label}, {readable(limit.value, chart.y.unit)}") for limit in limits)


def _draw(canvas: _Canvas, series: LineSeries, letter: str, x: _AxisScale, y: _AxisScale) -> None:
    places = [(x.share(across), y.share(other)) for across, other in series.points]
    if series.style != "points":
        for start, end in pairwise(places):
            canvas.line(start, end, series.tone, 1 if series.style == "line" else 3)
    for place in places if len(places) <= _FEW or series.style == "points" else places[-1:]:
        canvas.mark(place, letter, series.tone)


def _area_lines(chart: LineChart, width: int) -> Iterator[Painted]:
    """Stacked areas, drawn in columns of characters."""
    shown = [series for series in chart.series if any(value for _, value in series.points)]
    limits = _near_limits(chart.limits, max(map(sum, zip(*([y for _, y in series.points] for series in shown)))))
    count = len(shown[0].points)
    totals = [sum(series.points[number][1] for series in shown) for number in range(count)]
    y = _AxisScale(chart.y, [0.0, *totals, *(limit.value for limit in limits)])
    x = _AxisScale(chart.x, [point[0] for point in shown[0].points])
    margin = max(len(y.text(share)) for share in (0.0, 0.5, 1.0)) + 1
    canvas = _Canvas(max(10, width - margin - 1), _HEIGHT)
    for column in range(canvas.width):
        # The fullest of the moments in a column, so that no peak is lost.
        first, last = (place * count // canvas.width for place in (column, column + 1))
        number = max(range(first, max(first + 1, last)), key=lambda moment: totals[moment])
        total = 0.0
        for place, series in enumerate(shown):
            start, total = total, total + series.points[number][1]
            for row in range(round(y.share(start) * _HEIGHT), round(y.share(total) * _HEIGHT)):
                canvas.put(column, _HEIGHT - 1 - row, FILLS[place % len(FILLS)], series.tone)
    for limit in limits:
        row = min(_HEIGHT - 1, _HEIGHT - round(y.share(limit.value) * _HEIGHT))
        for column in range(canvas.width):
            if (column, row) not in canvas.marks:
                canvas.put(column, row, "╌", "red")
    yield from _framed(canvas, x, y, margin, chart)
    yield from legend_lines(
        ((FILLS[n % len(FILLS)], series.name, series.tone) for n, series in enumerate(shown)), width
    )
    yield from (plain(f"╌ {limit.label}, {readable(limit.value, chart.y.unit)}") for limit in limits)


def _near_limits(limits: Sequence[ChartLimit], most: float) -> list[ChartLimit]:
    """Without limits far beyond the values, which would flatten the curve."""
    return [limit for limit in limits if limit.value <= 4 * most]


class _AxisScale:
    """Maps figures to shares of an axis, and shares to the text of a figure."""

    def __init__(self, axis: ChartAxis, values: Sequence[float], *, margin: bool = False) -> None:
        self.axis = axis
        low, high = self._along(min(values)), self._along(max(values))
        if not axis.is_log and margin and low > 0 and low < 0.6 * high:
            low = 0.0
        if high == low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high = low, high

    def _along(self, value: float) -> float:
        return math.log10(value) if self.axis.is_log else value

    def share(self, value: float) -> float:
        return (self._along(value) - self.low) / (self.high - self.low)

    def text(self, share: float) -> str:
        along = self.low + share * (self.high - self.low)
        value = 10**along if self.axis.is_log else along
        return readable(
            round(value) if value >= 10 and self.axis.unit in ("count", "number") else value, self.axis.unit
        )


class _Canvas:
    """Characters with tones; lines are drawn with braille dots, and a character has the tone that was drawn last."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = [[0] * width for _ in range(height)]
        self.marks: dict[tuple[int, int], str] = {}
        self._tones: dict[tuple[int, int], Tone] = {}

    def put(self, column: int, row: int, mark: str, tone: Tone) -> None:
        self.marks[column, row] = mark
        self._tones[column, row] = tone

    def mark(self, place: tuple[float, float], letter: str, tone: Tone) -> None:
        self.put(round(place[0] * (self.width - 1)), round((1 - place[1]) * (self.height - 1)), letter, tone)

    def line(self, start: tuple[float, float], end: tuple[float, float], tone: Tone, every: int) -> None:
        """A line of dots from one place to the other, of which only each ``every``-th is drawn."""
        across, down = self.width * _ACROSS - 1, self.height * _DOWN - 1
        ends = [(round(x * across), round((1 - y) * down)) for x, y in (start, end)]
        (x0, y0), (x1, y1) = ends
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(0, steps + 1, every):
            x, y = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
            self._dots[y // _DOWN][x // _ACROSS] |= _DOTS[y % _DOWN][x % _ACROSS]
            self._tones[x // _ACROSS, y // _DOWN] = tone

    def rows(self) -> Iterator[list[tuple[str, Tone | None]]]:
        for row, dots in enumerate(self._dots):
            cells: list[tuple[str, Tone | None]] = []
            for column, dot in enumerate(dots):
                mark = self.marks.get((column, row), chr(0x2800 + dot) if dot else " ")
                cells.append((mark, self._tones.get((column, row))))
            yield cells


def _framed(canvas: _Canvas, x: _AxisScale, y: _AxisScale, margin: int, chart: LineChart) -> Iterator[Painted]:
    """The canvas between its axes, with figures at the ends and the middle of each."""
    yield plain(f"{chart.y.label}")
    ticks = {0: y.text(1.0), canvas.height // 2: y.text(0.5), canvas.height - 1: y.text(0.0)}
    for number, cells in enumerate(canvas.rows()):
        yield painted_cells(
            cells, f"{ticks.get(number, ''):>{margin - 1}} ┤" if number in ticks else " " * margin + "│"
        )
    yield plain(" " * margin + "└" + "─" * canvas.width)
    left, middle, right = x.text(0.0), x.text(0.5), x.text(1.0)
    room = canvas.width - len(left) - len(right)
    gap = room - len(middle)
    between = middle.center(room) if gap >= 4 else " " * max(1, room)
    yield plain(f"{' ' * (margin + 1)}{left}{between}{right}")
    yield plain(f"{' ' * (margin + 1)}{chart.x.label.center(canvas.width).rstrip()}")


# -- a chart -----------------------------------------------------------------------------------------

_MOST_WIDTH = 120  # a wider picture is not clearer
_STYLES: dict[Tone, str] = {
    "navy": "blue",
    "blue": "bright_blue",
    "sky": "cyan",
    "orange": "yellow",
    "gold": "bright_yellow",
    "green": "green",
    "purple": "magenta",
    "pink": "bright_magenta",
    "teal": "bright_cyan",
    "red": "red",
    "grey": "bright_black",
    "brown": "bright_red",
    "lime": "bright_green",
    "steel": "white",
}


@dataclass(frozen=True)
class Drawing:
    """A chart as a piece of a page; in Markdown and CSV the table of its figures stands for it."""

    chart: Chart

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _MOST_WIDTH)
        for line in wrapped(self.chart.title, width):
            yield Text(line, style="bold")
        for line in wrapped(self.chart.caption, width):
            yield Text(line, style="dim")
        for painted in drawn(self.chart, width):
            text = Text(no_wrap=True, overflow="ignore")
            for part, tone in painted.parts:
                text.append(part, style=_STYLES[tone] if tone is not None else "")
            yield text
        yield Text("")

    def table(self) -> FittedTable:
        columns = tuple(Column(column.name, numeric=column.unit != "words") for column in self.chart.table.columns)
        return FittedTable(self.chart.title, columns, tuple(tuple(row) for row in self.chart.table.texts()))


def drawn(chart: Chart, width: int) -> Iterator[Painted]:
    """The lines of a chart, none longer than ``width``."""
    if isinstance(chart, BarChart):
        return bar_lines(chart, width)
    if isinstance(chart, LineChart):
        return curve_lines(chart, width)
    if isinstance(chart, SpanChart):
        return span_lines(chart, width)
    assert isinstance(chart, MeshChart)
    return mesh_lines(chart, width)
