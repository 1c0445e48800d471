"""A run beside its prediction, as a page and as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.report.part_names import MEASURED_WORDS
from shardwise.report.tables import FittedTable
from shardwise.spec.units import readable_bytes, readable_difference, readable_seconds

if TYPE_CHECKING:
    from shardwise.measure.compare.comparison import Comparison, Part
    from shardwise.measure.compare.step_parts import RankTimes
    from shardwise.measure.compare.stragglers import SlowLink

_MOST_RANKS = 16
_SENT_COLUMNS = ("", "collectives", "planned", "recorded")


def comparison_data(found: Comparison) -> dict[str, Any]:
    return {
        "steps": found.found.numbers,
        "step_seconds": {
            "predicted": found.predicted.step_seconds,
            "profiled": found.found.step_seconds,
            "usual": found.usual_seconds,
        },
        "parts": {
            one.name: picked(one, "predicted", "measured", "hidden_predicted", "hidden_measured") for one in found.parts
        },
        "memory": {
            one.name: {"predicted_bytes": one.predicted, "measured_bytes": one.measured} for one in found.memory
        },
        "differences": [{"part": one.name, "seconds": one.difference, "cause": one.cause} for one in found.differences],
        "ranks": [
            {
                **picked(one, "rank", "node"),
                "compute_seconds": one.parts.get("compute", 0.0),
                "waits_seconds": one.waits,
                "layer_seconds": one.layer_seconds,
            }
            for one in found.found.ranks
        ],
        "sent": {
            ", ".join(one.dimensions): {
                "collectives": one.collectives,
                "planned_bytes": one.planned,
                "recorded_bytes": one.recorded,
                "unrecorded": list(one.unrecorded),
            }
            for one in found.sent
        },
        "slow_rank": found.slow_rank,
        "slow_link": found.slow_link and _link_data(found.slow_link),
    }


def _link_data(slow: SlowLink) -> dict[str, Any]:
    own = picked(slow.link, "nodes", "dimension", "what", "bytes", "seconds")
    return {"ranks": slow.link.members, **own, **picked(slow, "times", "than")}


@paged
def comparison_page(found: Comparison, trace: Path | None) -> Iterator[Piece | str]:
    busiest = found.found.busiest
    title = f"A step of rank {busiest.rank}, which waits least, beside its prediction"
    rows = [
        (
            MEASURED_WORDS.get(one.name, one.name),
            *(readable_seconds(seconds) for seconds in (one.predicted, one.measured)),
            readable_difference(one.difference),
            *(_optional(seconds) for seconds in (one.hidden_predicted, one.hidden_measured)),
        )
        for one in found.parts
    ]
    whole = (found.predicted.step_seconds, found.found.step_seconds)
    rows.append(("step", *map(readable_seconds, whole), readable_difference(whole[1] - whole[0]), "", ""))
    columns = ("part", "predicted", "measured", "difference", "hidden, predicted", "hidden, measured")
    yield table(title, columns, rows, optional=("hidden, measured", "hidden, predicted"))
    if found.usual_seconds:
        first, last = found.found.numbers[0], found.found.numbers[-1]
        usual = readable_seconds(found.usual_seconds)
        yield f"Profiled: steps {first} to {last}. Other steps of the run take {usual} (median)."
    if found.memory:
        cells = [(one.name, *map(readable_bytes, (one.predicted, one.measured)), _ratio(one)) for one in found.memory]
        yield table("Memory", ("", "predicted", "measured", "measured / predicted"), cells)
    whole_records = [one for one in found.sent if not one.unrecorded]
    if whole_records:
        cells = [
            (", ".join(one.dimensions), f"{one.collectives:,.0f}", *map(readable_bytes, (one.planned, one.recorded)))
            for one in whole_records
        ]
        yield table("Sent in a step, by the backend's own record", _SENT_COLUMNS, cells)
    for one in found.sent:
        if one.unrecorded:
            yield (
                f"Sent as messages, which the backend does not record: {', '.join(one.unrecorded)} "
                f"({', '.join(one.dimensions)})."
            )
    if len(found.found.ranks) > 1:
        yield _ranks(found)
    if found.differences:
        cells = [
            (MEASURED_WORDS.get(one.name, one.name), readable_difference(one.difference), one.cause)
            for one in found.differences
        ]
        yield table("Largest differences first", ("part", "a step", "likely cause"), cells, numbers_from=9)
    for line in verdicts(found):
        yield Line(line, "bold")
    if trace is not None:
        yield f"Both timelines: {trace} (open it in ui.perfetto.dev)"


def _ranks(found: Comparison) -> FittedTable:
    ranks = sorted(found.found.ranks, key=lambda one: one.waits)[:_MOST_RANKS]
    columns: dict[str, Callable[[RankTimes], str]] = {
        "rank": lambda one: str(one.rank),
        "compute": lambda one: readable_seconds(one.parts.get("compute", 0.0)),
        "waits for others": lambda one: readable_seconds(one.waits),
        "a layer forward": lambda one: _optional(one.layer_seconds),
        "times the median rank's": lambda one: "–" if found.slowness is None else f"{found.slowness[one.rank]:.2f}",
    }
    return table_of("Ranks: the others wait for the rank that waits least", ranks, columns)


def verdicts(found: Comparison) -> list[str]:
    """Findings to act on, one line each."""
    lines = []
    if found.slow_rank is not None and found.slowness is not None:
        rank, times = found.slow_rank, found.slowness[found.slow_rank]
        node = found.found.records[rank].node
        lines.append(f"Slow rank: {rank} (node {node}) takes {times:.2f} times as long for a layer as the median rank.")
    if found.slow_link is not None:
        slow = found.slow_link
        link = slow.link
        took, size = readable_seconds(link.seconds), readable_bytes(link.bytes)
        lines.append(
            f"Slow link: between {link.between}, {slow.times:.1f} times as long as {slow.than} "
            f"({link.dimension}: {link.what}, {size} in {took})."
        )
    if found.mismatch is not None:
        lines.append(found.mismatch)
    if found.missing_steps:
        lines.append(f"metrics.jsonl has no line for step {found.missing_steps}.")
    return lines


def _optional(seconds: float | None) -> str:
    return "–" if seconds is None else readable_seconds(seconds)


def _ratio(one: Part) -> str:
    return f"{one.measured / one.predicted:.2f}" if one.predicted else "–"
