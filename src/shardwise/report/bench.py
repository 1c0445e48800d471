"""What `bench` measured, as tables, data and pictures: collectives, a step, parameter servers."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardwise.report.console import picked, spoken, table, table_of
from shardwise.report.memory_timeline import LINE, PAPER, SOFT, document, text
from shardwise.report.page import Line, Page, Piece, paged
from shardwise.spec.job import Job
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_change,
    readable_count,
    readable_rate,
    readable_seconds,
    readable_share,
)
from shardwise.spec.wiring import PairLink, Wiring

if TYPE_CHECKING:
    from shardwise.measure.collectives.request import MeasuredCollective
    from shardwise.measure.parameter_server import MeasuredWay, ServerComparison
    from shardwise.measure.step import MeasuredStep

# -- collectives -------------------------------------------------------------------------------------

COLUMNS = ("level", "collective", "algorithm", "ranks", "size_bytes", "repeats", "median_seconds", "least_seconds",
           "algorithm_bandwidth", "bus_bandwidth", "predicted_seconds", "right")  # fmt: skip
_TABLE: dict[str, Callable[[MeasuredCollective], str]] = {
    "algorithm": lambda row: spoken(row.algorithm),
    "size": lambda row: readable_bytes(row.size_bytes),
    "median": lambda row: readable_seconds(row.median_seconds),
    "least": lambda row: readable_seconds(row.least_seconds),
    "algbw": lambda row: readable_rate(row.algorithm_bandwidth),
    "busbw": lambda row: readable_rate(row.bus_bandwidth),
    "model": lambda row: "" if row.predicted_seconds is None else readable_seconds(row.predicted_seconds),
    "median/model": lambda row: f"{row.median_seconds / row.predicted_seconds:.2f}" if row.predicted_seconds else "",
    "result": lambda row: "right" if row.right else "WRONG",
}
_PAIRS: dict[str, Callable[[PairLink], str]] = {
    "between": lambda link: " and ".join(link.between),
    "bandwidth": lambda link: readable_rate(link.bandwidth),
    "latency": lambda link: readable_seconds(link.latency),
}


def measured_page(measured: Sequence[MeasuredCollective], between: Wiring | None = None) -> Page:
    tables = []
    for title, some in _groups(measured):
        rows = sorted(some, key=lambda row: (row.size_bytes, row.median_seconds))
        tables.append(table_of(title, rows, _TABLE, optional=("least", "algbw", "model")))
    if between is not None:
        slowest_first = sorted(between.links, key=lambda link: link.bandwidth)
        tables.append(table_of(f"every two of {len(between.hosts)} nodes", slowest_first, _PAIRS))
    return Page(tuple(tables))


def _groups(measured: Sequence[MeasuredCollective]) -> Iterator[tuple[str, list[MeasuredCollective]]]:
    for (level, kind, ranks), some in groupby(measured, key=lambda row: (row.level, row.kind, row.ranks)):
        yield f"{kind.replace('_', '-')} over {level}: {ranks} ranks", list(some)


def measured_data(measured: Sequence[MeasuredCollective]) -> list[dict[str, Any]]:
    return [{name: getattr(row, "kind" if name == "collective" else name) for name in COLUMNS} for row in measured]


def measured_csv(measured: Sequence[MeasuredCollective]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(measured_data(measured))
    return text.getvalue()


# -- a picture: the model's lines through the points -----------------------------------------------------

_COLOURS = ("#2f6fde", "#e2853d", "#5fa777", "#8c6bb8", "#c23b3b", "#d9b03f", "#1b2a41", "#8a94a3")
_WIDTH, _LEFT, _RIGHT = 1000, 84, 250
_TOP, _PANEL, _ROW = 86, 260, 366
_EXPLAINED = "Points: measured, the median of the slowest rank's times. Lines: the model, dashed for the backend's own."


def collectives_picture(measured: Sequence[MeasuredCollective]) -> str:
    """A panel for every collective and level, as the text of an SVG file."""
    panels = list(_groups(measured))
    height = _TOP + _ROW * len(panels)
    parts = [text(24, 34, "Collectives: time against size", 17, weight=600), text(24, 56, _EXPLAINED, 12, fill=SOFT)]
    for index, (title, some) in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT} {_TOP + index * _ROW + 30})">')
        parts += [text(0, -10, title, 13, weight=600), *_Panel(some).drawn(), "</g>"]
    return document("Collectives, time against size", _WIDTH, height, parts)


class _Panel:
    def __init__(self, measured: list[MeasuredCollective]) -> None:
        self.measured = measured
        times = [row.median_seconds for row in measured]
        times += [row.predicted_seconds for row in measured if row.predicted_seconds]
        self.sizes = _bounds([row.size_bytes for row in measured])
        self.times = _bounds(times)
        self.width = _WIDTH - _LEFT - _RIGHT

    def x(self, size: float) -> float:
        low, high = self.sizes
        return self.width * (math.log10(size) - low) / (high - low)

    def y(self, seconds: float) -> float:
        low, high = self.times
        return _PANEL * (1 - (math.log10(seconds) - low) / (high - low))

    def drawn(self) -> Iterator[str]:
        yield from self._axes()
        names = list(dict.fromkeys(row.algorithm for row in self.measured))
        for index, name in reversed(list(enumerate(names))):  # the backend's dashes over the line that they follow
            colour, hollow = _COLOURS[index % len(_COLOURS)], index >= len(_COLOURS)
            some = sorted((row for row in self.measured if row.algorithm == name), key=lambda row: row.size_bytes)
            yield from self._modelled(some, colour, dashed=name == "backend")
            for row in some:
                yield _point(self.x(row.size_bytes), self.y(row.median_seconds), colour, hollow)
            yield _point(self.width + 24, 10 + 20 * index, colour, hollow)
            yield text(self.width + 36, 14 + 20 * index, name.replace("_", " "), 12)

    def _modelled(self, some: list[MeasuredCollective], colour: str, *, dashed: bool) -> Iterator[str]:
        modelled = [(row.size_bytes, row.predicted_seconds) for row in some if row.predicted_seconds]
        if modelled:
            line = " ".join(f"{self.x(size):.1f},{self.y(seconds):.1f}" for size, seconds in modelled)
            dashes = ' stroke-dasharray="6 5"' if dashed else ""
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.7"{dashes}/>'

    def _axes(self) -> Iterator[str]:
        yield f'<rect width="{self.width}" height="{_PANEL}" fill="none" stroke="{LINE}"/>'
        for seconds in _time_ticks(*self.times):
            y = self.y(seconds)
            yield f'<line x1="0" x2="{self.width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>'
            yield text(-8, y + 4, _short(readable_seconds(seconds)), 11, anchor="end", fill=SOFT)
        low, high = (round(bound / math.log10(2)) for bound in self.sizes)
        for power in range(low, high + 1, max(1, (high - low) // 7)):
            x = self.x(2.0**power)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_PANEL}" stroke="{LINE}"/>'
            yield text(x, _PANEL + 18, _short(readable_bytes(2**power)), 11, anchor="middle", fill=SOFT)
        yield text(self.width / 2, _PANEL + 36, "size of the collective", 11, anchor="middle", fill=SOFT)


def _time_ticks(low: float, high: float) -> list[float]:
    """Seconds between 10^low and 10^high: powers of ten, or finer steps if these are fewer than two."""
    powers = range(math.floor(low), math.floor(high) + 1)
    for steps in ((1,), (1, 2, 5), range(1, 10)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= math.log10(step) + power <= high]
        if len(ticks) > 1:
            break
    return ticks


def _short(figure: str) -> str:
    """A figure without trailing zeros: 1 ms for 1.00 ms."""
    number, unit = figure.split(" ")
    return f"{float(number):g} {unit}"


def _point(x: float, y: float, colour: str, hollow: bool) -> str:
    fill = PAPER if hollow else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(max(min(values), 1e-9)), math.log10(max(*values, 1e-9))
    return low - 0.05, max(high, low + 0.5) + 0.05


# -- a step beside its prediction --------------------------------------------------------------------


@paged
def step_page(measured: MeasuredStep) -> Iterator[Piece | str]:
    predicted, reserved = measured.analysis, measured.reserved_bytes
    rows = [
        ("step, median", readable_seconds(measured.median_seconds), readable_seconds(predicted.predicted_seconds),
         readable_change(measured.seconds_error)),
        ("shortest", readable_seconds(min(measured.step_seconds)), "", ""),
        ("longest", readable_seconds(max(measured.step_seconds)), "", ""),
        ("tokens/s", readable_count(measured.tokens_per_second), readable_count(predicted.tokens_per_second), ""),
        ("MFU", readable_share(measured.mfu), readable_share(predicted.mfu), ""),
        ("peak memory", readable_bytes(measured.peak_bytes), readable_bytes(measured.predicted_bytes),
         readable_change(measured.memory_error)),
        *([] if reserved is None else [("reserved memory", readable_bytes(reserved), "", "")]),
    ]  # fmt: skip
    title = f"{_job_words(measured.job)}, on {measured.device_name}: {counted(len(measured.step_seconds), 'step')}"
    yield table(title, ("", "measured", "predicted", "error"), rows)
    yield f"Loss {measured.first_loss:.3f} in the first step, {measured.last_loss:.3f} in the last."
    yield f"CUDA graphs: {measured.graphs}."
    yield f"Attention: {measured.attention}."


def step_data(measured: MeasuredStep) -> dict[str, Any]:
    """Every figure, in SI units; ``job`` is the job that ran."""
    return {
        **picked(measured, "job", device="device_name", seconds="median_seconds"),
        "least_seconds": min(measured.step_seconds),
        "most_seconds": max(measured.step_seconds),
        **picked(measured, "step_seconds", "tokens_per_second", "mfu", "peak_bytes", "reserved_bytes"),
        **picked(measured.analysis, "predicted_seconds", predicted_tokens_per_second="tokens_per_second"),
        "predicted_mfu": measured.analysis.mfu,
        **picked(measured, "predicted_bytes", "seconds_error", "memory_error", "first_loss", "last_loss"),
        **picked(measured, "graphs", "attention"),
    }


def _job_words(job: Job) -> str:
    training, strategy = job.training, job.strategy
    batch = f"{job.sequences:,} × {training.seq:,} tokens"
    if job.microbatches > 1:
        batch += f" in {counted(job.microbatches, 'microbatch')}"
    parts = [job.model.name or "a model", batch, training.precision]
    parts += [] if strategy.recompute == "none" else [f"recompute {strategy.recompute}"]
    return ", ".join([*parts, *(["compiled"] if training.compile else [])])


# -- parameter servers beside an all-reduce ----------------------------------------------------------

_SHOWN_STEPS = 10
_WAY_COLOURS = ("#1f6feb", "#d1242f", "#2da44e")
_LOSS_WIDTH, _LOSS_HEIGHT, _LOSS_LEFT, _LOSS_TOP = 640, 360, 60, 50


@paged
def servers_page(comparison: ServerComparison) -> Iterator[Piece | str]:
    request, plan = comparison.request, comparison.request.plan
    model = request.job.model.name
    servers = counted(plan.servers, "server")
    yield Line(f"{counted(plan.workers, 'worker')} and {servers}: {model}, {plan.elements:,} weights", "bold")
    predicted = (float(comparison.price.all_reduce.seconds), comparison.price.synchronous, comparison.price.unhindered)
    rows = [
        (
            way.name,
            f"{way.losses[0]:.3f}",
            f"{way.losses[-1]:.3f}",
            f"{comparison.difference(way):.1e}",
            readable_seconds(way.step_seconds),
            readable_seconds(max(0.0, way.step_seconds - way.compute_seconds)),
            readable_seconds(seconds),
        )
        for way, seconds in zip(comparison.ways, predicted)
    ]
    names = ("way", "first loss", "last loss", "weights differ", "step", "not computing", "exchange priced")
    yield table("Three ways to share gradients", names, rows, optional=("first loss", "exchange priced"))
    yield table("Bytes at the servers, in all steps", ("", "planned", "counted"), list(_bytes(comparison)))
    ahead = comparison.widest_gap(comparison.asynchronous)
    gaps = f"at most {ahead} steps ahead of the slowest (bound {request.staleness})"
    missed = statistics.fmean(_missed(comparison.asynchronous))
    yield f"Asynchronous workers were {gaps}; a gradient came {missed:.1f} updates after its weights on average."
    yield "Weights differ: the largest difference from the all-reduce's, relative to the largest weight."
    yield "Not computing: of a step, what the busiest worker exchanged or waited. Priced: with nobody to wait for.\n"
    yield _losses(comparison)


def _bytes(comparison: ServerComparison) -> Iterator[tuple[str, str, str]]:
    planned = comparison.planned_bytes()
    for way in (comparison.synchronous, comparison.asynchronous):
        for server, (plan, counted_bytes) in enumerate(zip(planned, comparison.measured_bytes(way))):
            for what, first, second in zip(("gradients in", "weights out"), plan, counted_bytes):
                number = f" {server}" if len(planned) > 1 else ""
                yield f"{way.name}, server{number}, {what}", f"{first:,}", f"{second:,}"


def _missed(way: MeasuredWay) -> list[int]:
    return [updates for server in way.servers for updates in server.missed]


def _losses(comparison: ServerComparison) -> Piece:
    steps = comparison.request.steps
    shown = sorted({round(1 + (steps - 1) * index / (_SHOWN_STEPS - 1)) for index in range(_SHOWN_STEPS)})
    rows = [(f"{step}", *(f"{way.losses[step - 1]:.3f}" for way in comparison.ways)) for step in shown]
    return table("Loss by step", ("step", *(way.name for way in comparison.ways)), rows)


def servers_data(comparison: ServerComparison) -> dict[str, Any]:
    request, plan = comparison.request, comparison.request.plan
    return {
        **picked(plan, "workers", "servers"),
        **picked(request, "staleness", "steps"),
        "weights": plan.elements,
        "planned_bytes": [{"received": received, "sent": sent} for received, sent in comparison.planned_bytes()],
        "priced": {
            "all_reduce_seconds": float(comparison.price.all_reduce.seconds),
            "synchronous_seconds": comparison.price.synchronous,
            "saturated_seconds": comparison.price.saturated,
            "unhindered_seconds": comparison.price.unhindered,
        },
        "ways": [
            {
                "way": way.name,
                **picked(way, "losses", "step_seconds", "compute_seconds"),
                "weights_differ": comparison.difference(way),
                "bytes": [{"received": received, "sent": sent} for received, sent in comparison.measured_bytes(way)],
                "widest_gap": comparison.widest_gap(way),
                "missed_updates": statistics.fmean(_missed(way)) if way.servers else 0.0,
            }
            for way in comparison.ways
        ],
        "faults": comparison.faults,
    }


def losses_picture(comparison: ServerComparison) -> str:
    every = [loss for way in comparison.ways for loss in way.losses]
    low, high = min(every), max(every)
    spread, steps = max(high - low, 1e-9), max(1, comparison.request.steps - 1)
    wide, tall = _LOSS_WIDTH - _LOSS_LEFT - 150, _LOSS_HEIGHT - _LOSS_TOP - 50

    def point(step: int, loss: float) -> str:
        return f"{_LOSS_LEFT + wide * step / steps:.1f},{_LOSS_TOP + tall * (high - loss) / spread:.1f}"

    parts = [text(_LOSS_LEFT, 28, "Loss by step", 15, 600)]
    parts.append(f'<rect x="{_LOSS_LEFT}" y="{_LOSS_TOP}" width="{wide}" height="{tall}" fill="none" stroke="{LINE}"/>')
    for loss, y in ((high, _LOSS_TOP), (low, _LOSS_TOP + tall)):
        parts.append(text(_LOSS_LEFT - 8, y + 4, f"{loss:.3f}", 11, fill=SOFT, anchor="end"))
    parts.append(
        text(_LOSS_LEFT + wide / 2, _LOSS_TOP + tall + 26, f"steps, 1 to {comparison.request.steps}", 11, fill=SOFT)
    )
    for index, (way, colour) in enumerate(zip(comparison.ways, _WAY_COLOURS)):
        line = " ".join(point(step, loss) for step, loss in enumerate(way.losses))
        # Synchronous servers are dashed: the same curve as the all-reduce.
        dashes = ' stroke-dasharray="6 5"' if index == 1 else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(text(_LOSS_LEFT + wide + 14, _LOSS_TOP + 16 + 20 * index, way.name, 12, fill=colour))
    return document("Loss of an all-reduce and of parameter servers", _LOSS_WIDTH, _LOSS_HEIGHT, parts)
