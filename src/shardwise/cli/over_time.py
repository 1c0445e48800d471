"""The flags of `analyze` that look inside one step: a trace, and memory over time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

_MOST_PASSES = 1_000_000  # some seconds, and some hundred megabytes of trace


def add_over_time_arguments(parser: argparse.ArgumentParser) -> None:
    inside = parser.add_argument_group("inside one step")
    inside.add_argument("--trace", metavar="FILE.json", help="write the predicted step as a trace (ui.perfetto.dev)")
    inside.add_argument("--memory-over-time", action="store_true", help="peak of every pipeline rank: when, and what")
    inside.add_argument("--memory-picture", metavar="FILE.svg", help="draw what every pipeline rank holds over time")


def check_over_time(parsed: argparse.Namespace, job: Job) -> None:
    """Refuses what would be too long to look at, before anything is computed."""
    for flag in ("trace", "memory_picture", "memory_over_time"):
        if getattr(parsed, flag):
            _check_size("--" + flag.replace("_", "-"), job)


def write_over_time(parsed: argparse.Namespace, job: Job) -> list[str]:
    """Writes the files that were asked for; the lines that say so, for when nothing can go wrong any more."""
    lines = []
    if parsed.trace is not None:
        from shardwise.cost.step.trace import step_trace

        _write("--trace", parsed.trace, json.dumps(step_trace(job), separators=(",", ":")))
        lines.append(f"wrote {parsed.trace}: open in ui.perfetto.dev")
    if parsed.memory_picture is not None:
        from shardwise.cost.memory.timeline import memory_over_time
        from shardwise.report.memory_picture import memory_picture

        _write("--memory-picture", parsed.memory_picture, memory_picture(memory_over_time(job)))
        lines.append(f"wrote {parsed.memory_picture}")
    return lines


def _check_size(flag: str, job: Job) -> None:
    passes = 3 * job.microbatches * job.strategy.stages
    if passes > _MOST_PASSES:
        problem = f"{job.microbatches:,} microbatches make {passes:,} passes, more than {_MOST_PASSES:,}"
        raise SpecError(flag, problem, "give a smaller --global-batch")


def _write(flag: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise SpecError(flag, f"{shown(path, 300)} cannot be written ({reason})", "choose another") from None
