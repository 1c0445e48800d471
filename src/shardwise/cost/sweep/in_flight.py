"""Microbatches whose activations a kind of rank holds at its peak, for every row of a table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.cost.sweep.group import Group, ScheduleChoice
from shardwise.pipeline import peak_chunks_in_flight
from shardwise.spec.schedules import schedule_record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def chunks_of(group: Group) -> list[int]:
    """Stages on a rank, by schedule."""
    return [_chunks(one, group.base.pp) for one in group.schedules]


def microbatches_in_flight(group: Group, microbatches: Array) -> Array:
    """Of the fullest rank of each kind: kind × layer × schedule × 1; ``microbatches`` are layer × schedule."""
    import numpy as np

    chunks, rows = chunks_of(group), [tuple(row) for row in microbatches.tolist()]
    of_row = {
        row: [
            _peaks(one.schedule, group.base.pp, m, number, group.members)
            for one, number, m in zip(group.schedules, chunks, row)
        ]
        for row in set(rows)
    }
    peaks = np.array([of_row[row] for row in rows])
    in_flight: Array = (peaks / np.array(chunks)[:, None]).transpose(2, 0, 1)[..., None]
    return in_flight


def _chunks(choice: ScheduleChoice, pp: int) -> int:
    return schedule_record(choice.schedule).chunks_per_rank(pp, choice.interleave)


@lru_cache(maxsize=65536)
def _peaks(
    schedule: str, pp: int, microbatches: int, chunks: int, members: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Chunks in flight on the fullest rank of each kind."""
    if pp == 1:
        return (chunks * (microbatches if schedule_record(schedule).forwards_first else 1),)
    return tuple(
        max(peak_chunks_in_flight(schedule, pp, microbatches, chunks, rank) for rank in ranks) for ranks in members
    )
