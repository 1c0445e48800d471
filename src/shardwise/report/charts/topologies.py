"""One job on several networks: how long its step takes on each, and what it waits for there."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.cost.step.topologies import PricedTopology
from shardwise.report.charts.chart import BarChart, BarSeries, ChartAxis, Tone, stacked_bars
from shardwise.report.part_names import DIMENSIONS

_TONES: dict[str, Tone] = {
    "tp": "orange",
    "cp": "pink",
    "ep": "purple",
    "pp": "teal",
    "dp": "green",
    "offload": "gold",
}


def topologies_chart(found: Sequence[PricedTopology]) -> BarChart:
    names = list(dict.fromkeys(name for one in found for name in one.dimensions))
    exposed = {
        name: tuple(one.dimensions[name].exposed_seconds if name in one.dimensions else 0.0 for one in found)
        for name in names
    }
    others = tuple(one.predicted_seconds - sum(own) for one, *own in zip(found, *exposed.values()))
    series = (
        BarSeries("computation and all else", others, "navy"),
        *(BarSeries(f"{DIMENSIONS[name]}, exposed", seconds, _TONES[name]) for name, seconds in exposed.items()),
    )
    fastest = min(found, key=lambda one: one.predicted_seconds)
    return stacked_bars(
        "topology",
        ChartAxis("predicted step", "seconds"),
        [one.topology for one in found],
        series,
        total="in all",
        name="topologies",
        title="The same job on other networks",
        caption=(
            f"The fastest: {fastest.topology}, {fastest.network}. Flat ones join all devices by the outermost link."
        ),
    )
