"""A dry run as text and as plain data: memory, collectives and FLOPs of one rank, as traced and as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from shardwise.cost.memory.room import room_of
from shardwise.measure.dryrun.result import PARTS, TOLERANCE, Calls, Compared, DryRun, Holder
from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.report.part_names import MEMORY_PARTS
from shardwise.spec.units import readable_bytes, readable_change, readable_count, readable_flops

_MOST_HOLDERS = 8


_HOLDERS: dict[str, Callable[[Holder], str]] = {
    "part": lambda holder: MEMORY_PARTS[holder.part],
    "made by": lambda holder: holder.operator,
    "in": lambda holder: holder.made_in,
    "number": lambda holder: str(holder.number),
    "bytes each": lambda holder: readable_bytes(holder.bytes),
}
_CALLS: dict[str, Callable[[Calls], str]] = {
    "": lambda calls: calls.line.dimension,
    "collective": lambda calls: calls.line.kind.replace("_", "-"),
    "what": lambda calls: calls.line.what + ("" if calls.line.peer is None else f" (rank {calls.line.peer})"),
    "ranks": lambda calls: str(calls.line.ranks),
    "calls": lambda calls: readable_count(calls.count),
    "bytes": lambda calls: readable_bytes(calls.bytes),
}


@paged
def dry_run_page(trace: DryRun) -> Iterator[Piece | str]:
    """Memory and its largest tensors, collectives, every figure beside the plan, and the verdict."""
    strategy = trace.job.strategy
    place = " ".join(f"{name} {trace.coordinates[name]}" for name in strategy.order if strategy.degree(name) > 1)
    where = f"rank {trace.rank} of {strategy.world:,}" + (f" ({place})" if place else "")
    yield f"{trace.job.model.name}: {where}; traced {trace.traced}"
    parts = [(MEMORY_PARTS[part], trace.peak[part], trace.planned_peak[part]) for part in PARTS]
    shown = [part for part in parts if any(part[1:])] + [("all tensors", trace.peak_bytes, trace.planned_peak_bytes)]
    rows = [(name, readable_bytes(traced), readable_bytes(planned)) for name, traced, planned in shown]
    yield table(f"Memory at its peak: {trace.peak_place}", ("part", "traced", "planned"), rows)
    largest = trace.holders[:_MOST_HOLDERS]
    yield table_of("The largest tensors at the peak of what was traced", largest, _HOLDERS, numbers_from=3)
    yield table_of("Collectives of a step", trace.calls, _CALLS, numbers_from=3)
    cells = [(*_words(figure), "defect" if figure.defect else "") for figure in trace.compared if not figure.negligible]
    yield table("Beside the plan", ("", "planned", "traced", "difference", ""), cells)
    if not trace.fits:
        needed, usable = readable_bytes(trace.needed_bytes), readable_bytes(room_of(trace.job).usable_bytes)
        problem = f"with the allowance for the framework the rank needs {needed}, a device has {usable}"
        yield Line(f"Does not fit: {problem}.", "bold")
    if not trace.defects:
        yield Line(f"Bytes, memory and FLOPs agree with the plan to {TOLERANCE:.0%}.", "bold")
    for what, planned, traced, difference in map(_words, trace.defects):
        problem = f"{what} is {traced}, planned {planned} ({difference})"
        yield Line(f"Defect in the engine or the plan: {problem}.", "bold")


def _words(figure: Compared) -> tuple[str, str, str, str]:
    """What it is, planned, traced, and the difference."""
    readable = readable_flops if figure.unit == "FLOPs" else readable_bytes
    difference = readable_change(figure.difference) if isfinite(figure.difference) else "not planned"
    return figure.what.replace("_", "-"), readable(figure.planned), readable(figure.traced), difference


def dry_run_data(trace: DryRun) -> dict[str, Any]:
    """What `dryrun` prints; bytes of one step, on one rank."""
    return {
        **picked(trace, "job", "rank", world="job.strategy.world"),
        **picked(trace, "coordinates", "traced", "seconds"),
        "ok": not trace.defects,
        "fits": trace.fits,
        "memory": {
            **picked(trace, "peak_bytes", place="peak_place", parts="peak"),
            **picked(trace, planned_bytes="planned_peak_bytes", planned_parts="planned_peak"),
            "largest": [vars(holder) for holder in trace.holders[: 4 * _MOST_HOLDERS]],
        },
        "collectives": [{**vars(calls.line), "count": calls.count, "bytes": calls.bytes} for calls in trace.calls],
        "flops": picked(trace, traced="flops", planned="planned_flops"),
        "compared": [
            picked(figure, "what", "planned", "traced", "difference", "negligible", "defect")
            for figure in trace.compared
        ],
    }
