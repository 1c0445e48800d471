"""The closed form of an algorithm on a network, written out for people, with the numbers that its symbols stand for.

It gives the time over links without startup and ramp. Prices come from `cost`; a test checks these formulas against
them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.collectives.algorithms.rings import BUCKET, DIMENSION_ORDERED
from shardwise.collectives.cost import SMALL_MESSAGES, direct_loads, parse_composite, ring_hops, stages
from shardwise.collectives.schedule import CollectiveKind, Schedule, Transfer
from shardwise.collectives.shapes import Grid
from shardwise.collectives.table import IN_NETWORK, LEVELS_ROWS, ROWS, LevelsRow, Row, choose, rows_for
from shardwise.collectives.topology import Level, Topology
from shardwise.collectives.work import bits_below, log2_ceil, log2_floor

SYMBOLS = {
    "n": "ranks", "m": "bytes", "a": "latency", "b": "seconds for a byte", "c": "b where the switch reduces",
    "q": "log2(n), rounded up", "p": "the largest power of two up to n", "f": "1 if n is not p", "k": "chunks",
    "r": "rings without a common link", "w": "directions used at once", "D": "axes", "d": "members of an axis",
    "h": "hops to the farthest member of an axis", "before": "members of the axes before", "after": "and after",
    "X": "blocks over the busiest link if all send to all", "ones": "one-bits in 0 to n−1",
    "x": "hops to the next rank", "s": "devices on a port",
    "A": "latency of a large message in a ring through nodes", "L": "seconds for a byte sent with flags",
    "H": "hops of all rounds of uneven axes", "K": "their blocks",
}  # fmt: skip
_FUNCTIONS = ("sum", "min", "max", "floor", "ceil", "log2")
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class ClosedForm:
    """A formula in symbols."""

    text: str
    values: dict[str, float]  # of all symbols but those of the network (n, m, a, b)

    def __str__(self) -> str:
        return ", ".join((self.text, *(f"{name} = {value:.15g}" for name, value in self.values.items())))


def closed_form(kind: CollectiveKind, size_bytes: float, topology: Topology, algorithm: str) -> ClosedForm:
    """The closed form of an algorithm by name; the topology has no level with a single member."""
    levels = topology.levels
    if not levels:
        return ClosedForm("0", {})
    if len(levels) == 1:
        row = choose(rows_for(kind, levels[0]), algorithm, kind, levels[0].shape.name)
        hops, moved, values = _written(row, kind, levels[0], size_bytes)
        return ClosedForm(f"{_times(hops, 'a')} + {_times(moved, rate_symbol(row.name))}", values)
    names = parse_composite(algorithm)
    if names is not None:
        return _level_by_level(kind, size_bytes, topology, names, algorithm.startswith("hierarchical_pipelined"))
    if algorithm == "parallel_rings":
        return _parallel_rings(kind, topology)
    if algorithm == "flat_ring":
        times, loads = _passes(kind), [level.shape.next_load for level in levels]
        latency = f"{times}(n−1)·{_largest(ring_hops(topology), 'a')}"
        return ClosedForm(f"{latency} + {times}(n−1)/n·m·{_largest(loads, 'b')}", {})
    steps, loads = direct_loads(kind, topology)
    if kind is CollectiveKind.SEND_RECV:
        return ClosedForm(f"{_largest(steps, 'a')} + m·{_largest(loads, 'b')}", {})
    shown = [f"X{index}" for index in range(1, len(levels) + 1)]
    return ClosedForm(f"{_largest(steps, 'a')} + m/n·{_largest(shown, 'b')}", dict(zip(shown, loads)))


def symbolic(row: Row) -> str:
    """The closed form of an algorithm on any network that it is for."""
    return f"{_times(row.hops, 'a')} + {_times(row.moved, rate_symbol(row.name))}"


def legend(formulas: Sequence[ClosedForm]) -> str:
    """What the symbols of some formulas mean."""
    used = {re.sub(r"(_i|\d+)$", "", name) for form in formulas for name in _NAME.findall(form.text)}
    return ", ".join(f"{symbol} {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in used)


def rate_symbol(algorithm: str) -> str:
    return "c" if algorithm in IN_NETWORK else "b"


def _level_by_level(
    kind: CollectiveKind, size_bytes: float, topology: Topology, names: list[str], overlapped: bool
) -> ClosedForm:
    latencies, moves = [], []
    values: dict[str, float] = {}
    for turn in stages(kind, topology, names):
        mark, size = str(turn.index + 1), size_bytes * turn.size_fraction
        part = "m" + ("".join(f"/n{inner + 1}" for inner in range(turn.index)) if turn.size_fraction < 1 else "")
        hops, moved, symbols = _written(turn.row, kind, turn.level, size, mark, part)
        if turn.sharing > 1:
            moved, symbols[f"s{mark}"] = f"s{mark}·{moved}", turn.sharing
        latencies.append(_times(hops, f"a{mark}"))
        moves.append(_times(moved, rate_symbol(turn.row.name) + mark))
        values |= symbols
    moving = f"max({', '.join(moves)})" if overlapped else " + ".join(moves)
    return ClosedForm(f"{' + '.join(latencies)} + {moving}", values)


def _parallel_rings(kind: CollectiveKind, topology: Topology) -> ClosedForm:
    latencies, moves, inside = [], [], ""
    last, has_steps = len(topology.levels), any(level.ring_step > level.latency for level in topology.levels)
    for index, level in enumerate(topology.levels, start=1):
        around = f"n{inside}/n{index}·" if index < last else ""
        latencies.append(f"{_passes(kind)}{around}(n{index}−1)·a{index}")
        share = f"·(n{index}−1)/n{index}" if index < last else ""
        rings, shared = level.shape.disjoint_rings, topology.sharing(index - 1)
        factors = (f"·{shared}" if shared > 1 else "") + (f"/{rings}" if rings > 1 else "")
        moves.append(f"{_passes(kind)}(n−1)/n·m{inside}{share}{factors}·b{index}")
        inside += f"/n{index}"
    late, moved = " + ".join(latencies), f"max({', '.join(moves)})"
    if not has_steps:
        return ClosedForm(f"{late} + {moved}", {})
    steps = {f"A{i}": max(level.ring_step, level.latency) for i, level in enumerate(topology.levels, start=1)}
    by_flags = f"{late} + max(2·{moved}, {_passes(kind)}(n−1)/n·m·L)"
    return ClosedForm(f"min({by_flags}, {late.replace('a', 'A')} + {moved})", {**steps, "L": 1 / SMALL_MESSAGES})


def _written(
    row: Row, kind: CollectiveKind, level: Level, size_bytes: float, mark: str = "", part: str = "m"
) -> tuple[str, str, dict[str, float]]:
    """Hops, bytes and the values of their symbols; on one of several levels every symbol has its ``mark``."""
    texts, values = (row.hops, row.moved), _values(row, kind, level, size_bytes)
    if row.algorithm in (BUCKET, DIMENSION_ORDERED) and not _axes_are_even(row, level):
        work = row.algorithm.work(kind, level, float(level.size))
        texts, values = ("H", "K/n·m"), {"H": float(work.hops), "K": float(work.bytes)}
    used = {name for text in texts for name in _NAME.findall(text)}

    def marked(match: re.Match[str]) -> str:
        name = match[0]
        base, axis, _ = name.partition("_i")
        return part if name == "m" else name if name in _FUNCTIONS else f"{base}{mark}{axis}"

    kept = {
        f"{name.partition('_')[0]}{mark}{''.join(name.partition('_')[1:])}": value
        for name, value in values.items()
        if name in used or f"{name.partition('_')[0]}_i" in used
    }
    hops, moved = (_NAME.sub(marked, text) for text in texts)
    return hops, moved, kept


def _axes_are_even(row: Row, level: Level) -> bool:
    assert isinstance(level.shape, Grid)
    return len({(axis.size if row.algorithm is BUCKET else 0, axis.is_ring) for axis in level.shape.live}) == 1


def _values(row: Row, kind: CollectiveKind, level: Level, size_bytes: float) -> dict[str, float]:
    n, shape, power = level.size, level.shape, 2 ** log2_floor(level.size)
    axes = shape.live if isinstance(shape, Grid) else ()
    values: dict[str, float] = {
        "q": log2_ceil(n), "p": power, "f": n != power, "r": shape.disjoint_rings, "ones": bits_below(n),
        "x": shape.next_hops, "X": shape.exchange_load, "D": len(axes),
        "w": 2 if any(axis.is_ring for axis in axes) else 1,
    }  # fmt: skip
    if row.algorithm.chunks is not None:
        values["k"] = float(row.algorithm.chunks(kind, level, size_bytes))
    for index, axis in enumerate(axes):
        before, after = (math.prod(other.size for other in others) for others in (axes[:index], axes[index + 1 :]))
        figures = {"d": axis.size, "h": axis.farthest, "X": axis.exchange_load, "before": before, "after": after}
        values |= {f"{name}_{index + 1}": value for name, value in figures.items()}
    return values


def _passes(kind: CollectiveKind) -> str:
    return "2·" if kind is CollectiveKind.ALL_REDUCE else ""


def _largest(factors: Sequence[int | str], symbol: str) -> str:
    return f"max({', '.join(_times(str(factor), f'{symbol}{index}') for index, factor in enumerate(factors, start=1))})"


def _times(factor: str, symbol: str) -> str:
    return symbol if factor == "1" else f"{factor}·{symbol}"


# -- The table of collectives and networks with formulas, and a schedule drawn round by round

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
    textbook: bool  # whether the textbook chooses this algorithm
    bound: str  # "exact" (equal to the priced schedule), "upper bound", "lower bound" or "model" (no schedule)
    has_schedule: bool
    formula: str  # in the symbols of `closed_form.SYMBOLS`
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
