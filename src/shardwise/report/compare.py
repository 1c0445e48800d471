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
    from shardwise.measure.compare.comparison import Comparison
    from shardwise.measure.compare.step_parts import RankTimes

_MOST_RANKS = 16
_SENT_COLUMNS = ("", "collectives", "planned", "recorded")


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    slow = comparison.slow_link
    own = {} if slow is None else picked(slow.link, "nodes", "dimension", "what", "bytes", "seconds")
    return {
        "steps": comparison.measured.numbers,
        "step_seconds": picked(
            comparison, predicted="predicted.step_seconds", profiled="measured.step_seconds", usual="usual_seconds"
        ),
        "parts": {
            part.name: picked(part, "predicted", "measured", "hidden_predicted", "hidden_measured")
            for part in comparison.parts
        },
        "memory": {
            part.name: picked(part, predicted_bytes="predicted", measured_bytes="measured")
            for part in comparison.memory
        },
        "differences": [
            picked(part, part="name", seconds="difference", cause="cause") for part in comparison.differences
        ],
        "ranks": [
            {
                **picked(rank, "rank", "node"),
                "compute_seconds": rank.parts.get("compute", 0.0),
                **picked(rank, waits_seconds="waits", layer_seconds="layer_seconds"),
            }
            for rank in comparison.measured.ranks
        ],
        "sent": {
            ", ".join(traffic.dimensions): {
                **picked(traffic, "collectives", planned_bytes="planned", recorded_bytes="recorded"),
                "unrecorded": list(traffic.unrecorded),
            }
            for traffic in comparison.sent
        },
        "slow_rank": comparison.slow_rank,
        "slow_link": slow and {"ranks": slow.link.members, **own, **picked(slow, "times", "than")},
    }


@paged
def comparison_page(comparison: Comparison, trace: Path | None) -> Iterator[Piece | str]:
    busiest = comparison.measured.busiest
    title = f"A step of rank {busiest.rank}, which waits least, beside its prediction"
    rows = [
        (
            MEASURED_WORDS.get(part.name, part.name),
            *(readable_seconds(seconds) for seconds in (part.predicted, part.measured)),
            readable_difference(part.difference),
            *(_optional(seconds) for seconds in (part.hidden_predicted, part.hidden_measured)),
        )
        for part in comparison.parts
    ]
    whole = (comparison.predicted.step_seconds, comparison.measured.step_seconds)
    rows.append(("step", *map(readable_seconds, whole), readable_difference(whole[1] - whole[0]), "", ""))
    columns = ("part", "predicted", "measured", "difference", "hidden, predicted", "hidden, measured")
    yield table(title, columns, rows, optional=("hidden, measured", "hidden, predicted"))
    if comparison.usual_seconds:
        first, last = comparison.measured.numbers[0], comparison.measured.numbers[-1]
        usual = readable_seconds(comparison.usual_seconds)
        yield f"Profiled: steps {first} to {last}. Other steps of the run take {usual} (median)."
    if comparison.memory:
        cells = [
            (
                part.name,
                *map(readable_bytes, (part.predicted, part.measured)),
                f"{part.measured / part.predicted:.2f}" if part.predicted else "–",
            )
            for part in comparison.memory
        ]
        yield table("Memory", ("", "predicted", "measured", "measured / predicted"), cells)
    whole_records = [traffic for traffic in comparison.sent if not traffic.unrecorded]
    if whole_records:
        cells = [
            (
                ", ".join(traffic.dimensions),
                f"{traffic.collectives:,.0f}",
                *map(readable_bytes, (traffic.planned, traffic.recorded)),
            )
            for traffic in whole_records
        ]
        yield table("Sent in a step, by the backend's own record", _SENT_COLUMNS, cells)
    for traffic in comparison.sent:
        if traffic.unrecorded:
            yield (
                f"Sent as messages, which the backend does not record: {', '.join(traffic.unrecorded)} "
                f"({', '.join(traffic.dimensions)})."
            )
    if len(comparison.measured.ranks) > 1:
        yield _ranks(comparison)
    if comparison.differences:
        cells = [
            (MEASURED_WORDS.get(part.name, part.name), readable_difference(part.difference), part.cause)
            for part in comparison.differences
        ]
        yield table("Largest differences first", ("part", "a step", "likely cause"), cells, numbers_from=9)
    for line in verdicts(comparison):
        yield Line(line, "bold")
    if trace is not None:
        yield f"Both timelines: {trace} (open it in ui.perfetto.dev)"


def _ranks(comparison: Comparison) -> FittedTable:
    ranks = sorted(comparison.measured.ranks, key=lambda rank: rank.waits)[:_MOST_RANKS]
    columns: dict[str, Callable[[RankTimes], str]] = {
        "rank": lambda rank: str(rank.rank),
        "compute": lambda rank: readable_seconds(rank.parts.get("compute", 0.0)),
        "waits for others": lambda rank: readable_seconds(rank.waits),
        "a layer forward": lambda rank: _optional(rank.layer_seconds),
        "times the median rank's": lambda rank: (
            "–" if comparison.slowness is None else f"{comparison.slowness[rank.rank]:.2f}"
        ),
    }
    return table_of("Ranks: the others wait for the rank that waits least", ranks, columns)


def verdicts(comparison: Comparison) -> list[str]:
    """Findings to act on, a line each."""
    lines = []
    if comparison.slow_rank is not None and comparison.slowness is not None:
        rank, times = comparison.slow_rank, comparison.slowness[comparison.slow_rank]
        node = comparison.measured.records[rank].node
        lines.append(f"Slow rank: {rank} (node {node}) takes {times:.2f} times as long for a layer as the median rank.")
    if comparison.slow_link is not None:
        slow = comparison.slow_link
        link = slow.link
        took, size = readable_seconds(link.seconds), readable_bytes(link.bytes)
        lines.append(
            f"Slow link: between {link.between}, {slow.times:.1f} times as long as {slow.than} "
            f"({link.dimension}: {link.what}, {size} in {took})."
        )
    if comparison.mismatch is not None:
        lines.append(comparison.mismatch)
    if comparison.missing_steps:
        lines.append(f"metrics.jsonl has no line for step {comparison.missing_steps}.")
    return lines


def _optional(seconds: float | None) -> str:
    return "–" if seconds is None else readable_seconds(seconds)
