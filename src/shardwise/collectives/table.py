"""Which algorithm runs which collective on which network: the table, as data, textbook algorithm first.

Symbols of the formulas: n ranks, m bytes, a latency, b = 1/bandwidth, d_i sizes of the axes, D their number,
k chunks, q = ceil(log2 n), p = 2^floor(log2 n); on hierarchies g, a1, b1 inside and k, a2, b2 outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.collectives.algorithms.base import NVLS, SHARP, Algorithm
from shardwise.collectives.algorithms.pairwise import BRUCK, DIRECT, HALVING_DOUBLING, PAIRWISE, RECURSIVE_DOUBLING
from shardwise.collectives.algorithms.rings import (
    BIDIRECTIONAL_RING,
    BUCKET,
    DIMENSION_ORDERED,
    LINE,
    PARALLEL_RINGS,
    RING,
)
from shardwise.collectives.algorithms.trees import (
    BINOMIAL,
    CHAIN,
    DOUBLE_BINARY_TREE,
    SCATTER_ALL_GATHER,
    SPANNING_TREE,
)
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.topology import Level
from shardwise.spec.errors import SpecError, nearest_name, shown

P2P, BCAST, REDUCE = CollectiveKind.SEND_RECV, CollectiveKind.BROADCAST, CollectiveKind.REDUCE
AR, AG, RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
GATHER, SCATTER, A2A = CollectiveKind.GATHER, CollectiveKind.SCATTER, CollectiveKind.ALL_TO_ALL

EXACT, UPPER, LOWER, MODEL = "exact", "upper bound", "lower bound", "model"

THAKUR = "Thakur, Rabenseifner, Gropp 2005"
CHAN = "Chan, Heimlich, Purkayastha, van de Geijn 2007"
SANDERS = "Sanders, Speck, Träff 2009; NCCL src/graph/trees.cc"
RABENSEIFNER = "Rabenseifner 2004"
BRUCKS = "Bruck, Ho, Kipnis, Upfal, Weathersby 1997"
NCCL_TESTS = "nccl-tests doc/PERFORMANCE.md"
TUNING = "NCCL src/graph/tuning.cc"
SCALING = "jax-ml scaling-book, sharding.md"
_RINGS = "Tillson 1980; rocm.blogs.amd.com, RCCL and xGMI on MI300X"
LINKS = "busiest link of the routed schedule"


@dataclass(frozen=True)
class Row:
    """One algorithm for some collectives on some networks, with its formula and where it comes from.

    ``nests`` says that it may run on one level of a hierarchy.
    """

    algorithm: Algorithm
    kinds: tuple[CollectiveKind, ...]
    families: tuple[str, ...]
    formula: str
    source: str
    bound: str = EXACT
    nests: bool = True

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def built(self) -> bool:
        """Whether it has a schedule."""
        return self.algorithm.build is not None


_ANY = ("line", "ring", "grid", "tree", "switch", "fully_connected")
_STAR = ("switch",)

ROWS: tuple[Row, ...] = (
    Row(DIRECT, (P2P,), _ANY, "a + mb (grids: a per hop of the longest step to the next rank)", THAKUR),
    # all-gather, reduce-scatter, all-reduce
    Row(DIRECT, (AG, RS), _STAR, "a + (n-1)/n mb", NCCL_TESTS),
    Row(DIRECT, (AR,), _STAR, "2a + 2(n-1)/n mb", NCCL_TESTS),
    Row(DIRECT, (AG, RS), ("fully_connected",), "a + mb/n", CHAN),
    Row(DIRECT, (AR,), ("fully_connected",), "2a + 2mb/n", CHAN),
    Row(BINOMIAL, (AR,), ("tree",), "2q(a + mb)", THAKUR),
    Row(RING, (AG, RS), ("ring", "tree", "switch", "fully_connected"), "(n-1)(a + mb/n)", THAKUR),
    Row(RING, (AR,), ("ring", "tree", "switch", "fully_connected"), "2(n-1)(a + mb/n)", NCCL_TESTS),
    Row(PARALLEL_RINGS, (AG, RS), ("fully_connected",), "(n-1)a + (n-1)/(nr) mb, r = n-1 rings without a common"
        " link (n-2 of 4 and of 6)", _RINGS, MODEL),
    Row(PARALLEL_RINGS, (AR,), ("fully_connected",), "twice the all-gather", _RINGS, MODEL),
    Row(BIDIRECTIONAL_RING, (AG, RS), ("ring",), "floor(n/2)a + (n-1)/(2n) mb", SCALING),
    Row(BIDIRECTIONAL_RING, (AR,), ("ring",), "2 floor(n/2)a + (n-1)/n mb", SCALING),
    Row(LINE, (AG, RS), ("line",), "(n-1)(a + mb/n)", CHAN),
    Row(LINE, (AR,), ("line",), "2(n-1)(a + mb/n)", CHAN),
    Row(BUCKET, (AG, RS), ("grid",), "mesh: sum(d_i-1)a + (n-1)/n mb/D; torus: sum floor(d_i/2)a + (n-1)/n mb/(2D);"
        " uneven axes: sum over rounds of the slowest part", f"{CHAN}; {SCALING}"),
    Row(BUCKET, (AR,), ("grid",), "twice the all-gather: 2 sum(d_i-1)a + 2(n-1)/n mb/D, torus half the distance and"
        " bytes", f"{CHAN}; {SCALING}"),
    Row(DIMENSION_ORDERED, (AG, RS), ("grid",), "sum(d_i-1)a + (n-1)/n mb; wrapped axes floor(d_i/2)a and half their"
        " bytes", CHAN),
    Row(DIMENSION_ORDERED, (AR,), ("grid",), "twice the all-gather, along one axis after the other", CHAN),
    Row(BRUCK, (AG, RS), _STAR, "qa + (n-1)/n mb", BRUCKS),
    Row(BRUCK, (AR,), _STAR, "2qa + 2(n-1)/n mb", BRUCKS),
    Row(HALVING_DOUBLING, (AR,), _STAR, "2 log2(p)a + 2(p-1)/p mb, + 2(a + mb) unless n = p", RABENSEIFNER),
    Row(RECURSIVE_DOUBLING, (AR,), _STAR, "log2(p)(a + mb), + 2(a + mb) unless n = p", THAKUR),
    Row(DOUBLE_BINARY_TREE, (AR,), _STAR, "(2q-1+k)(a + 2mb/k), best k", SANDERS, UPPER),
    Row(BINOMIAL, (AR,), _STAR, "2q(a + mb)", THAKUR),
    # broadcast, reduce
    Row(DIRECT, (BCAST, REDUCE), ("fully_connected",), "a + mb", CHAN),
    Row(BINOMIAL, (BCAST, REDUCE), ("tree", "switch"), "q(a + mb)", THAKUR),
    Row(CHAIN, (BCAST, REDUCE), ("line", "ring", "tree", "switch", "fully_connected"), "(n-2+k)(a + mb/k), best k near"
        " sqrt((n-2)mb/a)", CHAN),
    Row(SPANNING_TREE, (BCAST, REDUCE), ("ring", "grid"), "(h-1+k)(a + mb/k), h = sum(d_i-1), wrapped axes"
        " floor(d_i/2)", CHAN),
    Row(SCATTER_ALL_GATHER, (BCAST, REDUCE), ("ring",), "2(n-1)(a + mb/n)", THAKUR, nests=False),
    Row(SCATTER_ALL_GATHER, (BCAST, REDUCE), ("tree", "switch"), "(q + n-1)a + 2(n-1)/n mb", THAKUR, nests=False),
    Row(SCATTER_ALL_GATHER, (BCAST, REDUCE), ("fully_connected",), "2a + 2mb/n", CHAN, nests=False),
    # gather, scatter
    Row(CHAIN, (GATHER, SCATTER), ("line", "ring"), "(n-1)(a + mb/n)", CHAN),
    Row(BINOMIAL, (GATHER, SCATTER), ("tree",), "qa + (n-1)/n mb", THAKUR),
    Row(DIRECT, (GATHER, SCATTER), ("line",), "(n-1)a + (n-1)/n mb", LINKS),
    Row(DIRECT, (GATHER, SCATTER), ("ring",), "floor(n/2)a + floor(n/2)/n mb", LINKS),
    Row(DIRECT, (GATHER, SCATTER), ("grid",), "sum h_i a + max_i h_i prod_(j<i) d_j mb/n (scatter j>i), h_i = d_i-1,"
        " wrapped floor(d_i/2)", LINKS),
    Row(DIRECT, (GATHER, SCATTER), ("tree", "switch"), "a + (n-1)/n mb", NCCL_TESTS),
    Row(DIRECT, (GATHER, SCATTER), ("fully_connected",), "a + mb/n", CHAN),
    Row(BINOMIAL, (GATHER, SCATTER), _STAR, "qa + (n-1)/n mb", THAKUR),
    # all-to-all
    Row(RING, (A2A,), ("ring",), "(n-1)a + (n-1)/2 mb", SCALING),
    Row(DIRECT, (A2A,), ("line",), "(n-1)a + floor(n/2)ceil(n/2)/n mb", LINKS),
    Row(DIRECT, (A2A,), ("ring",), "floor(n/2)a + L(n)/n mb, L = (n^2-1)/8 or n(n-2)/8 + ceil(n/4)", SCALING),
    Row(DIRECT, (A2A,), ("grid",), "sum h_i a + max_i L(d_i)/d_i mb; L as on ring, or floor(d/2)ceil(d/2) unwrapped",
        SCALING),
    Row(DIRECT, (A2A,), ("tree",), "a + max_k k(n-k)/n mb over subtrees of k leaves", LINKS),
    Row(DIRECT, (A2A,), _STAR, "a + (n-1)/n mb", NCCL_TESTS),
    Row(DIRECT, (A2A,), ("fully_connected",), "a + mb/n", CHAN),
    Row(PAIRWISE, (A2A,), _STAR, "(n-1)(a + mb/n)", THAKUR),
    Row(BRUCK, (A2A,), _STAR, "qa + (one-bits in 0..n-1)/n mb, about q/2 mb", BRUCKS),
    # in the switch
    Row(NVLS, (AR,), _STAR, "2a + m(1+1/n)b", TUNING, MODEL),
    Row(SHARP, (AR,), _STAR, "2a + mb", "Bloch et al. 2017 (SHARP)", MODEL),
    Row(NVLS, (BCAST, REDUCE), _STAR, "a + mb", TUNING, MODEL),
    Row(SHARP, (BCAST, REDUCE), _STAR, "a + mb", "Bloch et al. 2017 (SHARP)", MODEL),
)  # fmt: skip

IN_NETWORK = ("nvls", "sharp")


@dataclass(frozen=True)
class LevelsRow:
    """One algorithm for some collectives over several levels; ``built`` says that it has a schedule."""

    name: str
    kinds: tuple[CollectiveKind, ...]
    formula: str
    source: str
    bound: str = EXACT
    built: bool = True


_HIERARCHY = "stas00/ml-engineering, network/README.md"
_OVERLAP = "sum of all latencies + the slowest level's bandwidth term of hierarchical"

LEVELS_ROWS: tuple[LevelsRow, ...] = (
    LevelsRow("hierarchical", (AR,), "2(g-1)(a1 + mb1/g) + 2(k-1)(a2 + mb2/(gk)), ring on each level", _HIERARCHY),
    LevelsRow("hierarchical", (AG, RS), "(k-1)(a2 + mb2/(gk)) + (g-1)(a1 + mb1/g)", _HIERARCHY),
    LevelsRow("hierarchical", (BCAST, REDUCE), "ceil(log2 k)(a2 + mb2) + ceil(log2 g)(a1 + mb1)", THAKUR),
    LevelsRow("hierarchical", (GATHER, SCATTER), "a2 + (k-1)/(gk) mb2 + a1 + (g-1)/g mb1, along the rails", LINKS),
    LevelsRow("hierarchical", (A2A,), "(g-1)(a1 + mb1/g) + (k-1)(a2 + mb2/k)", _HIERARCHY),
    LevelsRow("flat_ring", (AG, RS), "(n-1)(max a + m/n max b)", NCCL_TESTS),
    LevelsRow("flat_ring", (AR,), "2(n-1)(max a + m/n max b)", NCCL_TESTS),
    LevelsRow("parallel_rings", (AG, RS, AR), "(n-k)a1 + (k-1)a2 + max((n-1)(g-1)/(ng) mb1, (n-1)/(ng) mb2), all-reduce"
              " twice", TUNING, MODEL, built=False),
    LevelsRow("direct", (AG, RS), "max a + max((g-1)/n mb1, (k-1)g/n mb2), ports shared", LINKS),
    LevelsRow("direct", (A2A,), "max a + max((g-1)/n mb1, (k-1)g/n mb2), ports shared", LINKS),
    LevelsRow("direct", (P2P,), "max a + m max b, every rank to the next", THAKUR),
    # A lower bound where a level's rounds fill its ports (rings through switches); else pieces fill the gaps too.
    LevelsRow("hierarchical_pipelined", (AR, AG, RS), _OVERLAP, TUNING, LOWER),
    LevelsRow("hierarchical_pipelined", (BCAST, REDUCE, GATHER, SCATTER, A2A), _OVERLAP, TUNING, LOWER, built=False),
)  # fmt: skip

# What runs on a level of a hierarchy by default: the first that the level's shape has.
LEVEL_DEFAULTS: dict[CollectiveKind, tuple[str, ...]] = {
    **dict.fromkeys((AR, AG, RS), ("ring", "line", "bucket")),
    **dict.fromkeys((BCAST, REDUCE), ("binomial", "direct", "chain", "spanning_tree")),
    **dict.fromkeys((GATHER, SCATTER), ("chain", "direct")),
    A2A: ("pairwise", "ring", "direct"),
}


def rows_for(kind: CollectiveKind, level: Level) -> list[Row]:
    """The algorithms for ``kind`` on ``level``, textbook first; in-network ones only if the level has them."""
    family = level.shape.family
    helped = level.in_network.kind if level.in_network is not None else None
    return [
        row
        for row in ROWS
        if kind in row.kinds and family in row.families and (row.name not in IN_NETWORK or row.name == helped)
    ]


def rows_for_level_of_hierarchy(kind: CollectiveKind, level: Level, outermost: bool) -> list[Row]:
    """The algorithms that may run on one level; inside, an all-reduce must be a reduce-scatter + all-gather."""
    rows = [row for row in rows_for(kind, level) if row.nests]
    if kind is AR and not outermost:
        splitting = {row.name for row in rows_for(AG, level)}
        rows = [row for row in rows if row.name in splitting or row.name in IN_NETWORK]
    if kind in (BCAST, REDUCE) and not outermost:
        rows = [row for row in rows if row.name not in IN_NETWORK]
    return rows


def default_row(kind: CollectiveKind, level: Level, outermost: bool) -> Row:
    rows = rows_for_level_of_hierarchy(kind, level, outermost)
    named = {row.name: row for row in reversed(rows)}
    return next((named[name] for name in LEVEL_DEFAULTS[kind] if name in named), rows[0])


def choose(rows: list[Row], name: str, kind: CollectiveKind, where: str) -> Row:
    for row in rows:
        if row.name == name:
            return row
    names = [row.name for row in rows]
    remedy = nearest_name(name, names) or "choose one of " + ", ".join(names) if names else "choose another collective"
    raise SpecError("algorithm", f"{shown(name)} cannot run {kind} on a {where}", remedy)
