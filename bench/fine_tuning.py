"""How far predictions of published fine-tuning runs are off, and whether runs that had no room are told so.

python bench/fine_tuning.py TABLE            # by source, and all sources counted equally
python bench/fine_tuning.py TABLE LitGPT     # row by row, of sources whose name contains this

TABLE has the columns of `shardwise.accuracy.fine_tuning_runs.COLUMNS`. No constant is fitted on any of its rows; which
settings of a source's software were chosen after its errors had been seen is in docs/fine-tuning.md.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.accuracy.fine_tuning_runs import ran_out
from shardwise.accuracy.runs import PublishedRun
from shardwise.accuracy.scores import NotScored, Score, published_runs, score
from shardwise.cost.memory.device import device_memories
from shardwise.cost.memory.room import fit_of, room_of, tightest
from shardwise.spec.job import Job

KINDS = ("time", "allocated", "reserved", "process")  # what a figure is of


@dataclass(frozen=True)
class Scored:
    """A run, its score, and whether it is predicted to fit."""

    run: PublishedRun
    score: Score
    fit: str

    def error(self, kind: str) -> float | None:
        if kind == "time":
            return self.score.time_error
        return self.score.memory_error if memory_kind(self.run) == kind else None


def memory_kind(run: PublishedRun) -> str:
    words = run.memory_kind.partition("(")[0].lower()
    return "process" if "nvidia-smi" in words else ("reserved" if "reserved" in words else "allocated")


@dataclass(frozen=True)
class Errors:
    """Mean and median of absolute errors, and their signed mean."""

    rows: int
    mean: float
    median: float
    bias: float

    def __str__(self) -> str:
        return f"{self.rows:3}: {self.mean:5.1%} {self.median:5.1%} {self.bias:+6.1%}"


def errors(found: Sequence[float]) -> Errors | None:
    sizes = [abs(error) for error in found]
    return (
        Errors(len(found), statistics.mean(sizes), statistics.median(sizes), statistics.mean(found)) if found else None
    )


def by_source(scored: Iterable[Scored]) -> dict[str, dict[str, Errors]]:
    """For every source the errors of each kind that it has; of `all sources equally`, the means over sources."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.score.source, []).append(one)
    found: dict[str, dict[str, Errors]] = {}
    for source, own in groups.items():
        each = {kind: errors([error for one in own if (error := one.error(kind)) is not None]) for kind in KINDS}
        found[source] = {kind: one for kind, one in each.items() if one}
    kinds = [kind for kind in KINDS if any(kind in each for each in found.values())]
    return {**found, "all sources equally": {kind: _mean(found.values(), kind) for kind in kinds}}


def _mean(sources: Iterable[dict[str, Errors]], kind: str) -> Errors:
    own = [each[kind] for each in sources if kind in each]
    figures = (statistics.mean(getattr(one, name) for one in own) for name in ("mean", "median", "bias"))
    return Errors(sum(one.rows for one in own), *figures)


def told(job: Job) -> str:
    """What `analyze` says of a job's memory before it runs: `refused`, `warned`, `tight` or `fits`.

    Warned are jobs for which a device is predicted to need more than it has, within the error bar: "tight: a device
    needs 85.6 GiB of 79.1 GiB". `plan` chooses neither these nor those that are tight with less.
    """
    fit = fit_of(job)
    if fit == "tight":
        fullest, memory = tightest(job, device_memories(job))
        return "warned" if memory.total > room_of(fullest).usable_bytes else "tight"
    return "refused" if fit == "does not fit" else "fits"


def room(scored: Iterable[Scored]) -> list[str]:
    """What runs out of memory were told, and what runs that ran."""
    found = Counter((ran_out(one.run), told(one.run.job)) for one in scored)
    words = ("refused", "warned", "tight", "fits")
    return [
        f"{name}: {sum(found[was, word] for word in words)} runs, "
        + ", ".join(f"{word} {found[was, word]}" for word in words)
        for was, name in ((True, "out of memory"), (False, "ran"))
    ]


def reasons(refused: Iterable[NotScored]) -> str:
    """Rows that are not priced, by the column that forbids it."""
    columns = Counter(one.reason.partition(":")[0].rpartition(".")[2] for one in refused)
    return ", ".join(f"{column} {count}" for column, count in columns.most_common())


def main() -> int:
    path, *names = sys.argv[1:] or [""]
    if not Path(path).is_file():
        print(f"no table of fine-tuning runs at {path or 'the first argument'}")
        return 0
    runs, refused = published_runs([path])
    aside = [run.row_id for run in runs if run.set_aside]
    scored = [Scored(run, score(run), fit_of(run.job)) for run in runs if not run.set_aside]
    if names:
        for one in (one for one in scored if names[0] in one.score.source):
            print(_line(one))
        return 0
    print(f"{len(runs)} rows priced, {len(refused)} not: {reasons(refused)}; set aside: {', '.join(aside) or 'none'}")
    print("rows: mean, median, bias of " + ", ".join(KINDS))
    for source, each in by_source(scored).items():
        print(f"{source:24}" + "  ".join(f"{each[kind]!s:>26}" if kind in each else " " * 26 for kind in KINDS))
    print(*room(scored), sep="\n")
    return 0


def _line(one: Scored) -> str:
    row, memory = one.run.row, one.run.reported_memory_bytes
    cells = " ".join(row.text(name) for name in ("method", "gpus", "micro_batch", "seq", "zero_or_fsdp", "kernels"))
    figures = [f"{one.score.time_error:+7.1%}" if one.score.time_error is not None else " " * 7]
    figures.append(f"{one.score.memory_error:+7.1%} of {memory / 2**30:5.1f}" if memory else " " * 16)
    return (
        f"{one.score.row_id} {' '.join(figures)} {one.fit:12} {row.text('fits'):10} {row.text('model')[-22:]} {cells}"
    )


if __name__ == "__main__":
    sys.exit(main())
