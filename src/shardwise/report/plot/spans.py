"""Rows over time, and nodes with their ranks, in characters."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len

from shardwise.report.charts.chart import MeshChart, SpanChart, Tone, readable
from shardwise.report.plot.painted import FILLS, Painted, joined, labelled, legend_lines, plain
from shardwise.report.tables import wrapped

_IDLE = "·"


def span_lines(chart: SpanChart, width: int) -> Iterator[Painted]:
    """A character is what a row does in its time; of several things in turn, as often as each takes of it."""
    first = max(map(cell_len, chart.rows), default=0) + 1
    room = max(10, width - first)
    seconds = chart.end / room
    busy = [[[0.0] * len(chart.kinds) for _ in range(room)] for _ in chart.rows]
    for row, start, end, kind, _ in chart.spans:
        for place in range(int(start / seconds), min(room - 1, int(end / seconds)) + 1):
            own = min(end, (place + 1) * seconds) - max(start, place * seconds)
            busy[row][place][kind] += max(0.0, own)
    for name, shares in zip(chart.rows, busy):
        yield joined(_cells(chart, shares, seconds), labelled(name, first))
    left, right = readable(0.0, chart.axis.unit), readable(chart.end, chart.axis.unit)
    yield plain(f"{' ' * first}{left}{right:>{room - len(left)}}")
    marks = [(FILLS[number % len(FILLS)], kind.name, kind.tone) for number, kind in enumerate(chart.kinds)]
    yield from legend_lines([*marks, (_IDLE, "idle", None)], width)


def _cells(chart: SpanChart, busy: list[list[float]], seconds: float) -> Iterator[tuple[str, Tone | None]]:
    """What has not had its turn comes the sooner."""
    due = [0.0] * (len(chart.kinds) + 1)
    for own in busy:
        shares = [*own, seconds - sum(own)]
        due = [one + share / seconds for one, share in zip(due, shares)]
        kind = max((one for one, share in enumerate(shares) if share > 0), key=lambda one: due[one])
        due[kind] -= 1
        idle = kind == len(chart.kinds)
        yield (_IDLE, None) if idle else (FILLS[kind % len(FILLS)], chart.kinds[kind].tone)


def mesh_lines(chart: MeshChart, width: int) -> Iterator[Painted]:
    """A line for each node, longer ones folded: the labels of its ranks."""
    room = max((cell_len(box.label) for box in chart.boxes), default=0) + 1
    for box in chart.boxes:
        labels = " | ".join(cell.label or "rank" for cell in box.cells)
        for number, line in enumerate(wrapped(labels, max(10, width - room))):
            yield Painted(((labelled("" if number else box.label, room), None), (line, box.cells[0].tone)))
