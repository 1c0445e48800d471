"""Which algorithms a communication library offers: "auto" on a real machine chooses among these only.

"any" is our own executor, which runs every schedule. A library that offers nothing for a network of ours (a grid,
say) is taken to run whatever is cheapest there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwise.collectives.kinds import CollectiveKind

LIBRARIES: dict[str, dict[CollectiveKind, tuple[str, ...]]] = {
    "any": {},
    # NCCL src/graph/tuning.cc and doc: ring, tree (all-reduce only), NVLS, CollNet; all-to-all, gather and scatter
    # are grouped sends and receives, all at once.
    "nccl": {
        CollectiveKind.SEND_RECV: ("direct",),
        CollectiveKind.BROADCAST: ("chain",),
        CollectiveKind.REDUCE: ("chain",),
        CollectiveKind.ALL_REDUCE: ("ring", "double_binary_tree", "nvls", "sharp"),
        CollectiveKind.GATHER: ("direct",),
        CollectiveKind.ALL_GATHER: ("ring",),
        CollectiveKind.SCATTER: ("direct",),
        CollectiveKind.REDUCE_SCATTER: ("ring",),
        CollectiveKind.ALL_TO_ALL: ("direct",),
    },
    # gloo/allreduce.cc (ring), allgather.cc (ring), broadcast.cc (binomial), reduce.cc (ring), alltoall.cc, gather.cc
    # and scatter.cc (at once); the engine's reduce-scatter is all-to-all, then sum (engine/collectives/reductions.py).
    "gloo": {
        CollectiveKind.SEND_RECV: ("direct",),
        CollectiveKind.BROADCAST: ("binomial",),
        CollectiveKind.REDUCE: ("scatter_all_gather",),
        CollectiveKind.ALL_REDUCE: ("ring", "flat_ring"),
        CollectiveKind.GATHER: ("direct",),
        CollectiveKind.ALL_GATHER: ("ring", "flat_ring"),
        CollectiveKind.SCATTER: ("direct",),
        CollectiveKind.REDUCE_SCATTER: ("direct",),
        CollectiveKind.ALL_TO_ALL: ("direct",),
    },
}
_FLAT = ("gloo",)

T = TypeVar("T")


def offered(library: str, kind: CollectiveKind, options: Sequence[T], name_of: Callable[[T], str]) -> list[T]:
    """The options that ``library`` offers for ``kind``; all of them where it offers none."""
    allowed = LIBRARIES[library].get(kind)
    if allowed is None:
        return list(options)
    return [option for option in options if name_of(option) in allowed] or list(options)


def runs_levels_in_turn(library: str, kind: CollectiveKind) -> bool:
    """Whether the library goes level by level; NCCL's all-to-all goes straight to every peer, as all of gloo."""
    return library not in _FLAT and not (library == "nccl" and kind is CollectiveKind.ALL_TO_ALL)
