"""A dry run as text and as plain data: memory, collectives and arithmetic of one rank, traced beside planned."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from shardwise.cost.memory.room import room_of
from shardwise.measure.dryrun.result import PARTS, TOLERANCE, Calls, Compared, DryRun
from shardwise.report.console import picked, table
from shardwise.report.page import Line, Page
from shardwise.report.part_names import MEMORY_PARTS
from shardwise.report.tables import FittedTable
from shardwise.spec.units import readable_bytes, readable_change, readable_count, readable_flops

_MOST_HOLDERS = 8


def dry_run_page(found: DryRun) -> Page:
    tables = (_memory_table(found), _holder_table(found), _collective_table(found), _comparison_table(found))
    return Page((Line(_headline(found)), *tables, *(Line(line, "bold") for line in _verdict(found))))


def _headline(found: DryRun) -> str:
    strategy = found.job.strategy
    place = " ".join(f"{name} {found.coordinates[name]}" for name in strategy.order if strategy.degree(name) > 1)
    where = f"rank {found.rank} of {strategy.world:,}" + (f" ({place})" if place else "")
    return f"{found.job.model.name}: {where}; traced {found.traced}"


def _memory_table(found: DryRun) -> FittedTable:
    rows = [
        (MEMORY_PARTS[part], readable_bytes(found.peak[part]), readable_bytes(found.planned_peak[part]))
        for part in PARTS
        if found.peak[part] or found.planned_peak[part]
    ]
    rows.append(("all tensors", readable_bytes(found.peak_bytes), readable_bytes(found.planned_peak_bytes)))
    return table(f"Memory at its peak: {found.peak_place}", ("part", "traced", "planned"), rows)


def _holder_table(found: DryRun) -> FittedTable:
    rows = [
        (MEMORY_PARTS[one.part], one.operator, one.made_in, str(one.number), readable_bytes(one.bytes))
        for one in found.holders[:_MOST_HOLDERS]
    ]
    title = "The largest tensors at the peak of what was traced"
    return table(title, ("part", "made by", "in", "number", "bytes each"), rows, numbers_from=3)


def _collective_table(found: DryRun) -> FittedTable:
    rows = [_calls_row(one) for one in found.calls]
    return table("Collectives of a step", ("", "collective", "what", "ranks", "calls", "bytes"), rows, numbers_from=3)


def _calls_row(one: Calls) -> tuple[str, ...]:
    line = one.line
    what = line.what if line.peer is None else f"{line.what} (rank {line.peer})"
    figures = str(line.ranks), readable_count(one.count), readable_bytes(one.bytes)
    return line.dimension, line.kind.replace("_", "-"), what, *figures


def _comparison_table(found: DryRun) -> FittedTable:
    rows = [
        (one.what.replace("_", "-"), *_planned_and_traced(one), _difference(one), "defect" if one.defect else "")
        for one in found.compared
        if not one.negligible
    ]
    return table("Beside the plan", ("", "planned", "traced", "difference", ""), rows)


def _planned_and_traced(one: Compared) -> tuple[str, str]:
    readable = readable_flops if one.unit == "FLOPs" else readable_bytes
    return readable(one.planned), readable(one.traced)


def _difference(one: Compared) -> str:
    return readable_change(one.difference) if isfinite(one.difference) else "not planned"


def _verdict(found: DryRun) -> Iterator[str]:
    if not found.fits:
        needed, usable = readable_bytes(found.needed_bytes), readable_bytes(room_of(found.job).usable_bytes)
        yield f"Does not fit: with the allowance for the framework the rank needs {needed}, a device has {usable}."
    if not found.defects:
        yield f"Bytes, memory and FLOPs agree with the plan to {TOLERANCE:.0%}."
    for one in found.defects:
        what = one.what.replace("_", "-")
        planned, traced = _planned_and_traced(one)
        yield f"Defect in the engine or the plan: {what} is {traced}, planned {planned} ({_difference(one)})."


def dry_run_data(found: DryRun) -> dict[str, Any]:
    """What `dryrun` prints; bytes of one step, on one rank."""
    return {
        "job": found.job.to_dict(),
        "rank": found.rank,
        "world": found.job.strategy.world,
        "coordinates": dict(found.coordinates),
        **picked(found, "traced", "seconds"),
        "ok": not found.defects,
        "fits": found.fits,
        "memory": {
            "peak_bytes": found.peak_bytes,
            "place": found.peak_place,
            "parts": found.peak,
            "planned_bytes": found.planned_peak_bytes,
            "planned_parts": found.planned_peak,
            "largest": [vars(one) for one in found.holders[: 4 * _MOST_HOLDERS]],
        },
        "collectives": [{**vars(one.line), "count": one.count, "bytes": one.bytes} for one in found.calls],
        "flops": {"traced": dict(found.flops), "planned": dict(found.planned_flops)},
        "compared": [
            {
                **picked(one, "what", "planned", "traced"),
                "difference": one.difference if isfinite(one.difference) else None,
                **picked(one, "negligible", "defect"),
            }
            for one in found.compared
        ],
    }
