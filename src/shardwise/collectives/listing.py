"""The table of collectives and networks, for people: what runs where, its formula, and what does not and why."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.table import LEVELS_ROWS, ROWS

TOPOLOGIES = (
    "line",
    "ring",
    "tree",
    "switch",
    "fully_connected",
    "mesh",
    "torus2d",
    "torus3d",
    "hierarchical",
)

_POINT_TO_POINT = ("line", "ring", "mesh", "torus2d", "torus3d")

# (algorithm, networks, why it is not offered there)
WHY_NOT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("ring", ("line",), "the message back to the start would take n-1 hops in every round; use line"),
    ("binomial", _POINT_TO_POINT, "far partners: a round takes up to n/2 hops and every link on the way"),
    ("bruck", (*_POINT_TO_POINT, "tree"), "distances of n/2 put n/2 messages on the middle links at once"),
    ("halving_doubling", (*_POINT_TO_POINT, "tree"), "distances of n/2 put n/2 messages on the middle links at once"),
    ("recursive_doubling", (*_POINT_TO_POINT, "tree"), "distances of n/2 put n/2 messages on the middle links at once"),
    ("double_binary_tree", (*_POINT_TO_POINT, "tree"), "the two trees' edges collide on shared links"),
    ("double_binary_tree", ("fully_connected",), "direct is never slower where every pair has a link"),
    ("pairwise", (*_POINT_TO_POINT, "tree"), "a step at distance d loads every link d times; use direct"),
    ("nvls", (*_POINT_TO_POINT, "tree", "fully_connected"), "reduction happens inside a switch"),
    ("sharp", (*_POINT_TO_POINT, "tree", "fully_connected"), "reduction happens inside a switch"),
    ("scatter_all_gather", ("line", "mesh", "torus2d", "torus3d"), "the pipelined broadcast moves half the bytes"),
)


@dataclass(frozen=True)
class Pair:
    """One algorithm for one collective on one network; the textbook's choice is marked.

    ``bound`` is "exact" (equal to the priced schedule), "upper bound", "lower bound" or "model" (no schedule).
    Symbols of ``formula``: see ``SYMBOLS``.
    """

    kind: CollectiveKind
    topology: str
    algorithm: str
    textbook: bool
    bound: str
    has_schedule: bool
    formula: str
    source: str


SYMBOLS = (
    "n ranks, m bytes, a latency, b = 1/bandwidth, d_i axes, D their number, q = ceil(log2 n), "
    "p = 2^floor(log2 n), k chunks; on hierarchies g, a1, b1 inside and k, a2, b2 outside"
)


def pairs(kind: str | CollectiveKind | None = None, topology: str | None = None) -> list[Pair]:
    """All pairs of a collective and a network with their algorithms, textbook first; optionally only some."""
    kinds = list(CollectiveKind) if kind is None else [CollectiveKind.parse(kind)]
    names = [name for name in TOPOLOGIES if topology in (None, name)]
    return [pair for one in kinds for name in names for pair in _pairs(one, name)]


def _pairs(kind: CollectiveKind, topology: str) -> list[Pair]:
    if topology == "hierarchical":
        found = [(row.name, row.bound, row.built, row.formula, row.source) for row in LEVELS_ROWS if kind in row.kinds]
    else:
        family = "grid" if topology.startswith(("mesh", "torus")) else topology
        found = [
            (row.name, row.bound, row.algorithm.build is not None, row.formula, row.source)
            for row in ROWS
            if kind in row.kinds and family in row.families
        ]
    return [
        Pair(kind, topology, name, index == 0, bound, built, formula, source)
        for index, (name, bound, built, formula, source) in enumerate(found)
    ]


def why_not(algorithm: str, topology: str) -> str:
    """Why ``algorithm`` is not offered on ``topology``; empty if it is, or if there is nothing to say."""
    for name, networks, reason in WHY_NOT:
        if name == algorithm and topology in networks:
            return reason
    return ""
