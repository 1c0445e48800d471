"""A few steps of the real job before the long run, and checks of what they show."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.launch.outcome import Event, Outcome
from shardwise.launch.preflight import Preflight
from shardwise.launch.run import Launch, prepare
from shardwise.layout.groups import coordinate
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.lines import RunSummary, read_lines, summarise
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes, readable_change, readable_seconds, readable_share
from shardwise.uncertainty.residuals import ErrorBar, error_bar

LEAST_STEPS = 12
SETTLED_STEP = 5  # from here on memory must not grow
MOST_GROWTH, MOST_SPREAD, MOST_WAIT = 0.01, 0.03, 0.02
Record = dict[str, Any]


@dataclass(frozen=True)
class RehearsalCheck:
    name: str
    figure: str
    passed: bool


def rehearse(
    job: Job,
    folder: RunFolder,
    checked: Preflight,
    steps: int,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    debug: bool = False,
) -> tuple[Outcome, list[RehearsalCheck]]:
    """Runs ``steps`` steps of the job in a separate folder, stops, restores the checkpoint and runs one more.

    Returns no checks if the run itself failed.
    """
    if not LEAST_STEPS <= steps < job.run.steps:
        problem = f"{steps} steps of a run of {job.run.steps:,}"
        raise SpecError("⟨rehearse⟩", problem, f"use {LEAST_STEPS} to {job.run.steps - 1:,}")
    elsewhere = job.run.checkpoints.folder
    checkpoints = replace(job.run.checkpoints, folder=None if elsewhere is None else f"{elsewhere}/rehearsal")
    here = RunFolder(folder.path / "rehearsal", replace(job.run, checkpoints=checkpoints))
    shutil.rmtree(here.path, ignore_errors=True)
    here.checkpoints.remove_all()
    logging = replace(job.run.logging, interval=1, memory=max(1, (steps - 3) // 3))
    with here.checkpoints.locked():
        for stop_at in (steps, steps + 1):
            run = replace(job.run, stop_at=stop_at, folder=str(here.path), logging=logging, checkpoints=checkpoints)
            shorter = replace(job, run=run)
            prepare(shorter, here, checked)
            outcome = Launch(shorter, here, debug=debug).supervised(on_event)
            if outcome.status or outcome.stopped:
                return outcome, []
    records = list(read_lines(here.metrics))
    return outcome, list(
        points(job, [record for record in records if record["step"] <= steps], records[-1]["step"] - steps)
    )


def points(job: Job, records: Sequence[Record], steps_after_restoring: int) -> Iterator[RehearsalCheck]:
    """The checks of a rehearsal."""
    summary, bar = summarise(records), error_bar(job)
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    third = max(1, len(losses) // 3)
    first, last = (sum(some) / len(some) for some in (losses[:third], losses[-third:]))
    yield RehearsalCheck("the loss falls", f"{first:.3f} → {last:.3f}", last < first)
    yield _growth(records)
    yield from _spread(job.strategy, records)
    yield from _beside_the_plan(summary, bar)
    figure = f"{steps_after_restoring} step after it"
    yield RehearsalCheck("a checkpoint is saved and restored", figure, steps_after_restoring == 1)
    waited = summary.data_wait_share or 0.0
    figure = f"{readable_share(waited)} of the time waited (at most {MOST_WAIT:.0%})"
    yield RehearsalCheck("data arrives in time", figure, waited <= MOST_WAIT)


def _growth(records: Sequence[Record]) -> RehearsalCheck:
    name = f"memory does not grow after step {SETTLED_STEP}"
    later = [record["memory_bytes"] for record in records if record["step"] > SETTLED_STEP and "memory_bytes" in record]
    if len(later) < 2:
        return RehearsalCheck(name, "not measured often enough", False)
    growth = later[-1] / later[0] - 1
    return RehearsalCheck(name, f"{readable_change(growth, 2)} (at most {MOST_GROWTH:.0%})", growth <= MOST_GROWTH)


def _spread(strategy: Strategy, records: Sequence[Record]) -> Iterator[RehearsalCheck]:
    """Checks that the ranks of each pipeline stage hold the same amount of memory."""
    measured = [record["memory_bytes_of_ranks"] for record in records if "memory_bytes_of_ranks" in record]
    stages: dict[int, list[int]] = {}
    for rank, peak in enumerate(measured[-1] if measured else ()):
        stages.setdefault(coordinate(strategy, "pp", rank), []).append(peak)
    widest = max((max(peaks) / min(peaks) - 1 for peaks in stages.values()), default=math.inf)
    figure = f"{readable_share(widest, 2)} apart (at most {MOST_SPREAD:.0%})"
    yield RehearsalCheck("ranks of a stage are equal in memory", figure, widest <= MOST_SPREAD)


def _beside_the_plan(summary: RunSummary, bar: ErrorBar) -> Iterator[RehearsalCheck]:
    time = ("step time as planned", summary.predicted_seconds, summary.step_seconds, bar.time_low, bar.time_high)
    memory = (
        "memory as planned",
        summary.predicted_memory_bytes,
        summary.memory_bytes,
        bar.memory_low,
        bar.memory_high,
    )
    for (name, predicted, measured, low, high), show in ((time, readable_seconds), (memory, readable_bytes)):
        if not predicted or measured is None:
            yield RehearsalCheck(name, "not measured", False)
            continue
        off = measured / predicted - 1
        allowed = f"between {low:+.0%} and {high:+.0%}"
        figure = f"{show(measured)}, planned {show(predicted)}: {readable_change(off, 0)} ({allowed})"
        yield RehearsalCheck(name, figure, low <= off <= high)
