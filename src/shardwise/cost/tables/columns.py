"""The columns of a group's table: what ZeRO and its shard group make every kind of rank send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.cost.communication.data import (
    SharedRanks,
    communication_units,
    data_lines,
    dense_ranks,
    expert_ranks,
    wire_bytes,
)
from shardwise.cost.stages import RankContents
from shardwise.cost.states import Sharding
from shardwise.cost.tables.book import CollectiveBook
from shardwise.cost.tables.group import Group, ShardChoice, sharding_columns, shards_of
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True)
class ColumnClass:
    """Columns that communicate equally often.

    ``tickets`` for the collectives of every kind of rank: part (dense parameters, experts) × line (as `data_lines` has
    them) × kind × column; ``units`` that each goes over: part × kind × column.
    """

    numbers: Array  # among the group's columns
    sharding: Sharding
    tickets: Array
    units: Array


def column_classes(job: Job, group: Group, book: CollectiveBook) -> list[ColumnClass]:
    """The columns of ``group`` by how and how often they communicate; collectives are asked for, not yet priced."""
    import numpy as np

    classes: dict[tuple[bool, bool], list[int]] = {}
    for number, choice in enumerate(group.shards):
        classes.setdefault(choice.how_often, []).append(number)
    result = []
    held = {shards: _held(job, group, shards) for shards in {shards_of(group.base, one) for one in group.shards}}
    for numbers in classes.values():
        choices = [group.shards[number] for number in numbers]
        sharding = sharding_columns(group.base, choices)
        result.append(ColumnClass(np.array(numbers), sharding, *_tickets(job, group, choices, sharding, held, book)))
    return result


def _held(job: Job, group: Group, shards: int) -> list[SharedRanks]:
    """Which ranks hold the dense parameters and the experts, with that many shards of the dense."""
    return [dense_ranks(group.base, shards), *([expert_ranks(group.base, shards)] if job.model.moe else [])]


def _tickets(
    job: Job,
    group: Group,
    choices: Sequence[ShardChoice],
    sharding: Sharding,
    held_by: Mapping[int, list[SharedRanks]],
    book: CollectiveBook,
) -> tuple[Array, Array]:
    """Every distinct shard group is looked at once, for every kind of rank."""
    import numpy as np

    distinct = {(choice.zero, choice.shard_group): choice for choice in choices}
    numbers = {key: number for number, key in enumerate(distinct)}
    of_column = np.array([numbers[choice.zero, choice.shard_group] for choice in choices])
    tickets: list[Any] = []
    units: list[Any] = []
    for choice in distinct.values():
        held = held_by[shards_of(group.base, choice)]
        pieces = [communication_units(job, contents, choice.zero)[: len(held)] for contents in group.ranks]
        units.append(pieces)
        tickets.append(
            [_rank_tickets(job, contents, n, held, sharding, book) for contents, n in zip(group.ranks, pieces)]
        )
    # choice × kind × part × line, and choice × kind × part.
    return (
        np.array(tickets).transpose(2, 3, 1, 0)[..., of_column],
        np.array(units, dtype=float).transpose(2, 1, 0)[..., of_column],
    )


def _rank_tickets(
    job: Job,
    contents: RankContents,
    units: Sequence[int],
    held: Sequence[SharedRanks],
    sharding: Sharding,
    book: CollectiveBook,
) -> list[list[int]]:
    """Part × line: a ticket for the collective over one unit."""
    result = []
    for parameters, pieces, ranks in zip((contents.dense, contents.experts), units, held):
        lines = data_lines(sharding, parameters / pieces, ranks.shards, wire_bytes(job), 1, 1.0)
        result.append(
            [
                book.ticket(line.kind, ranks.sharded if line.over == "shards" else ranks.replicas, line.unit_bytes)
                for line in lines
            ]
        )
    return result
