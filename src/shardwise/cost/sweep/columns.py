"""A group of strategies as the axes of a table, and the columns of that table.

Columns hold the collectives of every kind of rank under each ZeRO stage and shard group. Collectives are requested one
by one, and priced together for each network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.traffic.data import (
    SentParameters,
    communication_units,
    data_lines,
    gradient_price,
    sent_parameters,
    wire_bytes,
)
from shardwise.cost.traffic.lists import ListCopies
from shardwise.layout.gradient_schedules import measured_schedules
from shardwise.layout.groups import RankRun, expert_data_runs, expert_runs, expert_tensor_runs, group_runs
from shardwise.layout.network import neighbours_of, spanned
from shardwise.layout.sharding import Sharding, SharedRanks, dense_ranks, expert_ranks, sharding_of, stacked
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.strategy import Offload, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


# -- Strategies that share their degrees, as the axes of a table
# Rows differ in sequence parallelism, context method, microbatch, schedule and recompute; columns in ZeRO and its shard
# group. Every column may offload in several ways.


# The fields of a choice are those of a `Strategy`.
@dataclass(frozen=True)
class LayerChoice:
    sequence_parallel: bool
    context_method: str
    microbatch: int


@dataclass(frozen=True)
class ScheduleChoice:
    schedule: str
    interleave: int
    stage_layers: str | tuple[int, ...]


@dataclass(frozen=True)
class RecomputeChoice:
    recompute: str
    recompute_layers: int | None = None


@dataclass(frozen=True)
class ShardChoice:
    """A column: ZeRO and its shard group; None is all data-parallel ranks."""

    zero: int
    shard_group: int | None = None
    keep_parameters: bool = False
    accumulate: str = "sharded"

    def of(self, base: Strategy) -> Sharding:
        """The sharding of a strategy with this choice and the degrees of ``base``."""
        return sharding_of(base.unchecked(**vars(self)))


@dataclass(frozen=True)
class Group:
    """Strategies that share their degrees: every combination of the choices. All schedules of a group put the same
    layers on the ranks."""

    base: Strategy
    """The degrees, the rank order, and the overlap and dispatch of all strategies here. Also a stage of ZeRO:
    under autocast all strategies shard weights, or none does (`Job.autocasts`); in all or in none ZeRO-3's gathers take
    the host (`Stack.gathers_by_host`)."""
    layers: tuple[LayerChoice, ...]
    schedules: tuple[ScheduleChoice, ...]
    recomputes: tuple[RecomputeChoice, ...]
    shards: tuple[ShardChoice, ...]
    offloads: tuple[Offload, ...]
    ranks: tuple[RankContents, ...]  # one pipeline rank of each kind
    members: tuple[tuple[int, ...], ...]  # the pipeline ranks of each kind
    sequences: tuple[tuple[int, ...], ...]  # of a step: layer × schedule choice; 0 if the batch does not divide

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many pipeline ranks are of each kind."""
        return tuple(len(ranks) for ranks in self.members)

    @cached_property
    def row_cells(self) -> int:
        """Kinds of rank × rows."""
        return len(self.ranks) * len(self.layers) * len(self.schedules) * len(self.recomputes)

    @cached_property
    def places(self) -> dict[str, tuple[RankRun, ...]]:
        """Which ranks the groups of each dimension inside a pipeline hold."""
        dense = {name: group_runs(self.base, (name,)) for name in ("tp", "cp", "pp")}
        return {**dense, "ep": expert_runs(self.base), "expert_tp": expert_tensor_runs(self.base)}

    def strategy(self, row: dict[str, Any], column: ShardChoice, offload: Offload) -> Strategy:
        return replace(self.base, **row, **vars(column), offload=offload)


def groups_alike(groups: Sequence[Group], cells: int) -> Iterator[list[int]]:
    """Numbers of groups whose rows can be priced together: the same ranks, schedules and kinds of traffic.

    Unless it is a single group, together they have at most about ``cells`` (kinds of rank × rows).
    """
    alike: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        base = group.base
        dimensions = (base.tp > 1, base.cp > 1, base.ep > 1, base.overlap.ep)
        key = (group.members, group.ranks, group.schedules, group.recomputes, dimensions)
        if sum(groups[other].row_cells for other in alike.get(key, ())) >= cells:
            yield alike.pop(key)
        alike.setdefault(key, []).append(number)
    yield from alike.values()


# -- the columns ----------------------------------------------------------------------------------

FREE = 0  # the ticket of what no network carries


@dataclass
class CollectiveLine:
    """One kind of collective on one network: the tickets of its sizes, and which of them have no price yet."""

    tickets: dict[float, int] = field(default_factory=lambda: {0.0: FREE})
    waiting: list[float] = field(default_factory=list)


class CollectiveBook:
    """``tickets`` registers collectives and ``price_all`` prices those registered since the last time.

    Then ``seconds[tickets]`` and ``link_seconds[tickets]`` (one column per link of ``links``) are their prices.
    """

    def __init__(self, job: Job, links: tuple[str, ...]) -> None:
        """``job`` has everything but degrees."""
        import numpy as np

        self._cluster, self._links, self._algorithm = job.cluster, links, job.strategy.collective
        self._lists = ListCopies.of(job)
        self._count = 0
        # Groups of ranks that lie elsewhere and span equal networks pay the same.
        self._of_runs: dict[tuple[CollectiveKind, tuple[RankRun, ...], bool], CollectiveLine] = {}
        self._of_networks: dict[tuple[CollectiveKind, Topology, Topology | None], CollectiveLine] = {}
        self.seconds: Array = np.zeros(1)
        self.link_seconds: Array = np.zeros((1, len(links)))

    def line(
        self, kind: CollectiveKind, runs: tuple[RankRun, ...], by_schedules: bool = False
    ) -> CollectiveLine | None:
        """``by_schedules``: sums of gradients that a schedule of ours may make (`DataLine`). None: no network."""
        if not runs:
            return None
        line = self._of_runs.get((kind, runs, by_schedules))
        if line is None:
            topology = spanned(self._cluster, runs, "strategy", neighbours_of(self._cluster.library, kind))
            assert topology is not None
            ours = measured_schedules(self._cluster, runs) if by_schedules else None
            line = self._of_networks.setdefault((kind, topology, ours), CollectiveLine())
            self._of_runs[kind, runs, by_schedules] = line
        return line

    def tickets(self, line: CollectiveLine | None, sizes: Sequence[float]) -> list[int]:
        """One for every size."""
        if line is None:
            return [FREE] * len(sizes)
        known = line.tickets
        return [known[size] if size in known else self._new(line, size) for size in sizes]

    def _new(self, line: CollectiveLine, size: float) -> int:
        self._count += 1
        line.tickets[size] = self._count
        line.waiting.append(size)
        return self._count

    def price_all(self) -> None:
        import numpy as np

        seconds = np.zeros(self._count + 1)
        links = np.zeros((self._count + 1, len(self._links)))
        seconds[: len(self.seconds)], links[: len(self.seconds)] = self.seconds, self.link_seconds
        for (kind, topology, ours), line in self._of_networks.items():
            if not line.waiting:
                continue
            tickets = np.array([line.tickets[size] for size in line.waiting])
            cost = gradient_price(kind, np.array(line.waiting), topology, ours, self._algorithm, self._lists)
            seconds[tickets] = cost.seconds
            for level in cost.levels:
                links[tickets, self._links.index(level.level_name)] += level.busy_seconds
            line.waiting.clear()
        self.seconds, self.link_seconds = seconds, links


@dataclass(frozen=True)
class ColumnClass:
    """Columns that communicate equally often."""

    numbers: Array  # their numbers among the group's columns
    sharding: Sharding
    tickets: Array  # of collectives: part (dense parameters, experts) × line of `data_lines` × kind of rank × column
    units: Array  # how many units each collective is repeated for: part × kind of rank × 1


class ColumnBook:
    """Columns of groups; what groups of one layout share is worked out once."""

    def __init__(self, job: Job, collectives: CollectiveBook) -> None:
        """``job`` has everything but the strategy."""
        self._job, self._collectives = job, collectives
        self._wire = {pp > 1: wire_bytes(job, pp) for pp in (1, 2)}
        self._shardings: dict[tuple[Any, ...], list[_SharedColumns]] = {}
        self._shared: dict[tuple[Any, ...], list[_Shared]] = {}

    def classes(self, group: Group) -> list[ColumnClass]:
        """The columns of ``group`` by how often they communicate; collectives are registered, not yet priced."""
        import numpy as np

        job, base = self._job, group.base
        # part × figure × kind
        sent = np.array([self._of_parts(sent_parameters(job, base, rank)) for rank in group.ranks]).transpose(1, 2, 0)
        made = []
        for shared in self._shared_of(group):
            units = self._units(group, gathers_once=shared.columns.sharding.gathers_once)
            each = [SentParameters(*figures).over(number) for figures, number in zip(sent, units)]
            tickets = self._tickets(group, shared, each)
            columns = shared.columns
            made.append(ColumnClass(columns.numbers, columns.sharding, tickets, units[..., None]))
        return made

    def _units(self, group: Group, *, gathers_once: bool) -> Array:
        """Part × kind."""
        import numpy as np

        job, ranks = self._job, group.base.gradient_group
        units = [communication_units(job, rank, ranks, gathers_once=gathers_once) for rank in group.ranks]
        of_parts: Array = np.array([self._of_parts(pieces) for pieces in units], dtype=float).T
        return of_parts

    def _of_parts(self, figures: tuple[Any, Any]) -> tuple[Any, ...]:
        """The figures of the dense parameters, and of the experts if the model has any."""
        return figures if self._job.model.moe else figures[:1]

    def _shared_of(self, group: Group) -> list[_Shared]:
        base, moe = group.base, self._job.model.moe
        runs = (group_runs(base, ("cp", "dp")), expert_data_runs(base) if moe else ())
        sizes = (base.gradient_group, base.expert_data_parallel, base.pp == 1, group.shards)
        shared = self._shared.get((runs, sizes))
        if shared is None:
            if sizes not in self._shardings:
                self._shardings[sizes] = _by_class(group)
            shared = self._shared[runs, sizes] = [self._placed(base, columns) for columns in self._shardings[sizes]]
        return shared

    def _placed(self, base: Strategy, columns: _SharedColumns) -> _Shared:
        """The columns with the networks of their collectives."""
        held = [[dense_ranks(base, count) for count in columns.shards]]
        if self._job.model.moe:
            held.append([expert_ranks(base, count) for count in columns.shards])
        of_parts = [(self._shards(ranks), self._networks(base, columns.sharding, ranks)) for ranks in held]
        return _Shared(columns, of_parts)

    def _shards(self, held: Sequence[SharedRanks]) -> Array:
        import numpy as np

        return np.array([ranks.shards for ranks in held])[:, None]

    def _networks(
        self, base: Strategy, sharding: Sharding, held: Sequence[SharedRanks]
    ) -> list[list[CollectiveLine | None]]:
        """Line × number of shards."""
        lines = data_lines(sharding, SentParameters(0.0, 0.0), 1, self._wire[base.pp > 1], 1, 1.0)
        book = self._collectives
        return [
            [
                book.line(
                    line.kind, ranks.sharded if line.over == "shards" else ranks.replicas, line.by_schedules(ranks)
                )
                for ranks in held
            ]
            for line in lines
        ]

    def _tickets(self, group: Group, shared: _Shared, units: list[SentParameters]) -> Array:
        """Part × line × kind × column."""
        import numpy as np

        tickets = []
        for unit, (shards, networks) in zip(units, shared.of_parts):
            shape = np.zeros((len(shards), len(unit.all)))
            lines = data_lines(shared.columns.sharding, unit, shards, self._wire[group.base.pp > 1], 1, 1.0)
            of_lines = zip(((shape + line.unit_bytes).tolist() for line in lines), networks)
            tickets.append([list(map(self._collectives.tickets, of_shards, sizes)) for sizes, of_shards in of_lines])
        return np.array(tickets).transpose(0, 1, 3, 2)[..., shared.columns.of_column]


@dataclass(frozen=True)
class _SharedColumns:
    """Columns that communicate equally often, as far as it depends neither on their place nor on what ranks hold."""

    numbers: Array
    sharding: Sharding
    shards: list[Any]  # the distinct numbers of shards
    of_column: Array  # which of these each column has


@dataclass(frozen=True)
class _Shared:
    """The same, as far as it does not depend on what ranks hold."""

    columns: _SharedColumns
    of_parts: list[tuple[Array, list[list[CollectiveLine | None]]]]
    """Of the dense parameters, and of the experts: the numbers of shards that the distinct numbers make, and the
    networks of their collectives (line × number of shards)."""


def _by_class(group: Group) -> list[_SharedColumns]:
    import numpy as np

    shardings = [choice.of(group.base) for choice in group.shards]
    classes: dict[tuple[bool, bool], list[int]] = {}
    for number, sharding in enumerate(shardings):
        classes.setdefault((sharding.gradients_sharded, sharding.gathers_once), []).append(number)
    result = []
    for numbers in classes.values():
        alike = [shardings[number] for number in numbers]
        shards = [sharding.shards for sharding in alike]
        distinct = list(dict.fromkeys(shards))
        of_column = np.array([distinct.index(count) for count in shards])
        result.append(_SharedColumns(np.array(numbers), stacked(alike), distinct, of_column))
    return result
