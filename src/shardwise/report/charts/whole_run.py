"""More devices, other networks, and the whole run: scaling efficiency, topologies, days and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.cost.campaign import Campaign
from shardwise.cost.step.scaling import ScalingRow
from shardwise.cost.step.topologies import PricedTopology
from shardwise.report.campaign import SHARES
from shardwise.report.charts.chart import (
    BarChart,
    BarSeries,
    ChartAxis,
    LineChart,
    LineSeries,
    Tone,
    chart_table,
    stacked_bars,
)
from shardwise.report.part_names import DIMENSIONS
from shardwise.spec.units import counted, readable_count, readable_duration, readable_money, readable_share

_SCALING: dict[str, Tone] = {"strong": "blue", "weak": "orange"}
_MEANS = {"strong": "fixed batch", "weak": "batch grows with the devices"}
_TONES: dict[str, Tone] = {"training": "blue", "checkpoints": "gold", "restarts": "orange", "lost": "red"}


def scaling_chart(scaling: Mapping[str, Sequence[ScalingRow]]) -> LineChart:
    """Efficiency over the number of devices, strong and weak."""
    return LineChart(
        name="scaling",
        title="Scaling over data parallelism",
        caption="Strong: T1/(N·TN) at a fixed batch. Weak: T1/TN at a batch that grows with N.",
        x=ChartAxis("devices", "number", is_log=True),
        y=ChartAxis("efficiency", "share"),
        series=tuple(
            LineSeries(
                f"{kind}: {_MEANS[kind]}",
                tuple((float(row.devices), row.efficiency) for row in rows),
                _SCALING[kind],
            )
            for kind, rows in scaling.items()
        ),
        table=chart_table(
            {"scaling": "words", "devices": "number", "sequences": "number", "step": "seconds", "tokens/s": "tokens/s",
             "efficiency": "share", "exposed": "share", "memory": "words"},
            [
                (kind, row.devices, row.sequences, row.predicted_seconds, row.tokens_per_second, row.efficiency,
                 row.exposed_share, row.fit)
                for kind, rows in scaling.items() for row in rows
            ],
        ),
    )  # fmt: skip


def campaign_chart(run: Campaign) -> BarChart:
    """How the whole run spends its days, and what it costs."""
    shares = {name: share for name, share in run.shares.items() if share > 0}
    money = "" if run.cost is None else f", {readable_money(run.cost, run.currency)}"
    return BarChart(
        name="campaign",
        title=f"The whole run: {readable_count(run.tokens)} tokens in {readable_duration(run.seconds)}{money}",
        caption=f"{readable_share(run.goodput)} of the time moves training forward.",
        axis=ChartAxis("time", "seconds"),
        categories=(counted(run.devices, "device"),),
        series=tuple(BarSeries(SHARES[name], (share * run.seconds,), _TONES[name]) for name, share in shares.items()),
        is_stacked=True,
        table=chart_table({"figure": "words", "value": "words"}, _campaign_rows(run, shares)),
    )


def _campaign_rows(run: Campaign, shares: Mapping[str, float]) -> list[tuple[str, str]]:
    rows = [(SHARES[name], readable_duration(share * run.seconds)) for name, share in shares.items()]
    rows += [("whole run, wall time", readable_duration(run.seconds)), ("days", f"{run.days:,.2f}")]
    rows.append(("device-hours", readable_count(run.device_hours)))
    if run.cost is not None:
        rows.append(("cost", readable_money(run.cost, run.currency)))
    if math.isfinite(run.between_interruptions):
        rows.append(("interruptions", f"{run.interruptions:,.{0 if run.interruptions >= 10 else 2}f}"))
    return [*rows, ("goodput", readable_share(run.goodput))]


_DIMENSION_TONES: dict[str, Tone] = {
    "tp": "orange",
    "cp": "pink",
    "ep": "purple",
    "pp": "teal",
    "dp": "green",
    "offload": "gold",
}


def topologies_chart(topologies: Sequence[PricedTopology]) -> BarChart:
    names = list(dict.fromkeys(name for topology in topologies for name in topology.dimensions))
    exposed = {
        name: tuple(
            topology.dimensions[name].exposed_seconds if name in topology.dimensions else 0.0 for topology in topologies
        )
        for name in names
    }
    others = tuple(topology.predicted_seconds - sum(own) for topology, *own in zip(topologies, *exposed.values()))
    series = (
        BarSeries("computation and all else", others, "navy"),
        *(
            BarSeries(f"{DIMENSIONS[name]}, exposed", seconds, _DIMENSION_TONES[name])
            for name, seconds in exposed.items()
        ),
    )
    fastest = min(topologies, key=lambda topology: topology.predicted_seconds)
    return stacked_bars(
        "topology",
        ChartAxis("predicted step", "seconds"),
        [topology.topology for topology in topologies],
        series,
        total="in all",
        name="topologies",
        title="The same job on other networks",
        caption=(
            f"The fastest: {fastest.topology}, {fastest.network}. Flat ones join all devices by the outermost link."
        ),
    )
