"""A job on several kinds of nodes: which of its ranks are of which kind.

The kinds follow each other over the ranks, in the order in which the cluster lists them. The outermost dimension of
the strategy goes across them: a pipeline, so that each kind has its own stages, or data parallelism, so that each has
its own replicas. Every group of another dimension is of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from shardwise.spec.clusters import MixedCluster
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class AcrossKinds:
    """``dimension`` goes across the kinds; ``kinds`` has the kind of every rank of it."""

    dimension: str
    kinds: tuple[int, ...]

    def members(self, kind: int) -> tuple[int, ...]:
        return tuple(place for place, own in enumerate(self.kinds) if own == kind)


@lru_cache(maxsize=256)  # asked for every rank of a job
def across_kinds(mixed: MixedCluster, strategy: Strategy) -> AcrossKinds:
    """Raises SpecError for a strategy that would put two kinds into one group of another dimension."""
    outermost = next((name for name in reversed(strategy.order) if strategy.degree(name) > 1), "dp")
    if outermost not in ("pp", "dp"):
        remedy = "put pp or dp last in order"
        raise SpecError("strategy.order", f"{outermost} would go across the kinds of nodes", remedy)
    if outermost == "pp":
        sizes = [stage.tp * stage.cp * stage.data_parallel for stage in map(strategy.of_stage, range(strategy.pp))]
    else:
        sizes = [strategy.world // strategy.data_parallel] * strategy.data_parallel
    ends = list(accumulate(kind.devices for kind in mixed.kinds))
    firsts = [0, *accumulate(sizes)][:-1]
    for first, size in zip(firsts, sizes):
        for end in ends:
            if first < end < first + size:
                problem = f"{size} devices of a {'stage' if outermost == 'pp' else 'replica'} would be of two kinds"
                raise SpecError("strategy", f"{problem}: {mixed.name}", "degrees that divide the devices of each kind")
    return AcrossKinds(outermost, tuple(next(n for n, end in enumerate(ends) if first < end) for first in firsts))
