"""A chart drawn with characters, as wide as the console; it is readable without colours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardwise.report.charts.chart import BarChart, Chart, LineChart, MeshChart, SpanChart, Tone
from shardwise.report.plot.bars import bar_lines, mesh_lines, span_lines
from shardwise.report.plot.curves import curve_lines
from shardwise.report.plot.painted import Painted
from shardwise.report.tables import Column, FittedTable, wrapped

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
        """The figures of the chart."""
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
