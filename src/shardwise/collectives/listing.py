"""For people: the table of collectives and networks with formulas, and a schedule drawn round by round."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardwise.collectives.closed_form import closed_form, symbolic
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.schedule import Schedule, Transfer
from shardwise.collectives.table import IN_NETWORK, LEVELS_ROWS, ROWS, LevelsRow, Row
from shardwise.collectives.topology import Topology

TOPOLOGIES = ("line", "ring", "tree", "switch", "fully_connected", "mesh", "torus2d", "torus3d", "hierarchical")
_TWO_SWITCHES = Topology.hierarchical([2, 2], [1, 1], [0, 0])  # its formulas stand for those of any hierarchy
_POINT_TO_POINT = ("line", "ring", "mesh", "torus2d", "torus3d")

_MIDDLE = "distances of n/2 put n/2 messages on the middle links at once"
# (algorithm, networks, why it is not offered there)
WHY_NOT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("ring", ("line",), "the message back to the start would take n-1 hops in every round; use line"),
    ("binomial", _POINT_TO_POINT, "far partners: a round takes up to n/2 hops and every link on the way"),
    *((name, (*_POINT_TO_POINT, "tree"), _MIDDLE) for name in ("bruck", "halving_doubling", "recursive_doubling")),
    ("double_binary_tree", (*_POINT_TO_POINT, "tree"), "the two trees' edges collide on shared links"),
    ("double_binary_tree", ("fully_connected",), "direct is never slower where every pair has a link"),
    ("pairwise", (*_POINT_TO_POINT, "tree"), "a step at distance d loads every link d times; use direct"),
    *(
        (name, (*_POINT_TO_POINT, "tree", "fully_connected"), "reduction happens inside a switch")
        for name in IN_NETWORK
    ),
    ("scatter_all_gather", ("line", "mesh", "torus2d", "torus3d"), "the pipelined broadcast moves half the bytes"),
)


@dataclass(frozen=True)
class Pair:
    """An algorithm for a collective on a network."""

    kind: CollectiveKind
    topology: str
    algorithm: str
    textbook: bool
    """Whether the textbook chooses this algorithm."""
    bound: str
    """ "exact" (equal to the priced schedule), "upper bound", "lower bound" or "model" (no schedule)."""
    has_schedule: bool
    formula: str
    """In the symbols of `closed_form.SYMBOLS`."""
    source: str


def pairs(kind: str | CollectiveKind | None = None, topology: str | None = None) -> list[Pair]:
    """All pairs of a collective and a network with their algorithms, textbook first; optionally only some."""
    kinds = list(CollectiveKind) if kind is None else [CollectiveKind.parse(kind)]
    names = [name for name in TOPOLOGIES if topology in (None, name)]
    return [pair for chosen in kinds for name in names for pair in _pairs(chosen, name)]


def _pairs(kind: CollectiveKind, topology: str) -> list[Pair]:
    family = "grid" if topology.startswith(("mesh", "torus")) else topology
    rows = LEVELS_ROWS if topology == "hierarchical" else [row for row in ROWS if family in row.families]

    def formula(row: Row | LevelsRow) -> str:
        return symbolic(row) if isinstance(row, Row) else closed_form(kind, 1, _TWO_SWITCHES, row.name).text

    return [
        Pair(kind, topology, row.name, index == 0, row.bound, row.built, formula(row), row.source)
        for index, row in enumerate(row for row in rows if kind in row.kinds)
    ]


def draw_rounds(schedule: Schedule, max_rounds: int = 8, max_ranks: int = 16) -> str:
    """A row per rank, a column per round: ``2>3`` sends chunk 2 to rank 3, ``2+3`` adds it there."""
    shown = schedule.rounds[:max_rounds]
    ranks = range(min(schedule.n, max_ranks))
    columns = []
    for number, transfers in enumerate(shown, start=1):
        cells: dict[int, list[str]] = defaultdict(list)
        for transfer in transfers:
            cells[transfer.src].append(_cell(transfer))
        texts = [f"round {number}", *(_short(cells[rank]) for rank in ranks)]
        width = max(map(len, texts))
        columns.append([text.ljust(width) for text in texts])
    labels = ["rank", *(str(rank).rjust(4) for rank in ranks)]
    lines = [
        f"{schedule.algorithm} {schedule.kind}: {schedule.n} ranks, {len(schedule.rounds)} rounds, "
        f"chunk = size x {schedule.chunk_fraction:.4g}"
    ]
    for index, label in enumerate(labels):
        lines.append(" | ".join([label, *(column[index] for column in columns)]).rstrip())
    hidden_ranks, hidden_rounds = schedule.n - len(ranks), len(schedule.rounds) - len(shown)
    if hidden_ranks or hidden_rounds:
        lines.append(f"... and {hidden_rounds} more rounds, {hidden_ranks} more ranks")
    return "\n".join(lines)


def _cell(transfer: Transfer) -> str:
    chunks = transfer.chunks
    if len(chunks) > 2 and chunks == tuple(range(chunks[0], chunks[-1] + 1)):
        name = f"{chunks[0]}-{chunks[-1]}"
    elif len(chunks) > 3:
        name = f"{chunks[0]},{chunks[1]}..({len(chunks)})"
    else:
        name = ",".join(map(str, chunks))
    return f"{name}{'+' if transfer.reduce else '>'}{transfer.dst}"


def _short(parts: list[str]) -> str:
    if len(parts) > 3:
        return f"{parts[0]} {parts[1]} ..({len(parts)})"
    return " ".join(parts) or "."
