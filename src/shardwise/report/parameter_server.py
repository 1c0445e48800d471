"""Parameter servers beside an all-reduce: tables, plain data, and the losses as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.report.console import table
from shardwise.report.page import Line, Piece, paged
from shardwise.report.svg import LINE, SOFT, document, text
from shardwise.spec.units import counted, readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.parameter_server import MeasuredWay, ServerComparison

_SHOWN_STEPS = 10
_COLOURS = ("#1f6feb", "#d1242f", "#2da44e")
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 360, 60, 50


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
        "workers": plan.workers,
        "servers": plan.servers,
        "staleness": request.staleness,
        "steps": request.steps,
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
                "losses": list(way.losses),
                "step_seconds": way.step_seconds,
                "compute_seconds": way.compute_seconds,
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
    """The loss of each way against the step."""
    every = [loss for way in comparison.ways for loss in way.losses]
    low, high = min(every), max(every)
    spread, steps = max(high - low, 1e-9), max(1, comparison.request.steps - 1)
    wide, tall = _WIDTH - _LEFT - 150, _HEIGHT - _TOP - 50

    def point(step: int, loss: float) -> str:
        return f"{_LEFT + wide * step / steps:.1f},{_TOP + tall * (high - loss) / spread:.1f}"

    parts = [text(_LEFT, 28, "Loss by step", 15, 600)]
    parts.append(f'<rect x="{_LEFT}" y="{_TOP}" width="{wide}" height="{tall}" fill="none" stroke="{LINE}"/>')
    for loss, y in ((high, _TOP), (low, _TOP + tall)):
        parts.append(text(_LEFT - 8, y + 4, f"{loss:.3f}", 11, fill=SOFT, anchor="end"))
    parts.append(text(_LEFT + wide / 2, _TOP + tall + 26, f"steps, 1 to {comparison.request.steps}", 11, fill=SOFT))
    for index, (way, colour) in enumerate(zip(comparison.ways, _COLOURS)):
        line = " ".join(point(step, loss) for step, loss in enumerate(way.losses))
        dashes = (
            ' stroke-dasharray="6 5"' if index == 1 else ""
        )  # synchronous servers: the same curve as the all-reduce
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(text(_LEFT + wide + 14, _TOP + 16 + 20 * index, way.name, 12, fill=colour))
    return document("Loss of an all-reduce and of parameter servers", _WIDTH, _HEIGHT, parts)
