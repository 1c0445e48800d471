"""Bars of characters: one for each category, stacked or side by side, with the limits that they should not pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from shardwise.report.charts.chart import BarChart, BarSeries, Tone, readable
from shardwise.report.plot.painted import FILLS, Painted, joined, labelled, legend_lines, plain
from shardwise.report.tables import wrapped

_LIMIT = "│"
_SHORT = 26  # a longer name stands above its bar


def bar_lines(chart: BarChart, width: int) -> Iterator[Painted]:
    shown = [one for one in chart.series if any(one.values)]
    marks = {id(one): FILLS[number % len(FILLS)] for number, one in enumerate(shown)}
    single = len(chart.categories) > 1 and all(sum(map(bool, one.values)) <= 1 for one in shown)
    if single:  # the names of the bars say what they are
        marks = dict.fromkeys(marks, FILLS[0])
    rows = [_row(chart, shown, number) for number in range(len(chart.categories))]
    most = max(
        (sum(max(0.0, value) for _, value in bars) for _, bars in (one for row in rows for one in row)), default=0.0
    )
    limits = [one for one in chart.limits if one.value <= 4 * most]
    most = max([most, *(one.value for one in limits)]) or 1.0
    texts = [readable(sum(value for _, value in bars), chart.axis.unit) for row in rows for _, bars in row]
    names = max(map(cell_len, chart.categories), default=0)
    own_line = names > _SHORT
    first = 2 if own_line else names + 1
    room = max(8, width - first - max(map(len, texts), default=0) - 2)
    places = {round(one.value / most * (room - 1)) for one in limits}
    for category, row in zip(chart.categories, rows):
        if own_line:
            yield from (plain(line) for line in wrapped(category, width))
        for number, (_, bars) in enumerate(row):
            before = labelled("" if own_line or number else category, first)
            value = readable(sum(value for _, value in bars), chart.axis.unit)
            yield joined(_cells(bars, marks, most, room, places), before, f" {value}")
    if not single and len(shown) > 1:
        yield from legend_lines(((marks[id(one)], one.name, one.tone) for one in shown), width)
    for limit in limits:
        yield plain(f"{_LIMIT} {limit.label}, {readable(limit.value, chart.axis.unit)}")


def _row(chart: BarChart, shown: Sequence[BarSeries], number: int) -> list[tuple[str, list[tuple[BarSeries, float]]]]:
    """The bars of a category: one of all series, or one of each."""
    values = [(one, one.values[number]) for one in shown]
    if chart.is_stacked:
        return [("", values)]
    return [(one.name, [(one, value)]) for one, value in values]


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
        cells[0] = ("▏", max(bars, key=lambda one: one[1])[0].tone)
    for place in limits:
        if cells[place][1] is None:
            cells[place] = (_LIMIT, "red")
    return cells
