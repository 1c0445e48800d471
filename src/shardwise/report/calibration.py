"""A calibration as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.report.console import table
from shardwise.report.page import Piece, paged
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import readable_bytes, readable_flops, readable_rate, readable_seconds, readable_share

if TYPE_CHECKING:
    from shardwise.measure.calibrate.run import Calibration


@paged
def calibration_page(found: Calibration, before: Cluster, written: Path) -> Iterator[Piece | str]:
    yield table("Device", ("", "before", "measured"), _device_rows(before, found.cluster))
    pairs = [(old, new) for old, new in zip(before.levels, found.cluster.levels) if new.width > 1]
    levels = [row for pair in pairs for row in _level_rows(*pair)]
    if levels:
        columns = (
            "level",
            "collectives",
            "bandwidth",
            "latency of a step",
            "latency of a call",
            "half the bandwidth at",
        )
        yield table("Network", columns, levels, numbers_from=2)
    rows = [
        (one.what, str(one.figures), readable_share(one.median_error), readable_share(one.worst_error))
        for one in found.residuals
    ]
    if rows:
        yield table("How well the model explains what was measured", ("", "figures", "median", "worst"), rows)
    for slow in found.far_off:
        yield f"Slow: {slow}."
    yield f"Written: {written}. shardwise plan --cluster {written} plans with it."


def _device_rows(before: Cluster, after: Cluster) -> list[tuple[str, str, str]]:
    def shown(cluster: Cluster) -> list[tuple[str, str]]:
        device, own = cluster.device, cluster.device.efficiency
        data_type = "bf16" if device.vendor != "generic" else "fp32"
        reached = device.peak_flops(data_type) * own.gemm_share(data_type)
        rows = [
            (f"large matmuls, {data_type}", f"{readable_flops(reached)}/s"),
            ("inner dimension at half that rate", f"{own.gemm_rolloff:.0f}"),
            ("attention, forward", f"{readable_flops(own.attention_forward * device.peak_flops(data_type))}/s"),
            ("per attention score, beside the matmuls", readable_flops(own.score_flops)),
            ("memory", readable_rate(device.memory_bandwidth * own.memory)),
            ("elementwise traffic, times the minimum", f"{own.elementwise_traffic:.2f}"),
            ("kernel launch", readable_seconds(own.operator_seconds)),
            ("fixed cost of a step", readable_seconds(own.step_seconds)),
            ("compute units taken by overlapped collectives", f"{device.units_taken.collectives:.0%}"),
        ]
        if cluster.storage:
            rows.append((cluster.storage[0].name, readable_rate(cluster.storage[0].bandwidth(1))))
        return rows

    return [(name, old, new) for (name, old), (_, new) in zip(shown(before), shown(after))]


def _level_rows(before: NetworkLevel, after: NetworkLevel) -> list[tuple[str, ...]]:
    rows = [_level_row(before, "before"), _level_row(after, "backend")]
    if after.schedules is not None:
        rows.append(_level_row(after.run_by_schedules(), "our schedules"))
    return rows


def _level_row(level: NetworkLevel, whose: str) -> tuple[str, ...]:
    return (
        level.name,
        whose,
        readable_rate(level.bandwidth_per_direction * level.reached_share),
        readable_seconds(level.latency_per_step),
        readable_seconds(level.startup),
        readable_bytes(level.ramp),
    )
