"""A calibration, and a rebalanced pipeline, as pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.report.console import table, table_of
from shardwise.report.page import Piece, paged
from shardwise.spec.efficiency import MODES, PASSES, EngineKernels
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import NetworkLevel
from shardwise.spec.units import readable_bytes, readable_flops, readable_rate, readable_seconds, readable_share

if TYPE_CHECKING:
    from shardwise.measure.calibrate.run import Calibration
    from shardwise.measure.recut import Recut


@paged
def calibration_page(calibration: Calibration, before: Cluster, written: Path) -> Iterator[Piece | str]:
    yield table("Device", ("", "before", "measured"), _device_rows(before, calibration.cluster))
    own = calibration.cluster.device.efficiency.own
    if own is not None:
        yield table("Our engine's kernels", ("", "eager", "compiled"), _mode_rows(own))
        yield table("", ("", "measured"), _engine_rows(own))
    pairs = [(old, new) for old, new in zip(before.levels, calibration.cluster.levels) if new.width > 1]
    if pairs:
        yield table_of("Network", (level for pair in pairs for level in _levels(*pair)), _LEVEL_COLUMNS, numbers_from=2)
    rows = [
        (
            residual.what,
            str(residual.figures),
            readable_share(residual.median_error),
            readable_share(residual.worst_error),
        )
        for residual in calibration.residuals
    ]
    if rows:
        yield table("How well the model explains what was measured", ("", "figures", "median", "worst"), rows)
    for slow in calibration.far_off:
        yield f"Slow: {slow}."
    yield f"Written: {written}. shardwise plan --cluster {written} plans with it."


def _device_rows(before: Cluster, after: Cluster) -> list[tuple[str, str, str]]:
    measured_kernels = after.device.efficiency.own is not None  # these have a table of their own

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
            ("fixed cost of a step", readable_seconds(own.step_seconds)),
            ("compute units taken by overlapped collectives", f"{device.units_taken.collectives:.0%}"),
        ]
        if not measured_kernels:
            rows.append(("elementwise traffic, times the minimum", f"{own.elementwise_traffic:.2f}"))
            rows.append(("kernel launch", readable_seconds(own.operator_seconds)))
        if device.vendor != "generic":
            rows.append(("matmuls slowed down by the power limit, at most", f"{own.power_slowdown - 1:.0%}"))
        rows.append(("host memory, copies", readable_rate(cluster.host.copied_bytes)))
        rows.append(("optimizer on the host", f"{cluster.host.updates / 1e9:.3g}B parameters/s"))
        for out, way in ((False, "read"), (True, "written")) if cluster.storage else ():
            first = cluster.storage[0]
            rows.append((f"{first.name}, {way}", readable_rate(first.bandwidth(1, out=out))))
        return rows

    return [(name, old, new) for (name, old), (_, new) in zip(shown(before), shown(after))]


def _mode_rows(own: EngineKernels) -> list[tuple[str, str, str]]:
    rows = [
        (f"{name}, times the bytes of one kernel", f"{own.eager.get(name, 1):.1f}", f"{own.compiled.get(name, 1):.1f}")
        for name in PASSES
    ]
    for name, seconds in (
        ("kernel start-up of a layer, on the device", own.device_starts),
        ("kernel launches of a layer, on the host", own.host_launches),
    ):
        eager, compiled = (readable_seconds(seconds(mode, rotary=True, moe=False)) for mode in MODES)
        rows.append((name, eager, compiled))
    eager, compiled = (f"{own.routing.get(mode, 0.0):.1f}" for mode in MODES)
    rows.append(("sorting tokens by expert, times one read and write", eager, compiled))
    return rows


def _engine_rows(own: EngineKernels) -> list[tuple[str, str]]:
    rows = [
        ("optimizer, times the bytes of its states", f"{own.update_traffic:.2f}"),
        ("loss, times 10 bytes of a logit", f"{own.loss_traffic:.2f}"),
        ("sliding-window attention, speed relative to full", f"{own.windowed_attention:.2f}"),
        ("attention with capped scores, speed relative to full", f"{own.capped_attention:.2f}"),
    ]
    rows += [(f"FP8 matmuls, a scale per {name}", f"{share:.0%} of the peak") for name, share in own.scaled.items()]
    return rows


def _levels(before: NetworkLevel, after: NetworkLevel) -> Iterator[tuple[str, NetworkLevel]]:
    yield "before", before
    yield "backend", after
    if after.schedules is not None:
        yield "our schedules", after.run_by_schedules()


_LEVEL_COLUMNS: dict[str, Callable[[tuple[str, NetworkLevel]], str]] = {
    "level": lambda row: row[1].name,
    "collectives": lambda row: row[0],
    "bandwidth": lambda row: readable_rate(row[1].bandwidth_per_direction * row[1].reached_share),
    "latency of a step": lambda row: readable_seconds(row[1].latency_per_step),
    "latency of a call": lambda row: readable_seconds(row[1].startup),
    "half the bandwidth at": lambda row: readable_bytes(row[1].ramp),
}


SLOW = 1.1  # times the median rank's time for a layer: faster ranks are not mentioned


@paged
def recut_page(recut: Recut, written: Path) -> Iterator[Piece | str]:
    before, after = recut.layers
    rows = [
        (str(stage), str(old), str(new), f"{new - old:+d}" if new != old else "")
        for stage, (old, new) in enumerate(zip(before, after))
    ]
    yield table("Layers of every stage", ("stage", "measured run", "new cut", ""), rows)
    slow = [(rank, times) for rank, times in enumerate(recut.slowness) if times >= SLOW]
    if slow:
        words = ", ".join(f"rank {rank} {times:.2f} times" for rank, times in slow)
        yield f"Slow ranks, by time for a layer against the median rank: {words}."
    if recut.job.strategy.order != recut.old.strategy.order:
        order = ", ".join(recut.job.strategy.order)
        yield f"Ranks are moved: order [{order}] puts slow ranks into the same stages."
    if recut.job == recut.old:
        yield "The stages are as even as whole layers allow: no other split is faster."
    else:
        old, new = readable_seconds(recut.step_seconds), readable_seconds(recut.expected_seconds)
        yield f"Step time {old} → {new} expected, {recut.gain:.2f} times faster."
    yield f"Written: {written}"
