"""The state of a run as a page: what matters most first, then the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.launch.observe.state import RunState
from shardwise.report.console import table
from shardwise.report.page import Line, Page, Piece, paged
from shardwise.report.tables import Bar
from shardwise.report.training_progress import figures_in_words
from shardwise.run.checkpoint.manifest import Manifest
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_seconds,
    readable_share,
)

_MOST_RANKS = 16


def status_line(found: RunState) -> str:
    """The same in one line, as the progress of `train` has it."""
    words = figures_in_words(found.figures, found.steps or found.step) if found.figures.step_seconds is not None else ()
    return ", ".join((state_words(found), *words))


def state_words(found: RunState) -> str:
    """ "failed, step 12 of 40"."""
    steps = "" if found.steps is None else f" of {found.steps:,}"
    return f"{found.state}, step {found.step:,}{steps}"


@paged
def status_page(found: RunState) -> Iterator[Piece | str]:
    yield Line(f"{found.folder}: {state_words(found)}", "bold")
    if found.steps:
        share = found.step / found.steps
        yield table("", ("", ""), [(readable_share(share), Bar(share))], numbers_from=2)
    for text in (found.why, "" if found.finding is None else found.finding.text):
        if text:
            yield f"{text[0].upper()}{text[1:]}."
    if found.state == "killed":
        yield "Nobody trains in it, and its end was not recorded: start the same command again to resume."
    if found.state == "stopped":
        yield "A signal stopped it before its last step: start the same command again to resume."
    yield table("", ("", ""), _rows(found), numbers_from=2)
    if found.ranks:
        yield from _ranks(found)


def _rows(found: RunState) -> Iterator[tuple[str, str]]:
    figures = found.figures
    if figures.loss is not None:
        held_out = "" if figures.validation_loss is None else f", held out {figures.validation_loss:.3f}"
        yield "loss", f"{figures.loss:.3f}{held_out}"
    if figures.tokens_per_second is not None:
        yield "speed", f"{readable_count(figures.tokens_per_second)} tokens/s"
    if figures.step_seconds is not None:
        predicted = figures.predicted_seconds
        beside = f", predicted {readable_seconds(predicted)}" if predicted else ""
        yield "step time", f"{readable_seconds(figures.step_seconds)}{beside}"
    if figures.mfu is not None:
        yield "MFU", readable_share(figures.mfu)
    if figures.memory_bytes:
        predicted = figures.predicted_memory_bytes
        beside = f", predicted {readable_bytes(predicted)}" if predicted else ""
        yield "memory", f"{readable_bytes(figures.memory_bytes)} on the fullest rank{beside}"
    if found.left_seconds is not None:
        yield "left", readable_duration(found.left_seconds)
    if found.quiet_seconds is not None:
        yield "newest step", f"{readable_duration(found.quiet_seconds)} ago"
    yield "newest commit", _commit(found)
    yield "restarts", f"{found.restarts:,}"
    if found.goodput is not None:
        up = readable_duration(found.running_seconds)
        yield "goodput", f"{readable_share(found.goodput)} of {up} in steps that count"
    if found.alive:
        slow = [f"rank {one.rank}, others wait {readable_share(one.share)} of the time" for one in found.stragglers]
        yield "stragglers", "; ".join(slow) or ("none seen" if found.late else "not known yet")


def _commit(found: RunState) -> str:
    if found.saved is None:
        return "none"
    where = ", in memory" if found.saved.in_memory else ""
    return f"step {found.saved.step:,}, {readable_duration(found.saved.age_seconds)} ago{where}"


def _ranks(found: RunState) -> Iterator[Piece | str]:
    """With many, the slow and the silent ones first."""
    late = {one.rank: one for one in found.late}
    straggling = {one.rank for one in found.stragglers}
    memory = dict(enumerate(found.figures.memory_bytes_of_ranks))
    shown = sorted(found.ranks, key=lambda one: (one.rank not in straggling, -one.phase_seconds, one.rank))
    shown = sorted(shown[:_MOST_RANKS], key=lambda one: one.rank)
    rows = [
        (
            f"{one.rank}",
            one.phase,
            f"{one.step:,}",
            readable_duration(one.phase_seconds),
            readable_bytes(memory[one.rank]) if one.rank in memory else "–",
            readable_share(late[one.rank].share) if one.rank in late else "–",
        )
        for one in shown
    ]
    names = ("rank", "phase", "steps done", "for", "memory", "late")
    yield table("Ranks", names, rows, numbers_from=2, optional=("memory", "late"))
    if len(found.ranks) > len(shown):
        yield f"{counted(len(found.ranks) - len(shown), 'other rank')} not shown; --json has all."


def saved_page(place: str, manifest: Manifest, age_seconds: float) -> Page:
    """Of checkpoints alone: what runs there, if anything does, is not known."""
    steps = _steps(manifest)
    of = "" if steps is None else f" of {steps:,}"
    losses = manifest.numbers.get("losses") or []
    rows = [("newest commit", f"step {manifest.step:,}{of}, {readable_duration(age_seconds)} ago")]
    rows += [("loss", f"{losses[-1]:.3f}")] if losses else []
    lines = (Line(f"{place}: checkpoints, without the folder of their run", "bold"),)
    return Page((*lines, table("", ("", ""), rows, numbers_from=2)))


def saved_data(place: str, manifest: Manifest, age_seconds: float) -> dict[str, Any]:
    losses = manifest.numbers.get("losses") or [None]
    return {
        "run": place,
        "state": "checkpoints",
        "step": manifest.step,
        "steps": _steps(manifest),
        "loss": losses[-1],
        "saved": {"step": manifest.step, "age_seconds": age_seconds, "in_memory": False},
    }


def _steps(manifest: Manifest) -> int | None:
    run = manifest.job.get("run")
    steps = run.get("steps") if isinstance(run, dict) else None
    return steps if isinstance(steps, int) else None
