"""The operators of a layer under the roof of their device: FLOPs per byte moved against FLOP/s."""

from __future__ import annotations

from shardwise.cost.step.operator_points import OperatorPoint, operator_points
from shardwise.cost.step.prediction import predict
from shardwise.report.charts.chart import TONES, ChartAxis, LineChart, LineSeries, Value, chart_table
from shardwise.spec.job import Job
from shardwise.spec.units import readable_flops, readable_rate, readable_share


def roofline_chart(job: Job) -> LineChart:
    """The forward pass of one microbatch on the busiest pipeline rank; the roof is the data sheet's."""
    slowest = predict(job).slowest
    view = slowest.job
    device, data_type = view.cluster.device, view.training.recipe.compute
    peak, bandwidth = device.peak_flops(data_type), device.memory_bandwidth
    points = operator_points(view, slowest.contents)
    ridge = peak / bandwidth
    low = min([ridge / 8, *(one.flops_per_byte / 2 for one in points)])
    high = max([ridge * 8, *(one.flops_per_byte * 2 for one in points)])
    roof = ((low, low * bandwidth), (ridge, peak), (high, peak))
    return LineChart(
        name="roofline",
        title=f"Roofline of {device.name}",
        caption=(
            f"The roof: {readable_rate(bandwidth)} of memory, then {readable_flops(peak)}/s in {data_type}. An "
            f"operator left of {ridge:.3g} FLOPs a byte is bound by memory. Forward pass, one layer, one microbatch."
        ),
        x=ChartAxis("FLOPs per byte moved", "count", is_log=True),
        y=ChartAxis("FLOP/s", "FLOP/s", is_log=True),
        series=(
            LineSeries("the device's roof", roof, "grey", "edge"),
            *(
                LineSeries(one.words, ((one.flops_per_byte, one.rate),), TONES[number % len(TONES)], "points",
                           (f"{one.words}: {readable_share(one.rate / peak)} of the peak",))
                for number, one in enumerate(points)
            ),
        ),
        table=chart_table(
            {"operator": "words", "FLOPs a byte": "count", "reached": "FLOP/s", "of the peak": "share",
             "seconds": "seconds"},
            [_row(one, peak) for one in points],
        ),
    )  # fmt: skip


def _row(one: OperatorPoint, peak: float) -> tuple[Value, ...]:
    return one.words, one.flops_per_byte, one.rate, one.rate / peak, one.seconds
