"""Which algorithm runs which collective on which network: the table, as data, textbook algorithm first."""

from __future__ import annotations

from dataclasses import dataclass

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
from shardwise.collectives.schedule import CollectiveKind
from shardwise.collectives.topology import Level
from shardwise.collectives.work import NVLS, SHARP, Algorithm
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
    """An algorithm for some collectives on some networks, with its closed form in the symbols of `closed_form`."""

    algorithm: Algorithm
    kinds: tuple[CollectiveKind, ...]
    families: tuple[str, ...]  # the networks, by `Shape.family`
    hops: str  # hops one after the other
    moved: str  # bytes over the busiest link
    source: str
    bound: str = EXACT  # how the closed form relates to the price of the schedule
    nests: bool = True  # whether it may run on one level of a hierarchy

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def built(self) -> bool:
        """Whether it has a schedule."""
        return self.algorithm.build is not None


_STAR = ("switch",)

_ROUNDS = ("ring", "tree", "switch", "fully_connected")

ROWS: tuple[Row, ...] = (
    Row(DIRECT, (P2P,), ("line", "ring", "tree", "switch", "fully_connected"), "1", "m", THAKUR),
    Row(DIRECT, (P2P,), ("grid",), "x", "m", THAKUR),
    # all-gather, reduce-scatter, all-reduce
    Row(DIRECT, (AG, RS), _STAR, "1", "(n−1)/n·m", NCCL_TESTS),
    Row(DIRECT, (AR,), _STAR, "2", "2·(n−1)/n·m", NCCL_TESTS),
    Row(DIRECT, (AG, RS), ("fully_connected",), "1", "m/n", CHAN),
    Row(DIRECT, (AR,), ("fully_connected",), "2", "2·m/n", CHAN),
    Row(BINOMIAL, (AR,), ("tree",), "2·q", "2·q·m", THAKUR),
    Row(RING, (AG, RS), _ROUNDS, "(n−1)", "(n−1)/n·m", THAKUR),
    Row(RING, (AR,), _ROUNDS, "2·(n−1)", "2·(n−1)/n·m", NCCL_TESTS),
    Row(PARALLEL_RINGS, (AG, RS), ("fully_connected",), "(n−1)", "(n−1)/(n·r)·m", _RINGS, MODEL),
    Row(PARALLEL_RINGS, (AR,), ("fully_connected",), "2·(n−1)", "2·(n−1)/(n·r)·m", _RINGS, MODEL),
    Row(BIDIRECTIONAL_RING, (AG, RS), ("ring",), "floor(n/2)", "(n−1)/(n·w)·m", SCALING),
    Row(BIDIRECTIONAL_RING, (AR,), ("ring",), "2·floor(n/2)", "2·(n−1)/(n·w)·m", SCALING),
    Row(LINE, (AG, RS), ("line",), "(n−1)", "(n−1)/n·m", CHAN),
    Row(LINE, (AR,), ("line",), "2·(n−1)", "2·(n−1)/n·m", CHAN),
    Row(BUCKET, (AG, RS), ("grid",), "sum(h_i)", "(n−1)/(n·w·D)·m", f"{CHAN}; {SCALING}"),
    Row(BUCKET, (AR,), ("grid",), "2·sum(h_i)", "2·(n−1)/(n·w·D)·m", f"{CHAN}; {SCALING}"),
    Row(DIMENSION_ORDERED, (AG, RS), ("grid",), "sum(h_i)", "(n−1)/(n·w)·m", CHAN),
    Row(DIMENSION_ORDERED, (AR,), ("grid",), "2·sum(h_i)", "2·(n−1)/(n·w)·m", CHAN),
    Row(BRUCK, (AG, RS), _STAR, "q", "(n−1)/n·m", BRUCKS),
    Row(BRUCK, (AR,), _STAR, "2·q", "2·(n−1)/n·m", BRUCKS),
    Row(HALVING_DOUBLING, (AR,), _STAR, "2·(log2(p) + f)", "2·((p−1)/p + f)·m", RABENSEIFNER),
    Row(RECURSIVE_DOUBLING, (AR,), _STAR, "(log2(p) + 2·f)", "(log2(p) + 2·f)·m", THAKUR),
    Row(DOUBLE_BINARY_TREE, (AR,), _STAR, "(2·q−1+k)", "(2 + (2·q−3)/k)·m", SANDERS, UPPER),
    Row(BINOMIAL, (AR,), _STAR, "2·q", "2·q·m", THAKUR),
    # broadcast, reduce
    Row(DIRECT, (BCAST, REDUCE), ("fully_connected",), "1", "m", CHAN),
    Row(BINOMIAL, (BCAST, REDUCE), ("tree", "switch"), "q", "q·m", THAKUR),
    Row(CHAIN, (BCAST, REDUCE), ("line", *_ROUNDS), "(n−2+k)", "(n−2+k)/k·m", CHAN),
    Row(SPANNING_TREE, (BCAST, REDUCE), ("ring", "grid"), "(sum(h_i)−1+k)", "(sum(h_i)−1+k)/k·m", CHAN),
    Row(SCATTER_ALL_GATHER, (BCAST, REDUCE), ("ring",), "2·(n−1)", "2·(n−1)/n·m", THAKUR, nests=False),
    Row(SCATTER_ALL_GATHER, (BCAST, REDUCE), ("tree", "switch"), "(q+n−1)", "2·(n−1)/n·m", THAKUR, nests=False),
    Row(SCATTER_ALL_GATHER, (BCAST, REDUCE), ("fully_connected",), "2", "2·m/n", CHAN, nests=False),
    # gather, scatter
    Row(CHAIN, (GATHER, SCATTER), ("line", "ring"), "(n−1)", "(n−1)/n·m", CHAN),
    Row(BINOMIAL, (GATHER, SCATTER), ("tree",), "q", "(n−1)/n·m", THAKUR),
    Row(DIRECT, (GATHER, SCATTER), ("line",), "(n−1)", "(n−1)/n·m", LINKS),
    Row(DIRECT, (GATHER, SCATTER), ("ring",), "floor(n/2)", "floor(n/2)/n·m", LINKS),
    Row(DIRECT, (GATHER,), ("grid",), "sum(h_i)", "max(h_i·before_i)/n·m", LINKS),
    Row(DIRECT, (SCATTER,), ("grid",), "sum(h_i)", "max(h_i·after_i)/n·m", LINKS),
    Row(DIRECT, (GATHER, SCATTER), ("tree", "switch"), "1", "(n−1)/n·m", NCCL_TESTS),
    Row(DIRECT, (GATHER, SCATTER), ("fully_connected",), "1", "m/n", CHAN),
    Row(BINOMIAL, (GATHER, SCATTER), _STAR, "q", "(n−1)/n·m", THAKUR),
    # all-to-all
    Row(RING, (A2A,), ("ring",), "(n−1)", "(n−1)/2·m", SCALING),
    Row(DIRECT, (A2A,), ("line",), "(n−1)", "floor(n/2)·ceil(n/2)/n·m", LINKS),
    Row(DIRECT, (A2A,), ("ring",), "floor(n/2)", "floor((n·n+4)/8)/n·m", SCALING),
    Row(DIRECT, (A2A,), ("grid",), "sum(h_i)", "max(X_i/d_i)·m", SCALING),
    Row(DIRECT, (A2A,), ("tree",), "1", "X/n·m", LINKS),
    Row(DIRECT, (A2A,), _STAR, "1", "(n−1)/n·m", NCCL_TESTS),
    Row(DIRECT, (A2A,), ("fully_connected",), "1", "m/n", CHAN),
    Row(PAIRWISE, (A2A,), _STAR, "(n−1)", "(n−1)/n·m", THAKUR),
    Row(BRUCK, (A2A,), _STAR, "q", "ones/n·m", BRUCKS),
    # in the switch
    Row(NVLS, (AR,), _STAR, "2", "(1+1/n)·m", TUNING, MODEL),
    Row(SHARP, (AR,), _STAR, "2", "m", "Bloch et al. 2017 (SHARP)", MODEL),
    Row(NVLS, (BCAST, REDUCE), _STAR, "1", "m", TUNING, MODEL),
    Row(SHARP, (BCAST, REDUCE), _STAR, "1", "m", "Bloch et al. 2017 (SHARP)", MODEL),
)  # fmt: skip

IN_NETWORK = ("nvls", "sharp")


@dataclass(frozen=True)
class LevelsRow:
    """One algorithm for some collectives over several levels; ``built`` says that it has a schedule."""

    name: str
    kinds: tuple[CollectiveKind, ...]
    source: str
    bound: str = EXACT
    built: bool = True


_HIERARCHY = "stas00/ml-engineering, network/README.md"

LEVELS_ROWS: tuple[LevelsRow, ...] = (
    LevelsRow("hierarchical", (AR, AG, RS, A2A), _HIERARCHY),
    LevelsRow("hierarchical", (BCAST, REDUCE), THAKUR),
    LevelsRow("hierarchical", (GATHER, SCATTER), LINKS),
    LevelsRow("flat_ring", (AG, RS, AR), NCCL_TESTS),
    LevelsRow("parallel_rings", (AG, RS, AR), TUNING, MODEL, built=False),
    LevelsRow("direct", (AG, RS, A2A), LINKS),
    LevelsRow("direct", (P2P,), THAKUR),
    # A lower bound where a level's rounds fill its ports (rings through switches); else pieces fill the gaps too.
    LevelsRow("hierarchical_pipelined", (AR, AG, RS), TUNING, LOWER),
    LevelsRow("hierarchical_pipelined", (BCAST, REDUCE, GATHER, SCATTER, A2A), TUNING, LOWER, built=False),
)

# What runs on a level of a hierarchy by default: the first of these that the level's shape offers.
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
    """The algorithms that may run on one of several levels.

    On all but the outermost an all-reduce must consist of a reduce-scatter and an all-gather.
    """
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
