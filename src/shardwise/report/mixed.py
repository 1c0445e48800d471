"""A plan for several kinds of nodes, as a page and as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardwise.planner.candidate import strategy_words
from shardwise.planner.mixed.plan import MixedPlan
from shardwise.planner.mixed.step import KindPart, MixedStep
from shardwise.report.console import picked, table, table_of
from shardwise.report.page import Line, Piece, paged
from shardwise.report.tables import FittedTable
from shardwise.spec.clusters import device_words, sized_name
from shardwise.spec.units import counted, readable_bytes, readable_rate, readable_seconds

SHOWN = 6


@paged
def mixed_page(plan: MixedPlan, notes: Iterable[str] = ()) -> Iterator[Piece | str]:
    """The plan, each kind's part in it, the next best plans, and what each kind of nodes would reach alone."""
    yield from (Line(f"note: {note}", "yellow") for note in notes)
    mixed, best = plan.request.mixed, plan.best
    devices = device_words(mixed.as_one)
    speed = readable_rate(mixed.between.bandwidth_per_direction)
    job = best.arrangement.job
    yield f"{job.model.name} on {mixed.name}: {devices}, {speed} per device between the kinds"
    if plan.status != "runs":
        yield f"{plan.status}: this project's engine does not run the best one"
    if plan.was_stopped:
        yield "stopped at the time limit: this is the best so far (--time-limit)"
    yield ""
    yield f"best of {plan.tried:,} strategies: {strategy_words(best.arrangement.strategy)}"
    yield (
        f"step {readable_seconds(best.step_seconds)}, {best.tokens_per_second:,.0f} tokens/s, "
        f"MFU {best.mfu:.1%} of the summed peak, {job.sequences:,} sequences in "
        f"{counted(job.microbatches, 'microbatch')}"
    )
    yield table_of("", best.parts, _PART_COLUMNS)
    if len(plan.candidates) > 1:
        yield table_of("", plan.candidates[:SHOWN], _STEP_COLUMNS, numbers_from=2)
    if plan.alone:
        yield from _alone(plan)


_PART_COLUMNS: dict[str, Callable[[KindPart], str]] = {
    "kind": lambda part: sized_name(part.cluster),
    "pipeline ranks": lambda part: _span(part.ranks[0], part.ranks[-1]),
    "layers": lambda part: str(sum(part.layers)),
    "per rank": lambda part: _span(min(part.layers), max(part.layers)),
    "memory": lambda part: readable_bytes(part.memory.total),
    "of": lambda part: readable_bytes(part.cluster.device.usable_memory),
    "of the batch": lambda part: f"{part.batch_share:.0%}",
    "idle": lambda part: f"{part.idle_share:.1%}",
}
_STEP_COLUMNS: dict[str, Callable[[MixedStep], str]] = {
    "strategy": lambda step: strategy_words(step.arrangement.strategy),
    "order": lambda step: ", ".join(part.cluster.name for part in step.parts),
    "layers": lambda step: " + ".join(str(sum(part.layers)) for part in step.parts),
    "step": lambda step: readable_seconds(step.step_seconds),
    "tokens/s": lambda step: f"{step.tokens_per_second:,.0f}",
    "MFU": lambda step: f"{step.mfu:.1%}",
}


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _alone(plan: MixedPlan) -> Iterator[str | FittedTable]:
    rows = [
        (f"{sized_name(kind)} alone", "no strategy fits", "-")
        if candidate is None
        else (
            f"{sized_name(kind)} alone",
            strategy_words(candidate.job.strategy),
            f"{candidate.tokens_per_second:,.0f}",
        )
        for kind, candidate in zip(plan.request.mixed.kinds, plan.alone)
    ]
    rate = plan.best.tokens_per_second
    rows.append(("both" if len(rows) == 2 else "all", "the plan above", f"{rate:,.0f}"))
    yield table("", ("on", "strategy", "tokens/s"), rows, numbers_from=2)
    if plan.gain is None:
        yield "no kind holds the model alone"
        return
    summed = sum(candidate.tokens_per_second for candidate in plan.alone if candidate is not None)
    yield f"{plan.gain:.2f} times the better kind alone, {rate / summed:.1%} of what the kinds reach apart"


def mixed_data(plan: MixedPlan) -> dict[str, Any]:
    return {
        **picked(plan, "status", "was_stopped", job="best.job", cluster="request.mixed", strategies="tried"),
        "candidates": [_step_data(step) for step in plan.candidates],
        "alone": [
            None if best is None else picked(best, strategy="job.strategy", **_SPEED, memory="memory")
            for best in plan.alone
        ],
        "gain": plan.gain,
    }


_SPEED = {"predicted_seconds": "step_seconds", "tokens_per_second": "tokens_per_second", "mfu": "mfu"}


def _step_data(step: MixedStep) -> dict[str, Any]:
    return {
        **picked(step, strategy="arrangement.strategy"),
        "words": strategy_words(step.arrangement.strategy),
        **picked(step, order="arrangement.kinds", cluster="arrangement.ordered", **_SPEED),
        "kinds": [
            {
                "cluster": sized_name(part.cluster),
                **picked(part, "strategy", pipeline_ranks="ranks", layers="layers", memory="memory"),
                **picked(part, "batch_share", "idle_share"),
            }
            for part in step.parts
        ],
    }
