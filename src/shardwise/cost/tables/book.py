"""Prices of many collectives at once: asked for one by one, priced by network as arrays of sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.collectives import CollectiveKind
from shardwise.cost.network import Run, spanned
from shardwise.cost.traffic import collective_price
from shardwise.spec.hardware import Cluster

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

FREE = 0  # the ticket of what no network carries


class CollectiveBook:
    """``ticket`` remembers a collective and ``price_all`` prices what was asked for since the last time.

    Then ``seconds[tickets]`` and ``link_seconds[tickets]`` (one column per link of ``links``) are their prices.
    """

    def __init__(self, cluster: Cluster, links: tuple[str, ...], algorithm: str) -> None:
        import numpy as np

        self._cluster, self._links, self._algorithm = cluster, links, algorithm
        self._tickets: dict[tuple[CollectiveKind, tuple[Run, ...], float], int] = {}
        self._waiting: dict[tuple[CollectiveKind, tuple[Run, ...]], list[tuple[int, float]]] = {}
        self.seconds: Array = np.zeros(1)
        self.link_seconds: Array = np.zeros((1, len(links)))

    def ticket(self, kind: CollectiveKind, runs: tuple[Run, ...], size_bytes: float) -> int:
        if not runs or not size_bytes:
            return FREE
        key = (kind, runs, size_bytes)
        found = self._tickets.get(key)
        if found is None:
            found = self._tickets[key] = len(self._tickets) + 1
            self._waiting.setdefault((kind, runs), []).append((found, size_bytes))
        return found

    def price_all(self) -> None:
        import numpy as np

        seconds = np.zeros(len(self._tickets) + 1)
        links = np.zeros((len(self._tickets) + 1, len(self._links)))
        seconds[: len(self.seconds)], links[: len(self.seconds)] = self.seconds, self.link_seconds
        for (kind, runs), wanted in self._waiting.items():
            topology = spanned(self._cluster, runs, "strategy")
            assert topology is not None
            tickets = np.array([ticket for ticket, _ in wanted])
            cost = collective_price(kind, np.array([size for _, size in wanted]), topology, self._algorithm)
            seconds[tickets] = cost.seconds
            for level in cost.levels:
                links[tickets, self._links.index(level.level_name)] += level.bandwidth_seconds
        self._waiting.clear()
        self.seconds, self.link_seconds = seconds, links
