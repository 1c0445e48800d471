"""Which collectives are measured on which ranks, and the bandwidths that follow from a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.collectives import CollectiveKind, Topology
from shardwise.collectives.build import require_schedule
from shardwise.collectives.cost import algorithm_names
from shardwise.layout.gradient_schedules import by_schedules, choose, named_on
from shardwise.layout.groups import Division, RankRun, division_of
from shardwise.layout.network import network
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster

BACKEND, AUTO = "backend", "auto"
ELEMENT_BYTES = 4
SMALLEST_BYTES = 8


@dataclass(frozen=True)
class MeasuredLevel:
    """A level of the network, of which all groups of ranks are measured at once; "world" connects all ranks."""

    name: str
    runs: tuple[RankRun, ...]

    def groups(self, world: int) -> Division:
        return division_of(world, self.runs)


def levels_of(cluster: Cluster) -> list[MeasuredLevel]:
    """The levels with several members, innermost first, and the whole world."""
    levels, below = [], 1
    for level in network(cluster).levels:
        if 1 < level.size < cluster.devices:
            levels.append(MeasuredLevel(level.name, (RankRun(below, level.size),)))
        below *= level.size
    return [*levels, MeasuredLevel("world", (RankRun(1, cluster.devices),))]


@dataclass(frozen=True)
class CollectiveRequest:
    """One collective on one level, by some algorithms and sizes; each size takes at most ``most_seconds``."""

    cluster: Cluster
    level: MeasuredLevel
    kind: CollectiveKind
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    warm_up: int = 2
    repeats: int = 10
    most_seconds: float = 3.0


@dataclass(frozen=True)
class MeasuredCollective:
    """The time of a collective on its slowest rank."""

    level: str
    kind: str
    algorithm: str
    ranks: int
    size_bytes: int  # as `CollectiveKind` defines it
    repeats: int
    median_seconds: float
    least_seconds: float
    right: bool
    predicted_seconds: float | None = None

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes/s of nccl-tests' algbw: the size over the time."""
        return self.size_bytes / self.median_seconds if self.median_seconds else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """nccl-tests' busbw: bytes/s through a port, if the algorithm is the best possible."""
        return self.algorithm_bandwidth * bus_factor(CollectiveKind(self.kind), self.ranks)


def bus_factor(kind: CollectiveKind, n: int) -> float:
    """busbw over algbw, by nccl-tests' doc/PERFORMANCE.md."""
    if kind is CollectiveKind.ALL_REDUCE:
        return 2 * (n - 1) / n
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.SEND_RECV):
        return 1.0
    return (n - 1) / n


def sizes_between(smallest: int, largest: int) -> tuple[int, ...]:
    """Sizes that grow by four; the largest is always included."""
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size *= 4
    return (*sizes, largest)


def offered(
    kind: CollectiveKind, level: MeasuredLevel, cluster: Cluster, wanted: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The ``wanted`` algorithms (None: all) that exist for this collective on the level, by their names there."""
    topology = by_schedules(cluster, level.runs)
    wanted = (BACKEND, *algorithm_names(kind, topology)) if wanted is None else wanted
    named = [name if name in (BACKEND, AUTO) else named_on(name, topology) for name in wanted]
    return tuple(name for name in named if name in (BACKEND, AUTO) or _runs(kind, topology, name))


def _runs(kind: CollectiveKind, topology: Topology, name: str) -> bool:
    try:
        require_schedule(kind, topology, name)
    except SpecError:
        return False
    return True


def predicted(request: CollectiveRequest, algorithm: str, size: int) -> float:
    wanted = AUTO if algorithm == BACKEND else algorithm
    choice = choose(request.kind, size, request.cluster, request.level.runs, wanted)
    return choice.backend_seconds if algorithm == BACKEND else choice.seconds


def requests(
    cluster: Cluster,
    levels: list[MeasuredLevel],
    kinds: list[CollectiveKind],
    algorithms: tuple[str, ...] | None,
    sizes: tuple[int, ...],
    **how: float,
) -> Iterator[CollectiveRequest]:
    for level in levels:
        for kind in kinds:
            if runnable := offered(kind, level, cluster, algorithms):
                yield CollectiveRequest(cluster, level, kind, runnable, sizes, **how)  # type: ignore[arg-type]
