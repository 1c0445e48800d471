"""A dry run as text and as plain data: memory, collectives and FLOPs of one rank, as traced and as planned."""

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


def dry_run_page(trace: DryRun) -> Page:
    tables = (_memory_table(trace), _holder_table(trace), _collective_table(trace), _comparison_table(trace))
    return Page((Line(_headline(trace)), *tables, *(Line(line, "bold") for line in _verdict(trace))))


def _headline(trace: DryRun) -> str:
    strategy = trace.job.strategy
    place = " ".join(f"{name} {trace.coordinates[name]}" for name in strategy.order if strategy.degree(name) > 1)
    where = f"rank {trace.rank} of {strategy.world:,}" + (f" ({place})" if place else "")
    return f"{trace.job.model.name}: {where}; traced {trace.traced}"


def _memory_table(trace: DryRun) -> FittedTable:
    rows = [
        (MEMORY_PARTS[part], readable_bytes(trace.peak[part]), readable_bytes(trace.planned_peak[part]))
        for part in PARTS
        if trace.peak[part] or trace.planned_peak[part]
    ]
    rows.append(("all tensors", readable_bytes(trace.peak_bytes), readable_bytes(trace.planned_peak_bytes)))
    return table(f"Memory at its peak: {trace.peak_place}", ("part", "traced", "planned"), rows)


def _holder_table(trace: DryRun) -> FittedTable:
    rows = [
        (MEMORY_PARTS[holder.part], holder.operator, holder.made_in, str(holder.number), readable_bytes(holder.bytes))
        for holder in trace.holders[:_MOST_HOLDERS]
    ]
    title = "The largest tensors at the peak of what was traced"
    return table(title, ("part", "made by", "in", "number", "bytes each"), rows, numbers_from=3)


def _collective_table(trace: DryRun) -> FittedTable:
    rows = [_calls_row(calls) for calls in trace.calls]
    return table("Collectives of a step", ("", "collective", "what", "ranks", "calls", "bytes"), rows, numbers_from=3)


def _calls_row(calls: Calls) -> tuple[str, ...]:
    line = calls.line
    what = line.what if line.peer is None else f"{line.what} (rank {line.peer})"
    figures = str(line.ranks), readable_count(calls.count), readable_bytes(calls.bytes)
    return line.dimension, line.kind.replace("_", "-"), what, *figures


def _comparison_table(trace: DryRun) -> FittedTable:
    rows = [
        (
            figure.what.replace("_", "-"),
            *_planned_and_traced(figure),
            _difference(figure),
            "defect" if figure.defect else "",
        )
        for figure in trace.compared
        if not figure.negligible
    ]
    return table("Beside the plan", ("", "planned", "traced", "difference", ""), rows)


def _planned_and_traced(figure: Compared) -> tuple[str, str]:
    readable = readable_flops if figure.unit == "FLOPs" else readable_bytes
    return readable(figure.planned), readable(figure.traced)


def _difference(figure: Compared) -> str:
    return readable_change(figure.difference) if isfinite(figure.difference) else "not planned"


def _verdict(trace: DryRun) -> Iterator[str]:
    if not trace.fits:
        needed, usable = readable_bytes(trace.needed_bytes), readable_bytes(room_of(trace.job).usable_bytes)
        yield f"Does not fit: with the allowance for the framework the rank needs {needed}, a device has {usable}."
    if not trace.defects:
        yield f"Bytes, memory and FLOPs agree with the plan to {TOLERANCE:.0%}."
    for figure in trace.defects:
        what = figure.what.replace("_", "-")
        planned, traced = _planned_and_traced(figure)
        yield f"Defect in the engine or the plan: {what} is {traced}, planned {planned} ({_difference(figure)})."


def dry_run_data(trace: DryRun) -> dict[str, Any]:
    """What `dryrun` prints; bytes of one step, on one rank."""
    return {
        **picked(trace, "job", "rank", world="job.strategy.world"),
        "coordinates": dict(trace.coordinates),
        **picked(trace, "traced", "seconds"),
        "ok": not trace.defects,
        "fits": trace.fits,
        "memory": {
            **picked(trace, "peak_bytes", place="peak_place", parts="peak"),
            **picked(trace, planned_bytes="planned_peak_bytes", planned_parts="planned_peak"),
            "largest": [vars(holder) for holder in trace.holders[: 4 * _MOST_HOLDERS]],
        },
        "collectives": [{**vars(calls.line), "count": calls.count, "bytes": calls.bytes} for calls in trace.calls],
        "flops": {"traced": dict(trace.flops), "planned": dict(trace.planned_flops)},
        "compared": [
            {
                **picked(figure, "what", "planned", "traced"),
                "difference": figure.difference if isfinite(figure.difference) else None,
                **picked(figure, "negligible", "defect"),
            }
            for figure in trace.compared
        ],
    }
