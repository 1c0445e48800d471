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
    them) × kind × column; ``units`` that each goes over: part × kind × 1.
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
    """Every distinct number of shards is looked at once, for every kind of rank."""
    import numpy as np

    shards = [shards_of(group.base, choice) for choice in choices]
    distinct = list(dict.fromkeys(shards))
    of_column = np.array([distinct.index(one) for one in shards])
    held = list(zip(*(held_by[one] for one in distinct)))  # part × shards
    units = np.array([communication_units(contents)[: len(held)] for contents in group.ranks], dtype=float).T
    parameters = np.array([(contents.dense, contents.experts)[: len(held)] for contents in group.ranks]).T
    in_layers = np.array([(contents.layer_matrices, contents.experts)[: len(held)] for contents in group.ranks]).T
    each = zip(parameters / units, in_layers / units, held)
    tickets = [_part_tickets(job, group.base.pp, *part, sharding, book) for part in each]
    # part × line × shards × kind; part × kind
    return (
        np.array(tickets).transpose(0, 1, 3, 2)[..., of_column],
        units[..., None],
    )


def _part_tickets(
    job: Job,
    pp: int,
    unit_parameters: Array,
    unit_layer: Array,
    held: Sequence[SharedRanks],
    sharding: Sharding,
    book: CollectiveBook,
) -> list[list[list[int]]]:
    """Line × shards × kind: a ticket for the collective over one unit."""
    import numpy as np

    shards = np.array([ranks.shards for ranks in held])[:, None]
    tickets = []
    for line in data_lines(sharding, unit_parameters, unit_layer, shards, wire_bytes(job, pp), 1, 1.0):
        sizes = np.broadcast_to(line.unit_bytes, (len(held), len(unit_parameters))).tolist()
        runs = [ranks.sharded if line.over == "shards" else ranks.replicas for ranks in held]
        tickets.append([book.tickets(line.kind, *one) for one in zip(runs, sizes)])
    return tickets
