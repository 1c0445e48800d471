"""Prices of many collectives at once: asked for one by one, priced by network as arrays of sizes."""

from __future__ import annotations

from collections.abc import Sequence
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
    """``tickets`` remembers collectives and ``price_all`` prices what was asked for since the last time.

    Then ``seconds[tickets]`` and ``link_seconds[tickets]`` (one column per link of ``links``) are their prices.
    """

    def __init__(self, cluster: Cluster, links: tuple[str, ...], algorithm: str) -> None:
        import numpy as np

        self._cluster, self._links, self._algorithm = cluster, links, algorithm
        self._tickets: dict[tuple[CollectiveKind, tuple[Run, ...]], dict[float, int]] = {}
        self._count = 0
        self._waiting: dict[tuple[CollectiveKind, tuple[Run, ...]], list[tuple[int, float]]] = {}
        self.seconds: Array = np.zeros(1)
        self.link_seconds: Array = np.zeros((1, len(links)))

    def tickets(self, kind: CollectiveKind, runs: tuple[Run, ...], sizes: Sequence[float]) -> list[int]:
        """One for every size."""
        if not runs:
            return [FREE] * len(sizes)
        known = self._tickets.get((kind, runs))
        if known is None:
            known = self._tickets[kind, runs] = {0.0: FREE}
        return [known[size] if size in known else self._new(kind, runs, size) for size in sizes]

    def _new(self, kind: CollectiveKind, runs: tuple[Run, ...], size: float) -> int:
        self._count += 1
        self._tickets[kind, runs][size] = self._count
        self._waiting.setdefault((kind, runs), []).append((self._count, size))
        return self._count

    def price_all(self) -> None:
        import numpy as np

        seconds = np.zeros(self._count + 1)
        links = np.zeros((self._count + 1, len(self._links)))
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
