"""Published bubble rates against the simulator of our own action lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.accuracy import vocabulary
from shardwise.accuracy.table import TableRow, read_table
from shardwise.pipeline import build, equal_stages, simulate
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.schedules import job_schedules, schedule_record

COLUMNS = ("model", "stages", "microbatches", "schedule", "bubble_rate", "t_forward_ms", "t_input_grad_ms",
           "t_weight_grad_ms", "t_comm_ms")  # fmt: skip
_MOST_ACTIONS = 100_000


@dataclass(frozen=True)
class _PaperModel:
    """A row of Qi et al. 2023 (arXiv 2401.10241) Table 3; embedding and loss take the place of one layer each."""

    layers: int
    heads: int
    hidden: int
    seq: int = 1024

    def chunks(self, stages: int) -> int:
        """One layer per chunk, as the paper interleaves."""
        return max(2, (self.layers + 2) // stages)

    @property
    def released_by_input_grad(self) -> float:
        """Of 34 + 5as/h bytes per token and hidden unit the weight gradient needs 32 (Table 1 of the paper)."""
        return 1 - 32 / (34 + 5 * self.heads * self.seq / self.hidden)


_MODELS = {
    "1.5": _PaperModel(22, 24, 2304),
    "6.2": _PaperModel(30, 32, 4096),
    "14.6": _PaperModel(46, 40, 5120),
    "28.3": _PaperModel(62, 48, 6144),
}


@dataclass(frozen=True)
class ScoredBubble:
    """One published bubble rate and the simulated one."""

    model: str
    schedule: str
    microbatches: int
    reported: float
    simulated: float

    @property
    def error(self) -> float:
        """Difference of the rates, not relative: a rate near zero has no relative error worth the name."""
        return self.simulated - self.reported


def score_bubbles(path: Path | str) -> list[ScoredBubble]:
    """Every row of a table in the layout of validation/pipeline_bubble.csv."""
    scored = []
    for number, row in enumerate(read_table(path, COLUMNS, "bubbles"), start=1):
        try:
            scored.append(_scored(row))
        except SpecError as error:
            raise error.under(f"row {number}") from None
    return scored


def _scored(row: TableRow) -> ScoredBubble:
    name = vocabulary.schedule(row.text("schedule"))
    if name is None:
        problem = f"{shown(row.text('schedule'))} is unknown"
        raise SpecError("schedule", problem, "known are " + ", ".join(job_schedules()))
    ranks, microbatches, rate = row.whole("stages"), row.whole("microbatches"), row.needed("bubble_rate")
    if ranks * microbatches > _MOST_ACTIONS:
        raise SpecError("microbatches", f"{ranks} stages × {microbatches} are too many to simulate", "use fewer")
    if rate > 1:
        raise SpecError("bubble_rate", f"{rate:g} is above 1", "write the idle share of the step")
    size = re.search(r"\d+(\.\d+)?", row.text("model"))
    model = _MODELS.get(size[0]) if size else None
    chunks = schedule_record(name).chunks_per_rank(ranks, model.chunks(ranks) if model else 2)
    profile = [row.needed(f"t_{part}_ms") / chunks for part in ("forward", "input_grad", "weight_grad")]
    comm, times = row.needed("t_comm_ms"), equal_stages(ranks * chunks, *profile)
    released = model.released_by_input_grad if model else 0.0
    schedule = build(
        name, ranks, microbatches, chunks=chunks, times=times, comm_seconds=comm, released_by_input_grad=released
    )
    simulated = simulate(schedule, times, comm).bubble_rate
    return ScoredBubble(row.text("model"), row.text("schedule"), microbatches, rate, simulated)
