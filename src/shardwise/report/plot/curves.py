"""Lines and points of braille dots over two axes; a letter marks the points of each series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwise.report.charts.chart import ChartAxis, ChartLimit, LineChart, LineSeries, Tone, readable
from shardwise.report.plot.painted import FILLS, Painted, joined, legend_lines, plain

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
            if canvas.is_empty(column, row):
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
        self._marks: dict[tuple[int, int], str] = {}
        self._tones: dict[tuple[int, int], Tone] = {}

    def put(self, column: int, row: int, mark: str, tone: Tone) -> None:
        self._marks[column, row] = mark
        self._tones[column, row] = tone

    def is_empty(self, column: int, row: int) -> bool:
        return (column, row) not in self._marks

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
                mark = self._marks.get((column, row), chr(0x2800 + dot) if dot else " ")
                cells.append((mark, self._tones.get((column, row))))
            yield cells


def _framed(canvas: _Canvas, x: _AxisScale, y: _AxisScale, margin: int, chart: LineChart) -> Iterator[Painted]:
    """The canvas between its axes, with figures at the ends and the middle of each."""
    yield plain(f"{chart.y.label}")
    ticks = {0: y.text(1.0), canvas.height // 2: y.text(0.5), canvas.height - 1: y.text(0.0)}
    for number, cells in enumerate(canvas.rows()):
        yield joined(cells, f"{ticks.get(number, ''):>{margin - 1}} ┤" if number in ticks else " " * margin + "│")
    yield plain(" " * margin + "└" + "─" * canvas.width)
    left, middle, right = x.text(0.0), x.text(0.5), x.text(1.0)
    room = canvas.width - len(left) - len(right)
    gap = room - len(middle)
    between = middle.center(room) if gap >= 4 else " " * max(1, room)
    yield plain(f"{' ' * (margin + 1)}{left}{between}{right}")
    yield plain(f"{' ' * (margin + 1)}{chart.x.label.center(canvas.width).rstrip()}")
