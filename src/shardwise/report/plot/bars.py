"""Bars, rows over time, and nodes with their ranks, drawn with characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from shardwise.report.charts.chart import BarChart, BarSeries, MeshChart, SpanChart, Tone, readable
from shardwise.report.plot.painted import FILLS, Painted, joined, labelled, legend_lines, plain
from shardwise.report.tables import wrapped

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
            yield joined(_cells(bars, marks, most, room, places), before, f" {value}")
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
        yield joined(_span_cells(chart, shares, seconds), labelled(name, first))
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
