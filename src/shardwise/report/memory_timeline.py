"""Memory over a step: a table of the peak of every pipeline rank, plain data, and a picture (SVG)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardwise.cost.memory.device import DeviceMemory
from shardwise.report.console import picked, table_of
from shardwise.report.tables import FittedTable
from shardwise.report.verdict import MEMORY_PARTS
from shardwise.spec.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from shardwise.cost.memory.timeline import MemoryOverTime, MemorySpan, RankMemory


_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 36  # of a curve in the table
_NAMED_PARTS = 2


def memory_table(memory: MemoryOverTime) -> FittedTable:
    """A row per pipeline rank; all curves have one scale."""
    totals = [span.held.total for rank in memory.ranks for span in rank.spans]
    low, high = min(totals), max(totals)
    capacity = memory.job.cluster.device.usable_memory
    title = (
        f"Memory over the step of {readable_seconds(memory.step_seconds)}, "
        f"{_BLOCKS[0]} {readable_bytes(low)} to {_BLOCKS[-1]} {readable_bytes(high)}"
    )
    columns: dict[str, Callable[[RankMemory], str]] = {
        "rank": lambda rank: str(rank.pipeline_rank),
        "peak during": lambda rank: rank.peak.during,
        "held by": lambda rank: held_by(rank.peak.held),
        "over the step": lambda rank: sparkline(rank, memory.step_seconds, low, high),
        "peak": lambda rank: readable_bytes(rank.peak.held.total),
        "of device": lambda rank: f"{rank.peak.held.total / capacity:.0%}",
        "at": lambda rank: readable_seconds(rank.peak.start_seconds),
    }
    return table_of(title, memory.ranks, columns, numbers_from=3, optional=("over the step", "of device"))


def sparkline(rank: RankMemory, step_seconds: float, low: float, high: float) -> str:
    """The most held in each of equal parts of the step, as blocks between ``low`` and ``high``."""
    heights = [span.held.total for span in sampled(rank, step_seconds, _SPARKS)]
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((height - low) * scale)] for height in heights)


def sampled(rank: RankMemory, step_seconds: float, columns: int) -> list[MemorySpan]:
    """The span with the most memory in each of ``columns`` equal parts of the step, so that no peak is lost."""
    width = step_seconds / columns
    most: list[MemorySpan | None] = [None] * columns
    for span in rank.spans:
        first, last = int(span.start_seconds / width), int(span.end_seconds / width)
        for column in range(min(first, columns - 1), min(last, columns - 1) + 1):
            held = most[column]
            if held is None or span.held.total > held.held.total:
                most[column] = span
    # A rank that ends early waits for the others with what it held last.
    return [span or rank.spans[-1] for span in most]


def held_by(memory: DeviceMemory) -> str:
    parts = sorted(((getattr(memory, part), part) for part in memory.PARTS), reverse=True)[:_NAMED_PARTS]
    return ", ".join(f"{MEMORY_PARTS[part]} {held / memory.total:.0%}" for held, part in parts if held)


def memory_over_time_data(memory: MemoryOverTime) -> dict[str, Any]:
    return {
        "step_seconds": memory.step_seconds,
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "peak": {**picked(rank.peak, seconds="start_seconds", during="during"), **rank.peak.held.to_dict()},
                "spans": [
                    picked(span, "start_seconds", "end_seconds", "during", total_bytes="held.total")
                    for span in rank.spans
                ],
            }
            for rank in memory.ranks
        ],
    }


# -- a picture: a stacked area per pipeline rank, all to one scale -------------------------------------------

# The colours of docs/make_pictures.py: model states blue, what comes and goes warm.
_LIMIT = "#c23b3b"
_BANDS = (
    ("framework and buffers", ("allowance", "communication"), "#aab2bf"),
    ("optimizer states", ("optimizer",), "#1f4fa8"),
    ("gradients", ("gradients",), "#2f6fde"),
    ("weights", ("weights",), "#8fb5f3"),
    ("activations", ("activations",), "#e2853d"),
    ("recomputed layer", ("recomputed",), "#d9b03f"),
    ("gathered layers", ("gathered",), "#5fa777"),
    ("logits, temporary", ("temporary",), "#8c6bb8"),
)
_WIDTH, _LEFT, _GAP = 1000, 64, 76
_TOP, _PANEL_HEIGHT, _ROW_HEIGHT = 122, 150, 222
_MOST_PANELS = 8
_COLUMNS = 320  # samples across a panel


def memory_picture(memory: MemoryOverTime) -> str:
    ranks = _shown(memory)
    across = min(2, len(ranks))
    width = (_WIDTH - _LEFT - 24 - (across - 1) * _GAP) / across
    height = _TOP + -(-len(ranks) // across) * _ROW_HEIGHT - 18
    highest, capacity = memory.fullest.peak.held.total, float(memory.job.cluster.device.usable_memory)
    # The device's capacity is drawn unless more than half of it stays empty.
    scale = _Scale(memory.step_seconds, max(highest, capacity) * 1.06 if 2 * highest > capacity else highest * 1.12)
    parts = [*_heading(memory, len(ranks)), *_legend(memory)]
    for index, rank in enumerate(ranks):
        left, top = _LEFT + index % across * (width + _GAP), _TOP + index // across * _ROW_HEIGHT
        parts.append(f'<g transform="translate({left:.1f} {top:.1f})">')
        parts += [*_panel(rank, scale, width), *_limit(capacity, scale, width), "</g>"]
    return document("Memory over one step", _WIDTH, height, parts)


class _Scale:
    """Seconds to the right, bytes upwards, both from zero."""

    def __init__(self, seconds: float, held_bytes: float) -> None:
        self.seconds, self.held_bytes = seconds, held_bytes

    def y(self, held_bytes: float) -> float:
        return _PANEL_HEIGHT * (1 - held_bytes / self.held_bytes)


def _shown(memory: MemoryOverTime) -> list[RankMemory]:
    """All ranks of a short pipeline; of a long one some from end to end, with the fullest."""
    count = len(memory.ranks)
    if count <= _MOST_PANELS:
        return list(memory.ranks)
    spread = {round(index * (count - 1) / (_MOST_PANELS - 2)) for index in range(_MOST_PANELS - 1)}
    return [rank for index, rank in enumerate(memory.ranks) if index in spread or rank is memory.fullest]


def _heading(memory: MemoryOverTime, shown: int) -> Iterator[str]:
    job, peak = memory.job, memory.fullest.peak.held
    capacity = readable_bytes(job.cluster.device.usable_memory)
    yield text(24, 34, f"Memory of one device over a step: at most {readable_bytes(peak.total)} of {capacity}", 17, 600)
    degrees = " × ".join(f"{name} {job.strategy.degree(name)}" for name in job.strategy.order)
    ranks = f", {shown} of {job.strategy.pp} pipeline ranks" if shown < job.strategy.pp else ""
    schedule = f", {job.strategy.schedule}" if job.strategy.pp > 1 else ""
    said = f"{job.model.name} on {job.cluster.devices} × {job.cluster.device.name}, {degrees}{schedule}"
    yield text(24, 56, f"{said}, {job.microbatches} microbatches{ranks}", 13, fill=SOFT)


def _legend(memory: MemoryOverTime) -> Iterator[str]:
    """Only what some rank holds at some time."""
    x = 24.0
    held = [span.held for rank in memory.ranks for span in rank.spans]
    for name, parts, colour in _BANDS:
        if any(_amount(memory, parts) for memory in held):
            yield f'<rect x="{x:.1f}" y="68" width="11" height="11" fill="{colour}"/>'
            yield text(x + 16, 78, name, 12, fill=SOFT)
            x += 34 + 6.1 * len(name)


def _panel(rank: RankMemory, scale: _Scale, width: float) -> Iterator[str]:
    peak = rank.peak
    said = f"{readable_bytes(peak.held.total)} at {readable_seconds(peak.start_seconds)}, {peak.during}"
    yield text(0, -10, f"rank {rank.pipeline_rank}: {said}", 13, 600)
    yield from _axes(scale, width)
    samples = [span.held for span in sampled(rank, scale.seconds, _COLUMNS)]
    below = [0.0] * _COLUMNS
    for _, parts, colour in _BANDS:
        above = [low + _amount(held, parts) for low, held in zip(below, samples)]
        if above != below:
            outline = _outline(above, scale, width) + _outline(below, scale, width)[::-1]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
            yield f'<polygon points="{points}" fill="{colour}"/>'
        below = above
    x, y = width * peak.start_seconds / scale.seconds, scale.y(peak.held.total)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{INK}" stroke="{PAPER}" stroke-width="1.2"/>'


def _outline(levels: list[float], scale: _Scale, width: float) -> list[tuple[float, float]]:
    """The corners of a staircase that is level within each sample."""
    corners, start = [], 0
    for level, run in groupby(levels):
        end = start + len(list(run))
        corners += [(width * start / len(levels), scale.y(level)), (width * end / len(levels), scale.y(level))]
        start = end
    return corners


def _limit(capacity: float, scale: _Scale, width: float) -> Iterator[str]:
    """A line at the device's capacity, if the picture reaches it."""
    if capacity <= scale.held_bytes:
        y = scale.y(capacity)
        yield f'<path d="M0 {y:.1f}H{width:.1f}" stroke="{_LIMIT}" stroke-width="1.3" stroke-dasharray="5 4"/>'
        yield text(width, y + 13, f"device, {readable_bytes(capacity)}", 11, fill=_LIMIT, anchor="end")


def _axes(scale: _Scale, width: float) -> Iterator[str]:
    byte_unit, byte_name = _unit(scale.held_bytes, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))
    second_unit, second_name = _unit(scale.seconds, ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds")))
    for tick in _ticks(scale.held_bytes / byte_unit, 4):
        y = scale.y(tick * byte_unit)
        yield f'<path d="M0 {y:.1f}H{width:.1f}" stroke="{LINE}"/>'
        yield text(-7, y + 4, f"{tick:g}", 11, fill=SOFT, anchor="end")
    for tick in _ticks(scale.seconds / second_unit, 6):
        x = width * tick * second_unit / scale.seconds
        yield f'<path d="M{x:.1f} {_PANEL_HEIGHT}v4" stroke="{SOFT}"/>'
        yield text(x, _PANEL_HEIGHT + 16, f"{tick:g}", 11, fill=SOFT, anchor="middle")
    yield f'<path d="M0 {_PANEL_HEIGHT}H{width:.1f}" stroke="{SOFT}"/>'
    yield text(width / 2, _PANEL_HEIGHT + 32, f"{second_name} into the step", 11, fill=SOFT, anchor="middle")
    upright = text(0, 0, byte_name, 11, fill=SOFT, anchor="middle")
    yield f'<g transform="translate(-38 {_PANEL_HEIGHT / 2}) rotate(-90)">{upright}</g>'


def _unit(amount: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest unit of which there are at least two."""
    return next((unit for unit in units if amount >= 2 * unit[0]), units[-1])


def _ticks(top: float, wanted: int) -> list[float]:
    """Round numbers from zero: about ``wanted`` steps of 1, 2 or 5 times a power of ten."""
    rough = top / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= 0.75 * rough)
    return [index * step for index in range(int(top / step) + 1)]


def _amount(held: DeviceMemory, parts: tuple[str, ...]) -> float:
    return float(sum(getattr(held, part) for part in parts))


# -- SVG on paper of its own, also for the pictures of `bench` ---------------------------------------


INK, SOFT, LINE, PAPER = "#1f2430", "#5b6472", "#dde1e7", "#ffffff"


def document(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img"><title>{title}</title>'
        f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>' + "\n".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, what: str, size: int, weight: int = 400, fill: str = INK, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(what)}</text>'
    )
