"""Writes src/shardwise/uncertainty/residuals.csv: how far predictions are off, where error bars come from.

    python bench/residuals.py            # after a change of prices, or of the rows in validation/
    python bench/residuals.py --check    # is the file what the rows give today? --quick: as scored, nothing left out

A line for the step time and one for the memory of every published run that is not set aside: its error as scored, and
with its model, its source or its device left out of the fit of the device's constants (bench/left_out.py). Nothing is
fitted on memory.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Iterator

from fit_devices import FITS, with_time
from left_out import LeftOut
from shardwise.accuracy.runs import PublishedRun
from shardwise.accuracy.scores import layouts_of_jobs, predicted_memory, published_runs
from shardwise.accuracy.table import TRAINING_RUNS
from shardwise.cost.step.prediction import predict
from shardwise.uncertainty.residuals import FILE, Residuals, residuals, standing_of

TOLERANCE = 2e-3  # of an error, between machines: linear algebra rounds differently


def lines(*, quick: bool = False) -> Iterator[Residuals]:
    """The file as it is today; ``quick`` without what needs a fit."""
    published = published_runs(TRAINING_RUNS)[0]
    runs = with_time(published)
    apart = LeftOut(runs, FITS)
    jobs = {run.row_id: own[0].row_id for own in layouts_of_jobs(runs) for run in own}
    for run in runs:
        error = predict(run.job).step_seconds / (run.reported_seconds or math.nan) - 1
        without = [
            error if quick else math.expm1(apart.each(what)[run.row_id]) for what in ("model", "source", "device")
        ]
        yield _line("time", run, jobs.get(run.row_id, ""), error, *without)
    for run in (*published, *published_runs(["memory_runs"])[0]):
        if run.reported_memory_bytes and not run.set_aside:
            yield _line("memory", run, "", *[predicted_memory(run) / run.reported_memory_bytes - 1] * 4)


def _line(what: str, run: PublishedRun, job: str, *errors: float) -> Residuals:
    standing = standing_of(run.job)
    fitted = standing.device in {device for fit in FITS for device in fit.devices}
    where = (standing.device, standing.kind, standing.stack, standing.devices)
    return Residuals(what, run.row_id, run.source.name, *where, fitted, job, *(round(error, 4) for error in errors))


def text(found: Iterable[Residuals]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows((Residuals._fields, *found))
    return out.getvalue()


def differences(found: Iterable[Residuals], *, quick: bool) -> Iterator[str]:
    """A line for every row that the file does not have as it is today."""
    today = {(line.what, line.row_id): line for line in found}
    kept = {(line.what, line.row_id): line for line in residuals()}
    for key in today.keys() | kept.keys():
        if key not in today or key not in kept:
            yield f"{' '.join(key)}: only in {'the file' if key in kept else 'the tables'}"
        elif off := [
            name for name in _compared(quick) if not _same(getattr(kept[key], name), getattr(today[key], name))
        ]:
            yield f"{' '.join(key)}: {', '.join(off)}"


def _compared(quick: bool) -> list[str]:
    return [name for name in Residuals._fields if not (quick and name.startswith("left_out"))]


def _same(kept: object, now: object) -> bool:
    if isinstance(kept, float) and isinstance(now, float):
        return abs(kept - now) <= TOLERANCE * (1 + abs(now))
    return kept == now


def main() -> int:
    quick = "--quick" in sys.argv
    found = list(lines(quick=quick))
    if "--check" in sys.argv:
        changed = list(differences(found, quick=quick))
        print("\n".join(changed) or f"{FILE.name} is up to date")
        return int(bool(changed))
    FILE.write_text(text(found), encoding="utf-8")
    print(f"wrote {len(found)} lines to {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
