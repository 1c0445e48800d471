"""A run as text: its state while it goes on, its end beside the prediction, and the checks of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.launch.observe.state import RunState
from shardwise.launch.outcome import STOPPED, Outcome
from shardwise.launch.run import RehearsalCheck
from shardwise.report.console import table
from shardwise.report.page import Line, Page, Piece, paged
from shardwise.report.progress import figures_in_words
from shardwise.report.tables import Bar
from shardwise.run.checkpoint.manifest import Manifest
from shardwise.run.metrics.lines import RECENT_LOSSES, RunSummary
from shardwise.spec.job import Job
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_seconds,
    readable_share,
)

_MOST_RANKS = 16


def status_line(state: RunState) -> str:
    """The state and its figures in a line, as the progress of `train` shows them."""
    words = figures_in_words(state.figures, state.steps or state.step) if state.figures.step_seconds is not None else ()
    return ", ".join((state_words(state), *words))


def state_words(state: RunState) -> str:
    """ "failed, step 12 of 40"."""
    steps = "" if state.steps is None else f" of {state.steps:,}"
    return f"{state.state}, step {state.step:,}{steps}"


@paged
def status_page(state: RunState) -> Iterator[Piece | str]:
    yield Line(f"{state.folder}: {state_words(state)}", "bold")
    if state.steps:
        share = state.step / state.steps
        yield table("", ("", ""), [(readable_share(share), Bar(share))], numbers_from=2)
    for text in (state.why, "" if state.finding is None else state.finding.text):
        if text:
            yield f"{text[0].upper()}{text[1:]}."
    if state.state == "killed":
        yield "Nobody trains in it, and its end was not recorded: start the same command again to resume."
    if state.state == "stopped":
        yield "A signal stopped it before its last step: start the same command again to resume."
    yield table("", ("", ""), _rows(state), numbers_from=2)
    if state.ranks:
        yield from _ranks(state)


def _rows(state: RunState) -> Iterator[tuple[str, str]]:
    figures = state.figures
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
    if state.left_seconds is not None:
        yield "left", readable_duration(state.left_seconds)
    if state.quiet_seconds is not None:
        yield "newest step", f"{readable_duration(state.quiet_seconds)} ago"
    yield "newest commit", _commit(state)
    yield "restarts", f"{state.restarts:,}"
    if state.goodput is not None:
        up = readable_duration(state.running_seconds)
        yield "goodput", f"{readable_share(state.goodput)} of {up} in steps that count"
    if state.alive:
        slow = [
            f"rank {straggler.rank}, others wait {readable_share(straggler.share)} of the time"
            for straggler in state.stragglers
        ]
        yield "stragglers", "; ".join(slow) or ("none seen" if state.late else "not known yet")


def _commit(state: RunState) -> str:
    if state.saved is None:
        return "none"
    where = ", in memory" if state.saved.in_memory else ""
    return f"step {state.saved.step:,}, {readable_duration(state.saved.age_seconds)} ago{where}"


def _ranks(state: RunState) -> Iterator[Piece | str]:
    """A table of the ranks; of many, those that are slow or silent."""
    late = {rank.rank: rank for rank in state.late}
    straggling = {rank.rank for rank in state.stragglers}
    memory = dict(enumerate(state.figures.memory_bytes_of_ranks))
    shown = sorted(state.ranks, key=lambda rank: (rank.rank not in straggling, -rank.phase_seconds, rank.rank))
    shown = sorted(shown[:_MOST_RANKS], key=lambda rank: rank.rank)
    rows = [
        (
            f"{rank.rank}",
            rank.phase,
            f"{rank.step:,}",
            readable_duration(rank.phase_seconds),
            readable_bytes(memory[rank.rank]) if rank.rank in memory else "–",
            readable_share(late[rank.rank].share) if rank.rank in late else "–",
        )
        for rank in shown
    ]
    names = ("rank", "phase", "steps done", "for", "memory", "late")
    yield table("Ranks", names, rows, numbers_from=2, optional=("memory", "late"))
    if len(state.ranks) > len(shown):
        yield f"{counted(len(state.ranks) - len(shown), 'other rank')} not shown; --json has all."


def saved_page(place: str, manifest: Manifest, age_seconds: float) -> Page:
    """The newest checkpoint where only checkpoints are known, and not the run that writes them."""
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


# -- the end of a run, and the checks of a rehearsal -----------------------------------------------------


def summary_pieces(summary: RunSummary, data_type: str) -> Iterator[Piece | str]:
    """The figures of a run; MFU is relative to the device's peak in ``data_type``, that of the matmuls."""
    rows = [
        ("step time", summary.predicted_seconds, summary.step_seconds, readable_seconds),
        ("memory of the fullest rank", summary.predicted_memory_bytes, summary.memory_bytes, readable_bytes),
    ]
    cells = [
        (
            name,
            *("–" if figure is None else show(figure) for figure in (predicted, measured)),
            "–" if not predicted or measured is None else f"{measured / predicted:.2f}",
        )
        for name, predicted, measured, show in rows
    ]
    yield table("Predicted beside measured", ("", "predicted", "measured", "measured / predicted"), cells)
    words = [counted(summary.steps, "step")]
    if summary.tokens_per_second is not None and summary.mfu is not None:
        words.append(f"{readable_count(summary.tokens_per_second)} tokens/s")
        words.append(f"MFU {readable_share(summary.mfu)} of the {data_type} peak")
    if summary.first_loss is not None and summary.last_loss is not None:
        recent = (
            f" (median of the last {RECENT_LOSSES}: {summary.recent_loss:.3f})" if summary.steps > RECENT_LOSSES else ""
        )
        words.append(f"loss {summary.first_loss:.3f} → {summary.last_loss:.3f}{recent}")
    if summary.first_validation is not None and summary.last_validation is not None:
        share = summary.last_validation / summary.first_validation
        words.append(f"validation loss {summary.first_validation:.3f} → {summary.last_validation:.3f} ({share:.0%})")
    yield "; ".join(words)
    if summary.missing_steps:
        yield f"metrics.jsonl has no line for step {summary.missing_steps}: the figures above leave them out."


@paged
def training_page(summary: RunSummary, job: Job, outcome: Outcome | None) -> Iterator[Piece | str]:
    """How a run ended; without an ``outcome`` there was nothing left to do."""
    if outcome is None:
        more = "" if summary.steps == job.run.steps else f" of {job.run.steps:,}, where run.stop_at pauses it"
        yield f"Nothing to do: the run in {job.run.folder} is at its last step, {summary.steps:,}{more}."
        yield "Raise --steps to continue it, or name another --run-folder to start a new run."
        return
    if summary.step_seconds is not None:
        yield from summary_pieces(summary, job.training.recipe.compute)
    if outcome.status:
        saved = "there" if outcome.status == STOPPED else "the last checkpoint"
        yield f"Stopped at step {summary.steps:,} of {job.run.steps:,}: the same command resumes from {saved}."
    else:
        yield f"Done: {job.run.folder}"


def training_data(summary: RunSummary, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {**asdict(summary), "status": 0, "stopped": False, "attempts": 0}
    failure = outcome.failure if outcome.status else None
    ended = {"status": outcome.status, "stopped": outcome.stopped, "attempts": len(outcome.attempts)}
    figures = {**asdict(summary), **ended}
    return {**figures, "failure": None if failure is None else failure.reason}


def points_page(points: Sequence[RehearsalCheck]) -> Page:
    rows = [("pass" if check.passed else "FAIL", check.name, check.figure) for check in points]
    return Page((table("Rehearsal", ("", "point", "figure"), rows, numbers_from=3),))


# -- what `checkpoint inspect` shows -----------------------------------------------------------------

_KINDS = {"weight": "weights", "buffer": "buffers"}


def contents_page(contents: dict[str, Any], *, each_tensor: bool) -> Page:
    """A page of what `run.checkpoint.manifest.contents_of` returns."""
    sizes, tensors = contents["bytes"], contents["tensors"]
    rows = [
        (_KINDS.get(kind, kind), f"{sum(tensor['kind'] == kind for tensor in tensors):,}", readable_bytes(size))
        for kind, size in sizes.items()
    ]
    rows.append(("all", f"{len(tensors):,}", readable_bytes(sum(sizes.values()))))
    tables = [table("", (contents["path"], ""), _content_rows(contents), numbers_from=2)]
    tables.append(table("Contents", ("", "tensors", "bytes"), rows))
    if each_tensor:
        cells = [
            (*(tensor[name] for name in ("kind", "name", "dtype")), " × ".join(map(str, tensor["shape"])),
             str(tensor["pieces"]), readable_bytes(tensor["bytes"]))
            for tensor in tensors
        ]  # fmt: skip
        columns = "kind", "tensor", "type", "shape", "pieces", "bytes"
        tables.append(table("Tensors", columns, cells, numbers_from=3))
    return Page(tuple(tables))


def _content_rows(contents: dict[str, Any]) -> list[tuple[str, str]]:
    # The layout without degrees of 1.
    layout = [f"{name} {_value(value)}" for name, value in contents["layout"].items() if value != 1 or name == "zero"]
    saved_under = ", ".join(layout) or ("one process" if contents["numbers"] else "no layout: whole tensors")
    rows = [("step", f"{contents['step']:,}"), ("model", contents["model"]), ("saved under", saved_under)]
    if contents["precision"]:
        rows.append(("precision", str(contents["precision"])))
    files = contents["files"]
    rows.append(("files", f"{len(files):,}, {readable_bytes(sum(files.values()))}"))
    numbers = dict(contents["numbers"])
    if "optimizer_steps" in numbers:
        rows.append(("optimizer steps", readable_count(numbers.pop("optimizer_steps"))))
    if isinstance(scale := numbers.pop("loss_scale", None), dict):
        rows.append(("loss scale", ", ".join(f"{name} {value:g}" for name, value in scale.items())))
    if isinstance(data := numbers.pop("data", None), dict):
        rows.append(("data", _position(data)))
    if isinstance(losses := numbers.pop("losses", None), list) and losses:
        rows.append(("last loss", f"{losses[-1]:.4g}"))
    return rows


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _position(data: dict[str, Any]) -> str:
    words = [f"batch {data['batch']:,} is next"] if isinstance(data.get("batch"), int) else []
    if isinstance(data.get("sequences"), int):
        words.append(f"{data['sequences']:,} sequences each")
    if data.get("left_out"):
        words.append(f"{len(data['left_out']):,} left out")
    return ", ".join(words)
