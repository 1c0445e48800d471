"""A small timeline as text: a row per rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.pipeline.schedule import Action
from shardwise.pipeline.timeline import Timeline


def draw_timeline(timeline: Timeline, max_width: int = 160) -> str:
    """``F0`` is the forward of microbatch 0, in small letters on any but the rank's first stage; dots are idle.

    One character is as short as is needed to write every label in full, unless that is wider than ``max_width``.
    """
    schedule = timeline.schedule
    width = min(max_width, _full_width(timeline))
    start_of_all = min(own[0] for own in timeline.starts if own)
    scale = width / (timeline.makespan_seconds or 1.0)
    lines = [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
        f"{timeline.makespan_seconds:.4g} s, bubble {timeline.bubble_rate:.1%}"
    ]
    margin = len(str(schedule.ranks - 1))
    for rank, actions in enumerate(schedule.actions):
        row = ["."] * width
        first_stage = min(schedule.stages_of(rank), default=0)
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank]):
            left, right = round((start - start_of_all) * scale), round((end - start_of_all) * scale)
            row[left:right] = _label(action, first_stage).ljust(right - left, "-")[: right - left]
        lines.append(f"{rank:>{margin}} {''.join(row)}")
    return "\n".join(lines)


def _label(action: Action, first_stage: int) -> str:
    letter = str(action.kind) if action.stage == first_stage else action.kind.lower()
    return f"{letter}{action.microbatch}"


def _full_width(timeline: Timeline) -> int:
    """Characters at which the shortest action still shows its whole label, and one more to tell it from the next."""
    span = timeline.makespan_seconds

    def needed() -> Iterator[float]:
        for actions, starts, ends in zip(timeline.schedule.actions, timeline.starts, timeline.ends):
            for action, start, end in zip(actions, starts, ends):
                if end > start:
                    yield (len(_label(action, 0)) + 1) * span / (end - start)

    return max(1, round(max(needed(), default=1.0)))
