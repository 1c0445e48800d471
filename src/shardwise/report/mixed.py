"""A plan for several kinds of nodes, as text for people and as data for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.planner.candidate import Candidate
from shardwise.planner.describe import strategy_words
from shardwise.planner.mixed import MixedPlan
from shardwise.planner.mixed_step import KindPart, MixedStep
from shardwise.spec.mixed import sized_name
from shardwise.spec.units import readable_bytes, readable_rate, readable_seconds

SHOWN = 6


def mixed_lines(plan: MixedPlan) -> list[str]:
    """The plan, what each kind does in it, the next best, and what each kind would do alone."""
    mixed, best = plan.request.mixed, plan.best
    devices = " + ".join(f"{kind.devices} × {kind.device.name}" for kind in mixed.kinds)
    speed = readable_rate(mixed.between.bandwidth_per_direction)
    job = best.arrangement.job
    lines = [
        f"{job.model.name} on {mixed.name}: {devices}, {speed} per device between the kinds",
        f"{plan.status}: {plan.note}",
        "",
        f"best of {plan.tried:,} strategies: {strategy_words(best.arrangement.strategy)}",
        f"step {readable_seconds(best.step_seconds)}, {best.tokens_per_second:,.0f} tokens/s, "
        f"MFU {best.mfu:.1%} of the summed peak, {job.sequences:,} sequences in {job.microbatches:,} microbatches",
        "",
        *_table(("kind", "pipeline ranks", "layers", "per rank", "memory", "of", "idle"), map(_part_row, best.parts)),
    ]
    if len(plan.candidates) > 1:
        header = ("strategy", "order", "layers", "step", "tokens/s", "MFU")
        lines += ["", *_table(header, map(_step_row, plan.candidates[:SHOWN]))]
    return lines + (["", *_alone_lines(plan)] if plan.alone else [])


def _part_row(part: KindPart) -> tuple[str, ...]:
    low, high = min(part.layers), max(part.layers)
    return (
        sized_name(part.cluster),
        f"{part.ranks[0]} to {part.ranks[-1]}" if len(part.ranks) > 1 else str(part.ranks[0]),
        str(sum(part.layers)),
        str(low) if low == high else f"{low} to {high}",
        readable_bytes(part.memory.total),
        readable_bytes(part.cluster.device.memory),
        f"{part.idle_share:.1%}",
    )


def _step_row(step: MixedStep) -> tuple[str, ...]:
    return (
        strategy_words(step.arrangement.strategy),
        ", ".join(part.cluster.name for part in step.parts),
        " + ".join(str(sum(part.layers)) for part in step.parts),
        readable_seconds(step.step_seconds),
        f"{step.tokens_per_second:,.0f}",
        f"{step.mfu:.1%}",
    )


def _alone_lines(plan: MixedPlan) -> list[str]:
    rows = [_alone_row(sized_name(kind), one) for kind, one in zip(plan.request.mixed.kinds, plan.alone)]
    rate = plan.best.tokens_per_second
    rows.append(("both" if len(rows) == 2 else "all", f"{rate:,.0f}", "the plan above"))
    lines = _table(("on", "tokens/s", "strategy"), rows)
    if plan.gain is None:
        return [*lines, "", "no kind holds the model alone"]
    summed = sum(one.tokens_per_second for one in plan.alone if one is not None)
    return [
        *lines,
        "",
        f"{plan.gain:.2f} times the better kind alone, {rate / summed:.1%} of what the kinds reach apart",
    ]


def _alone_row(name: str, one: Candidate | None) -> tuple[str, ...]:
    if one is None:
        return f"{name} alone", "-", "no strategy fits"
    return f"{name} alone", f"{one.tokens_per_second:,.0f}", strategy_words(one.job.strategy)


def _table(header: Sequence[str], rows: Any) -> list[str]:
    """Columns as wide as they need to be, numbers to the right."""
    table = [tuple(header), *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    right = [all(_is_number(cell) for cell in column[1:]) for column in zip(*table)]
    aligned = [
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width) for cell, width, numeric in zip(row, widths, right)
        )
        for row in table
    ]
    return [line.rstrip() for line in (aligned[0], "─" * sum(widths, 2 * len(widths) - 2), *aligned[1:])]


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell == "-"


def mixed_data(plan: MixedPlan) -> dict[str, Any]:
    """The same for a machine."""
    return {
        "status": plan.status,
        "note": plan.note,
        "cluster": plan.request.mixed.to_dict(),
        "strategies": plan.tried,
        "candidates": [_step_data(step) for step in plan.candidates],
        "alone": [None if one is None else _alone_data(one) for one in plan.alone],
        "gain": plan.gain,
    }


def _step_data(step: MixedStep) -> dict[str, Any]:
    return {
        "strategy": step.arrangement.strategy.to_dict(),
        "order": list(step.arrangement.kinds),
        "step_seconds": step.step_seconds,
        "tokens_per_second": step.tokens_per_second,
        "mfu": step.mfu,
        "kinds": [
            {
                "cluster": sized_name(part.cluster),
                "strategy": part.strategy.to_dict(),
                "pipeline_ranks": list(part.ranks),
                "layers": list(part.layers),
                "memory": part.memory.to_dict(),
                "idle_share": part.idle_share,
            }
            for part in step.parts
        ],
    }


def _alone_data(one: Candidate) -> dict[str, Any]:
    return {
        "strategy": one.job.strategy.to_dict(),
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "memory": one.memory.to_dict(),
    }
