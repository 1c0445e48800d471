"""Pictures in a terminal: no line is too long, nothing needs a colour, and every bar has its figure."""

from __future__ import annotations

import re

import pytest

from cli.running import error_line, run
from report.whole import drawn
from shardwise.api.analysis import analyze
from shardwise.report.charts.chart import (
    BarChart,
    BarSeries,
    ChartAxis,
    ChartLimit,
    LineChart,
    LineSeries,
    SpanChart,
    SpanKind,
    chart_table,
    readable,
)
from shardwise.report.charts.devices import memory_chart
from shardwise.report.plot import Drawing
from tables import table

FLAGS = "--model llama3-8b --cluster dgx-h100:2 --tp 2 --pp 2 --zero 1 --global-batch 32 --seq 4096"
NOTHING = chart_table({"": "words"}, [])


@table("columns", [40, 60, 80, 132])
def test_no_line_is_longer_than_the_console(columns: int) -> None:
    more = ("--scaling", "--memory-over-time", "--ranks", "--compare-topologies", "--tokens", "1T")
    shown = run("analyze", *FLAGS.split(), "--plot", *more, columns=columns)
    assert shown.status == 0 and "\x1b" not in shown.out
    assert max(map(len, shown.out.splitlines())) <= columns
    for title in ("Where the step", "Memory of one device", "Memory over the step", "Pipeline of one step",
                  "Communication of each", "Which level", "Roofline", "Scaling", "The same job on",
                  "16 ranks on 2 nodes", "The whole run"):  # fmt: skip
        assert title in shown.out


@pytest.mark.slow
def test_a_plan_in_pictures(tmp_path: object) -> None:
    asked = "plan --model llama3-8b --cluster dgx-h100:1 --global-batch 64 --seq 4096 --out - --plot"
    shown = run(*asked.split(), columns=80)
    assert shown.status == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    assert all(
        title in shown.out for title in ("Where the step of the best", "Memory of the best", "Time against memory")
    )


def test_pictures_are_not_for_machines() -> None:
    line = error_line(run("analyze", *FLAGS.split(), "--plot", "--json"))
    assert "--json" in line and "--plot" in line
    mixed = run("plan", "--model", "llama3-8b", "--cluster", "dgx-h100:1+dgx-a100:1", "--plot", "--out", "-")
    assert error_line(mixed).startswith("--plot: is not supported for several kinds of nodes")


def test_every_bar_has_its_figure_and_every_mark_a_name() -> None:
    found = analyze(model="llama3-8b", cluster="dgx-h100:2", tp=2, pp=2, zero=1, global_batch=32, seq=4096)
    chart = memory_chart(found.assessment.analysis)
    text = drawn(Drawing(chart), width=80)
    for number, name in enumerate(chart.categories):
        total = readable(sum(one.values[number] for one in chart.series), "bytes")
        assert re.search(rf"{re.escape(name)} .*{re.escape(total)}", text)
    assert all(one.name in text for one in chart.series if any(one.values))


def bars(values: list[tuple[float, ...]], **more: object) -> BarChart:
    names = tuple(f"rank {number}" for number in range(len(values[0])))
    series = tuple(BarSeries(f"part {number}", one, "blue") for number, one in enumerate(values))
    axis = ChartAxis("bytes", "bytes")
    settings = {"is_stacked": True, **more}
    return BarChart(name="b", title="t", caption="c", table=NOTHING, axis=axis, categories=names, series=series,
                    **settings)  # type: ignore[arg-type]  # fmt: skip


def test_a_bar_is_as_long_as_its_figure() -> None:
    text = drawn(Drawing(bars([(4096.0, 2048.0), (0.0, 2048.0)])), width=60)
    first, second = (line for line in text.splitlines() if line.startswith("rank"))
    whole, half = first.count("█"), second.count("█")
    assert abs(whole - 2 * half) <= 1 and whole == half + second.count("▒") > 40


def test_a_limit_is_drawn_unless_it_would_flatten_the_bars() -> None:
    near, far = (drawn(Drawing(bars([(1024.0,)], limits=(ChartLimit("device", size),))), width=60)
                 for size in (2048.0, 1e9))  # fmt: skip
    assert "│ device, 2.00 KiB" in near and "device" not in far
    line = next(line for line in near.splitlines() if line.startswith("rank"))
    assert line.index("│") > 1.8 * line.rindex("█") - 10


def test_what_is_too_short_for_a_character_is_still_there() -> None:
    text = drawn(Drawing(bars([(1e12, 1.0)])), width=60)
    assert next(line for line in text.splitlines() if line.startswith("rank 1")).count("▏") == 1


def test_a_line_goes_from_its_first_point_to_its_last() -> None:
    chart = LineChart(
        name="l", title="t", caption="c", table=NOTHING, x=ChartAxis("step", "number"), y=ChartAxis("loss", "loss"),
        series=(LineSeries("loss", ((0.0, 4.0), (100.0, 0.0)), "blue"),),
    )  # fmt: skip
    lines = drawn(Drawing(chart), width=60).splitlines()
    canvas = [line for line in lines if "│" in line or "┤" in line]
    assert canvas[0].lstrip().startswith("4.000 ┤a") and canvas[-1].rstrip().endswith("a")
    assert "0.000 ┤" in canvas[-1] and any("⠀" < mark < "⣿" for line in canvas for mark in line)


@pytest.mark.parametrize("width", [30, 80])
def test_a_pipeline_shows_who_waits(width: int) -> None:
    spans = ((0, 0.0, 5.0, 0, "F0"), (0, 5.0, 10.0, 1, "B0"), (1, 5.0, 10.0, 0, "F0"))
    chart = SpanChart(
        name="s", title="t", caption="c", table=NOTHING, axis=ChartAxis("seconds", "seconds"), 
        rows=("rank 0", "rank 1"),
        kinds=(SpanKind("forward", "blue"), SpanKind("backward", "orange")), spans=spans, end=10.0,
    )  # fmt: skip
    first, second = (line for line in drawn(Drawing(chart), width=width).splitlines() if line.startswith("rank"))
    room = width - len("rank 0 ")
    assert first == f"rank 0 {'█' * (room // 2)}".ljust(7 + room, "▒") or abs(first.count("█") - room // 2) <= 1
    assert "·" not in first and abs(second.count("·") - room // 2) <= 1
