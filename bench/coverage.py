"""Do the error bars hold on sources that neither the fit nor the bars have seen?

    python bench/coverage.py

For every source the constants are fitted without it, and the bar of each of its rows comes from the errors of the other
sources alone, each of these with both itself and that source left out of the fit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fit_devices import FITS, fitted_runs
from left_out import LeftOut
from shardwise.uncertainty.residuals import (
    COVERAGE,
    KINDS,
    KnownErrors,
    RunError,
    Standing,
    memory_band,
    memory_errors,
    standing_of,
)


@dataclass(frozen=True)
class Held:
    """One row under the bar that it would have had: the class of the bar, its width and whether the report is in it."""

    row_id: str
    source: str
    standing: Standing
    of: str
    width: float
    inside: bool


@dataclass(frozen=True)
class ClassCoverage:
    """A class of jobs: rows, sources, the share of rows in their bars, its mean over sources, and the mean width."""

    of: str
    rows: int
    sources: int
    share: float
    share_of_sources: float
    width: float


def held_times() -> list[Held]:
    """Every row with a time, under a bar that its source had no part in."""
    runs = fitted_runs()
    apart = LeftOut(runs, FITS)
    fitted = frozenset(device for fit in FITS for device in fit.devices)
    standings = {run.row_id: standing_of(run.job) for run in runs}
    names = sorted({run.source.name for run in runs})
    found = []
    for source in names:
        errors = [
            RunError(row_id, other, standings[row_id], "", error)
            for other in names
            if other != source
            for row_id, error in apart.without("source", frozenset((source, other)), of=other).items()
        ]
        known = KnownErrors(errors, fitted)
        for row_id, error in apart.without("source", frozenset((source,)), of=source).items():
            standing = standings[row_id]
            band = known.band(standing, COVERAGE)
            found.append(Held(row_id, source, standing, _class(known, standing), band.width, band.holds(error)))
    return found


def _class(known: KnownErrors, standing: Standing) -> str:
    device = "fitted device" if known.is_fitted(standing.device) else "device without a fit"
    framework = "framework seen" if known.is_framework_known(standing.stack) else "framework not seen"
    return f"{KINDS[standing.kind]}, {device}, {framework}"


def held_memories() -> list[Held]:
    """Every row with a memory: of a framework with other rows beside the row itself, of others under the bar of all."""
    errors = memory_errors()
    found = []
    for one in errors:
        others = [other for other in errors if other.source != one.source]
        same = [other for other in errors if other.row_id != one.row_id]
        for of, rows in (("framework not seen", others), ("framework seen", same)):
            band = memory_band(one.standing, rows)
            found.append(Held(one.row_id, one.source, one.standing, of, band.width, band.holds(one.error)))
    return found


def by_class(held: Iterable[Held], key: str = "of") -> list[ClassCoverage]:
    """Coverage by class, the largest first, then of all; ``key``: "of" or "device"."""
    groups: dict[str, list[Held]] = {}
    for one in held:
        groups.setdefault(one.of if key == "of" else f"{one.standing.device}, {KINDS[one.standing.kind]}", []).append(
            one
        )
    return sorted((class_coverage(of, own) for of, own in groups.items()), key=lambda one: -one.rows)


def class_coverage(of: str, held: Sequence[Held]) -> ClassCoverage:
    share, width = (sum(values) / len(held) for values in ([one.inside for one in held], [one.width for one in held]))
    sources: dict[str, list[bool]] = {}
    for one in held:
        sources.setdefault(one.source, []).append(one.inside)
    of_sources = sum(sum(own) / len(own) for own in sources.values()) / len(sources)
    return ClassCoverage(of, len(held), len(sources), share, of_sources, width)


def main() -> int:
    times = held_times()
    parts = (("step time", times, "of"), ("step time by device", times, "device"), ("memory", held_memories(), "of"))
    for title, held, key in parts:
        print(title)
        for one in [*by_class(held, key), class_coverage("all", held)]:
            shares = f"{one.share:4.0%}, {one.share_of_sources:4.0%} by source"
            print(f"  {one.of:52} {one.rows:4} rows {one.sources:3} sources  in bar {shares}  ±{one.width:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
