"""Memory over a step as a table: the peak of every pipeline rank, when it is and what holds it; and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.cost.memory.device import DeviceMemory
from shardwise.report.console import table
from shardwise.report.part_names import MEMORY_PARTS
from shardwise.report.tables import FittedTable
from shardwise.spec.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from shardwise.cost.memory.timeline import MemoryOverTime, MemorySpan, RankMemory

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS = 36
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
    rows = [
        (
            str(rank.pipeline_rank),
            rank.peak.during,
            held_by(rank.peak.held),
            sparkline(rank, memory.step_seconds, low, high),
            readable_bytes(rank.peak.held.total),
            f"{rank.peak.held.total / capacity:.0%}",
            readable_seconds(rank.peak.start_seconds),
        )
        for rank in memory.ranks
    ]
    columns = ("rank", "peak during", "held by", "over the step", "peak", "of device", "at")
    return table(title, columns, rows, numbers_from=3, optional=("over the step", "of device"))


def sparkline(rank: RankMemory, step_seconds: float, low: float, high: float) -> str:
    """The most held in each of equal parts of the step, as blocks between ``low`` and ``high``."""
    heights = [span.held.total for span in sampled(rank, step_seconds, _COLUMNS)]
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((height - low) * scale)] for height in heights)


def sampled(rank: RankMemory, step_seconds: float, columns: int) -> list[MemorySpan]:
    """The span that holds most in each of ``columns`` equal parts of the step; no peak is lost."""
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
    """The largest parts, largest first."""
    parts = sorted(((getattr(memory, part), part) for part in memory.PARTS), reverse=True)[:_NAMED_PARTS]
    return ", ".join(f"{MEMORY_PARTS[part]} {held / memory.total:.0%}" for held, part in parts if held)


def memory_over_time_data(memory: MemoryOverTime) -> dict[str, Any]:
    """The peaks, and every change of the total."""
    return {
        "step_seconds": memory.step_seconds,
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "peak": {
                    "seconds": rank.peak.start_seconds,
                    "during": rank.peak.during,
                    **rank.peak.held.to_dict(),
                },
                "spans": [
                    {
                        "start_seconds": span.start_seconds,
                        "end_seconds": span.end_seconds,
                        "during": span.during,
                        "total_bytes": span.held.total,
                    }
                    for span in rank.spans
                ],
            }
            for rank in memory.ranks
        ],
    }
