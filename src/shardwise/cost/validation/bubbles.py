"""Published bubble rates against the simulator of our own action lists."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from shardwise.pipeline import build, equal_stages, simulate

# Qi et al. 2023 (arXiv 2401.10241) Table 3: 24 and 32 layer slots over 8 stages, one layer per chunk; Table 1:
# of 34 + 5as/h bytes per token and hidden unit the weight gradient needs 32, the input gradient releases the rest.
_CHUNKS = {"1.5B": 3, "6.2B": 4}
_RELEASED = {"1.5B": 1 - 32 / (34 + 5 * 24 * 1024 / 2304), "6.2B": 1 - 32 / (34 + 5 * 32 * 1024 / 4096)}
_NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved"}


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
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [_scored(row) for row in csv.DictReader(file)]


def _scored(row: dict[str, str]) -> ScoredBubble:
    name, model = _NAMES.get(row["schedule"], row["schedule"].lower()), row["model"]
    chunks = _CHUNKS.get(model, 2) if name == "interleaved" else 1
    ranks, microbatches, comm = int(row["stages"]), int(row["microbatches"]), float(row["t_comm_ms"])
    profile = (float(row[f"t_{part}_ms"]) / chunks for part in ("forward", "input_grad", "weight_grad"))
    times = equal_stages(ranks * chunks, *profile)
    schedule = build(
        name,
        ranks,
        microbatches,
        chunks=chunks,
        times=times,
        comm_seconds=comm,
        released_by_input_grad=_RELEASED.get(model, 0.0),
    )
    rate = simulate(schedule, times, comm).bubble_rate
    return ScoredBubble(model, row["schedule"], microbatches, float(row["bubble_rate"]), rate)
