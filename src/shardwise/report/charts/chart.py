"""A picture as data: what is drawn, its axes with their units, and the table that says the same in numbers.

The HTML report, the page in the browser and ``--plot`` in a terminal all draw these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from shardwise.report.console import all_fields
from shardwise.spec.units import (
    readable_bytes,
    readable_count,
    readable_flops,
    readable_rate,
    readable_seconds,
    readable_share,
)

ChartUnit = Literal["bytes", "seconds", "share", "count", "FLOP/s", "B/s", "tokens/s", "loss", "number", "words"]
Tone = Literal[
    "navy", "blue", "sky", "orange", "gold", "green", "purple", "pink", "teal", "red", "grey", "brown", "lime", "steel"
]
TONES: tuple[Tone, ...] = ("blue", "orange", "green", "purple", "gold", "teal", "pink", "sky", "red", "navy", "grey")
LineStyle = Literal["line", "dashed", "points", "edge"]  # an edge has no points of its own
Value = float | str | None

# `assets/charts.js` writes the ticks of axes in the same way, which the browser tests compare.
_READABLE: dict[ChartUnit, Callable[[float], str]] = {
    "bytes": readable_bytes,
    "seconds": readable_seconds,
    "share": readable_share,
    "count": readable_count,
    "FLOP/s": lambda value: f"{readable_flops(value)}/s",
    "B/s": readable_rate,
    "tokens/s": lambda value: f"{value:,.0f}",
    "loss": lambda value: f"{value:.3f}",
    "number": lambda value: f"{value:,.0f}",  # in full
}


def readable(value: Value, unit: ChartUnit) -> str:
    """A figure for people; "–" where there is none."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else _READABLE[unit](value)


@dataclass(frozen=True)
class ChartColumn:
    name: str
    unit: ChartUnit = "words"


@dataclass(frozen=True)
class ChartTable:
    """The figures of a chart; rows of numbers and words."""

    columns: tuple[ChartColumn, ...]
    rows: tuple[tuple[Value, ...], ...]

    def texts(self) -> list[list[str]]:
        return [[readable(value, column.unit) for column, value in zip(self.columns, row)] for row in self.rows]


def chart_table(columns: dict[str, ChartUnit], rows: Iterable[Iterable[Value]]) -> ChartTable:
    described = tuple(ChartColumn(name, unit) for name, unit in columns.items())
    return ChartTable(described, tuple(tuple(row) for row in rows))


@dataclass(frozen=True)
class ChartAxis:
    """What lies along an axis; a logarithmic one has equal steps for equal factors."""

    label: str
    unit: ChartUnit
    is_log: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    name: str  # unique on its page
    title: str
    caption: str  # what to look for
    table: ChartTable  # the same in numbers

    KIND: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: bytes, seconds and shares as numbers, the table also as text."""
        data: dict[str, Any] = {"kind": self.KIND, **all_fields(self)}
        data["table"]["texts"] = self.table.texts()
        return data


@dataclass(frozen=True)
class BarSeries:
    """The bars of one colour."""

    name: str
    values: tuple[float, ...]  # one per category
    tone: Tone
    details: tuple[tuple[str, ...], ...] = ()  # lines that explain each value


@dataclass(frozen=True)
class ChartLimit:
    """A line across all bars or points, such as the memory of a device."""

    label: str
    value: float


@dataclass(frozen=True, kw_only=True)
class BarChart(Chart):
    """Horizontal bars, one per category: series stacked, or side by side."""

    KIND: ClassVar[str] = "bars"
    axis: ChartAxis
    categories: tuple[str, ...]
    series: tuple[BarSeries, ...]
    is_stacked: bool
    limits: tuple[ChartLimit, ...] = ()


@dataclass(frozen=True)
class LineSeries:
    """Points of one colour, which a line may join."""

    name: str
    points: tuple[tuple[float, float], ...]  # (x, y) of each
    tone: Tone
    style: LineStyle = "line"
    labels: tuple[str, ...] = ()  # a name for each point


@dataclass(frozen=True, kw_only=True)
class LineChart(Chart):
    """Lines and points over two axes."""

    KIND: ClassVar[str] = "lines"
    x: ChartAxis
    y: ChartAxis
    series: tuple[LineSeries, ...]
    is_stacked: bool = False  # areas on top of each other; each keeps its value until the next point
    limits: tuple[ChartLimit, ...] = ()


@dataclass(frozen=True)
class SpanKind:
    """A kind of spans or cells, as the legend names it."""

    name: str
    tone: Tone


@dataclass(frozen=True, kw_only=True)
class SpanChart(Chart):
    """Rows over time, such as pipeline ranks with their passes."""

    KIND: ClassVar[str] = "spans"
    axis: ChartAxis
    rows: tuple[str, ...]
    kinds: tuple[SpanKind, ...]
    spans: tuple[tuple[int, float, float, int, str], ...]  # (row, start, end, kind, label); row and kind are indices
    end: float


@dataclass(frozen=True)
class MeshCell:
    label: str
    detail: str  # shown when pointed at
    tone: Tone


@dataclass(frozen=True)
class MeshBox:
    label: str
    cells: tuple[MeshCell, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class MeshChart(Chart):
    """Boxes with cells: nodes with their ranks."""

    KIND: ClassVar[str] = "mesh"
    boxes: tuple[MeshBox, ...]
    legend: tuple[SpanKind, ...]


def stacked_bars(
    rows: str, axis: ChartAxis, categories: Sequence[str], series: Sequence[BarSeries], *, total: str = "", **chart: Any
) -> BarChart:
    """Stacked bars and their table: a row per category under the heading ``rows``, a column per series, and their sum
    under the heading ``total``, if given. ``chart`` has the other fields of a BarChart."""
    columns: dict[str, ChartUnit] = {rows: "words", **{bars.name: axis.unit for bars in series}}
    if total:
        columns[total] = axis.unit
    figures: list[list[Value]] = []
    for number, name in enumerate(categories):
        values = [bars.values[number] for bars in series]
        figures.append([name, *values, *([sum(values)] if total else [])])
    return BarChart(
        axis=axis,
        categories=tuple(categories),
        series=tuple(series),
        is_stacked=True,
        table=chart_table(columns, figures),
        **chart,
    )
