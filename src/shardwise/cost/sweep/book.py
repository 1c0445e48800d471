"""Prices of many collectives at once: asked for one by one, priced by network as arrays of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind, Topology
from shardwise.cost.traffic.gradient_reduction import gradient_price, measured_schedules
from shardwise.cost.traffic.network import spanned
from shardwise.layout.groups import RankRun
from shardwise.spec.hardware import Cluster

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

FREE = 0  # the ticket of what no network carries


@dataclass
class _Line:
    """One kind of collective on one network: the tickets of its sizes, and which of them have no price yet."""

    tickets: dict[float, int] = field(default_factory=lambda: {0.0: FREE})
    waiting: list[float] = field(default_factory=list)


class CollectiveBook:
    """``tickets`` remembers collectives and ``price_all`` prices what was asked for since the last time.

    Then ``seconds[tickets]`` and ``link_seconds[tickets]`` (one column per link of ``links``) are their prices.
    """

    def __init__(self, cluster: Cluster, links: tuple[str, ...], algorithm: str) -> None:
        import numpy as np

        self._cluster, self._links, self._algorithm = cluster, links, algorithm
        self._count = 0
        # Groups of ranks that lie elsewhere and span equal networks pay the same.
        self._of_runs: dict[tuple[CollectiveKind, tuple[RankRun, ...], bool], _Line] = {}
        self._of_networks: dict[tuple[CollectiveKind, Topology, Topology | None], _Line] = {}
        self.seconds: Array = np.zeros(1)
        self.link_seconds: Array = np.zeros((1, len(links)))

    def tickets(
        self, kind: CollectiveKind, runs: tuple[RankRun, ...], sizes: Sequence[float], by_schedules: bool = False
    ) -> list[int]:
        """One for every size; ``by_schedules``: sums of gradients that a schedule of ours may make (`DataLine`)."""
        if not runs:
            return [FREE] * len(sizes)
        line = self._of_runs.get((kind, runs, by_schedules))
        if line is None:
            topology = spanned(self._cluster, runs, "strategy")
            assert topology is not None
            ours = measured_schedules(self._cluster, runs) if by_schedules else None
            line = self._of_networks.setdefault((kind, topology, ours), _Line())
            self._of_runs[kind, runs, by_schedules] = line
        known = line.tickets
        return [known[size] if size in known else self._new(line, size) for size in sizes]

    def _new(self, line: _Line, size: float) -> int:
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
            cost = gradient_price(kind, np.array(line.waiting), topology, ours, self._algorithm)
            seconds[tickets] = cost.seconds
            for level in cost.levels:
                links[tickets, self._links.index(level.level_name)] += level.bandwidth_seconds
            line.waiting.clear()
        self.seconds, self.link_seconds = seconds, links
