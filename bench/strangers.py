"""How far predictions are off for sources that no constant is fitted on (`accuracy/strangers.py`).

python bench/strangers.py             # by source, and all sources counted equally
python bench/strangers.py KempnerForge   # row by row, of sources whose name contains this
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.accuracy.scores import Score, published_runs, score
from shardwise.accuracy.table import TRAINING_RUNS


@dataclass(frozen=True)
class SourceErrors:
    """The errors of the step times of one source: absolute mean and median, signed mean; the share inside the bars.

    The bars are those of today, which may know the source: bench/coverage.py leaves it out. Of all sources each figure
    is the mean over sources. ``refused`` rows are predicted not to fit.
    """

    source: str
    rows: int
    mean: float
    median: float
    bias: float
    in_bar: float
    memory: float | None
    refused: int


def scores_of_strangers() -> list[Score]:
    runs = published_runs(TRAINING_RUNS)[0]
    return [score(run) for run in runs if not run.source.fitted and not run.set_aside]


def by_source(scores: Iterable[Score]) -> list[SourceErrors]:
    """Every source in order of appearance, then all of them counted equally."""
    groups: dict[str, list[Score]] = {}
    for one in scores:
        groups.setdefault(one.source, []).append(one)
    each = [_errors(source, own) for source, own in groups.items()]
    memories = [one.memory for one in each if one.memory is not None]
    names = ("mean", "median", "bias", "in_bar")
    means = {name: statistics.mean(getattr(one, name) for one in each) for name in names}
    rows, refused = (sum(getattr(one, name) for one in each) for name in ("rows", "refused"))
    memory = statistics.mean(memories) if memories else None
    return [*each, SourceErrors("all sources equally", rows, **means, memory=memory, refused=refused)]


def _errors(source: str, scores: Sequence[Score]) -> SourceErrors:
    times = [one.time_error for one in scores if one.time_error is not None]
    memories = [abs(one.memory_error) for one in scores if one.memory_error is not None]
    sizes = [abs(error) for error in times]
    inside = statistics.mean(bool(one.in_bar) for one in scores if one.in_bar is not None)
    figures = statistics.mean(sizes), statistics.median(sizes), statistics.mean(times), inside
    memory = statistics.mean(memories) if memories else None
    return SourceErrors(source, len(scores), *figures, memory, sum(not one.fits for one in scores))


def main() -> int:
    scores = scores_of_strangers()
    for name in sys.argv[1:]:
        for one in scores:
            if name in one.source:
                memory = "" if one.memory_error is None else f"  memory {one.memory_error:+.1%}"
                print(f"{one.row_id:48} {one.time_error or 0:+7.1%}  in bar: {one.in_bar}{memory}")
    if not sys.argv[1:]:
        for each in by_source(scores):
            memory = "" if each.memory is None else f"  memory {each.memory:.1%}"
            figures = (
                f"mean {each.mean:6.1%}  median {each.median:6.1%}  bias {each.bias:+6.1%}  in bar {each.in_bar:4.0%}"
            )
            print(f"{each.source:36} {each.rows:4} rows  {figures}  refused {each.refused}{memory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
