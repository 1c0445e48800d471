"""The sizes at which another algorithm becomes the cheapest, as NCCL's tuner finds them (src/graph/tuning.cc)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.collectives.cost import candidates, collective_cost, without_unit_levels
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.topology import Topology
from shardwise.spec.errors import SpecError

_SCAN = [2.0 ** (step / 2) for step in range(81)]  # 1 byte .. 1 TiB
_CLOSE = 1 + 1e-6


def crossovers(
    kind: str | CollectiveKind, topology: Topology, algorithms: Sequence[str] | None = None
) -> list[tuple[float, str, str]]:
    """(size_bytes, from, to) wherever the cheapest of ``algorithms`` (default: all that "auto" considers) changes.

    Of algorithms that cost the same, the one named first is kept.
    """
    kind = CollectiveKind.parse(kind)
    slim, _ = without_unit_levels(topology)
    if not slim.levels:
        return []
    if algorithms is not None and not algorithms:
        raise SpecError("algorithms", "no algorithm to compare", "name at least two, or leave it out")
    names = algorithms or list(dict.fromkeys(name for size in _SCAN for name in candidates(kind, size, slim)))

    def cheapest(size: float) -> str:
        best, least = names[0], math.inf
        for name in names:
            seconds = float(collective_cost(kind, size, slim, name).seconds)
            if seconds < least * (1 - 1e-9):
                best, least = name, seconds
        return best

    found: list[tuple[float, str, str]] = []

    def search(low: float, first: str, high: float, last: str) -> None:
        """Halve the gap (on a logarithmic scale) until it is closed."""
        if first == last:
            return
        if high / low < _CLOSE:
            found.append((high, first, last))
            return
        middle = math.sqrt(low * high)
        between = cheapest(middle)
        search(low, first, middle, between)
        search(middle, between, high, last)

    winners = [cheapest(size) for size in _SCAN]
    for low, first, high, last in zip(_SCAN, winners, _SCAN[1:], winners[1:]):
        search(low, first, high, last)
    return found
