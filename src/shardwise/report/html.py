"""A report as one self-contained HTML file: no network, no other file. Text from users is escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from shardwise.report.charts.chart import BarChart, Chart, ChartTable
from shardwise.report.charts.sections import ChartSection
from shardwise.report.verdict import JobVerdict

_LONG_TABLE = 12  # rows
_LONG_WORDS = 30  # characters


def asset(name: str) -> str:
    """A file of `report/assets`: the chart library (with its licence beside it), our script and styles."""
    return (files("shardwise.report") / "assets" / name).read_text(encoding="utf-8")


def report_html(
    title: str,
    verdict: JobVerdict,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[ChartSection],
    notes: Sequence[str],
) -> str:
    """The text of the file: the verdict, ``facts`` in a table below it, ``notes``, then the charts."""
    charts = {chart.name: chart.to_dict() for section in sections for chart in section.charts}
    return Template(asset("report.html")).substitute(
        title=escape(title),
        styles=asset("charts.css") + asset("report.css"),
        verdict=escape(verdict.sentence),
        basis=escape(verdict.basis),
        facts="\n".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(what)}</td></tr>" for name, what in facts),
        notes="\n".join(f"<p class=note>{escape(note)}</p>" for note in notes),
        contents="\n".join(
            f'<a href="#section-{number}">{escape(section.title)}</a>' for number, section in enumerate(sections)
        ),
        sections="\n".join(_section(number, section) for number, section in enumerate(sections)),
        data=_script_data({"verdict": vars(verdict), "charts": charts}),
        library=_script(asset("chart.umd.min.js")),
        scripts=_script(asset("charts.js") + asset("report.js")),
    )


def _script_data(data: object) -> str:
    """JSON inside a script element: nothing in it can end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _script(text: str) -> str:
    """Source inside a script element, which it must not end."""
    assert "</script" not in text.lower()
    return text


def _section(number: int, section: ChartSection) -> str:
    figures = "\n".join(_figure(chart) for chart in section.charts)
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in section.notes)
    return f'<section id="section-{number}"><h2>{escape(section.title)}</h2>\n{figures}{notes}</section>'


def _figure(chart: Chart) -> str:
    formulas = _formulas(chart) if isinstance(chart, BarChart) else ""
    return (
        f'<figure id="chart-{escape(chart.name)}"><figcaption><h3>{escape(chart.title)}</h3>'
        f"<p>{escape(chart.caption)}</p></figcaption>\n"
        f'<div class="plot" data-chart="{escape(chart.name)}"></div>\n'
        f"{_table(chart.title, chart.table)}\n{formulas}</figure>"
    )


def _table(title: str, table: ChartTable) -> str:
    """A table in a box that scrolls, also by keyboard, if it is long or wide."""
    classes = ["" if column.unit == "words" else ' class="number"' for column in table.columns]
    head = "".join(f"<th scope=col{own}>{escape(column.name)}</th>" for own, column in zip(classes, table.columns))
    rows = "\n".join(
        "<tr>" + "".join(f"<td{own}>{escape(text)}</td>" for own, text in zip(classes, row)) + "</tr>"
        for row in table.texts()
    )
    label = escape(f"{title}, in figures")
    words = "chart-table long-words" if any(len(str(row[0])) > _LONG_WORDS for row in table.rows) else "chart-table"
    size = "scroll long" if len(table.rows) > _LONG_TABLE else "scroll"
    return (
        f'<div class="{size}" tabindex=0 role=region aria-label="{label}"><table class="{words}">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _formulas(chart: BarChart) -> str:
    items = [
        f"<dt>{escape(category)}, {escape(series.name)}</dt><dd>{'<br>'.join(map(escape, series.details[number]))}</dd>"
        for number, category in enumerate(chart.categories)
        for series in chart.series
        if series.details and series.details[number]
    ]
    if not items:
        return ""
    return f"<details class=formulas><summary>The formula behind each bar</summary><dl>{''.join(items)}</dl></details>"
