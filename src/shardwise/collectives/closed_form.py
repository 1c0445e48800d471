"""The closed form of an algorithm on a network, written out for people, with the numbers that its symbols stand for.

It gives the time over links without startup and ramp. Prices come from `cost`; a test checks these formulas against
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.collectives.algorithms.rings import BUCKET, DIMENSION_ORDERED
from shardwise.collectives.cost import direct_loads, parse_composite, ring_hops, stages
from shardwise.collectives.kinds import CollectiveKind
from shardwise.collectives.shapes import Grid
from shardwise.collectives.table import IN_NETWORK, Row, choose, rows_for
from shardwise.collectives.topology import Level, Topology
from shardwise.collectives.work import bits_below, log2_ceil, log2_floor

SYMBOLS = {
    "n": "ranks", "m": "bytes", "a": "latency", "b": "seconds for a byte", "c": "b where the switch reduces",
    "q": "log2(n), rounded up", "p": "the largest power of two up to n", "f": "1 if n is not p", "k": "chunks",
    "r": "rings without a common link", "w": "directions used at once", "D": "axes", "d": "members of an axis",
    "h": "hops to the farthest member of an axis", "before": "members of the axes before", "after": "and after",
    "X": "blocks over the busiest link if all send to all", "ones": "one-bits in 0 to n−1",
    "x": "hops to the next rank", "s": "devices on a port",
    "H": "hops of all rounds of uneven axes", "K": "their blocks",
}  # fmt: skip
_FUNCTIONS = ("sum", "max", "floor", "ceil", "log2")
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True)
class ClosedForm:
    """A formula in symbols."""

    text: str
    values: dict[str, float]
    """Of all symbols but those of the network (n, m, a, b)."""

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
    last = len(topology.levels)
    for index, level in enumerate(topology.levels, start=1):
        around = f"n{inside}/n{index}·" if index < last else ""
        latencies.append(f"{_passes(kind)}{around}(n{index}−1)·a{index}")
        share = f"·(n{index}−1)/n{index}" if index < last else ""
        rings, shared = level.shape.disjoint_rings, topology.sharing(index - 1)
        factors = (f"·{shared}" if shared > 1 else "") + (f"/{rings}" if rings > 1 else "")
        moves.append(f"{_passes(kind)}(n−1)/n·m{inside}{share}{factors}·b{index}")
        inside += f"/n{index}"
    return ClosedForm(f"{' + '.join(latencies)} + max({', '.join(moves)})", {})


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
