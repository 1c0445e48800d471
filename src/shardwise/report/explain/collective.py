"""A collective on a topology (formula, numbers, alternatives, its rounds drawn small); one message over a link."""

from __future__ import annotations

from dataclasses import replace

from shardwise.collectives import (
    CollectiveCost,
    CollectiveKind,
    Topology,
    build_schedule,
    collective_cost,
    crossovers,
    draw_rounds,
    p2p_latency,
    pairs,
    price_schedule,
)
from shardwise.collectives.cost import algorithm_names, family
from shardwise.collectives.listing import SYMBOLS
from shardwise.collectives.shapes import Axis, shape_of
from shardwise.collectives.shapes import Grid as GridShape
from shardwise.report.explain.explanation import Explanation, GridTable
from shardwise.report.explain.formula import Formula
from shardwise.report.explain.quantity import Quantity, number, rate, seconds, size
from shardwise.spec.errors import SpecError
from shardwise.spec.network import Link
from shardwise.spec.units import counted, readable_bytes, readable_seconds

_LARGEST_CHECKED = 64  # ranks up to which the schedule itself is built and priced
_LARGEST_DRAWN = 8


def explain_collective(kind: CollectiveKind, size_bytes: float, topology: Topology, algorithm: str) -> Explanation:
    """What ``kind`` costs, why, and what the alternatives cost."""
    cost = collective_cost(kind, size_bytes, topology, algorithm)
    formula, source = _row_of(kind, topology, cost.algorithm)
    return Explanation(
        title=f"{_spoken(kind)} of {readable_bytes(size_bytes)} on a {topology.name} of {topology.size}, "
        f"algorithm: {cost.algorithm.replace('_', ' ')}",
        formula=(f"seconds = {formula}", _levels_formula(topology), f"symbols: {SYMBOLS}"),
        numbers=_numbers(kind, size_bytes, topology),
        result=_result(cost),
        tables=(_by_level(cost), _alternatives(kind, size_bytes, topology, cost.algorithm)),
        remarks=(*_schedule_remark(kind, size_bytes, topology, cost), *_crossover_remarks(kind, topology)),
        drawing=_drawing(kind, topology, cost.algorithm),
        source=(source,),
    )


def explain_message(size_bytes: float | str, link: Link) -> Explanation:
    """One message over one link."""
    cost = p2p_latency(size_bytes, link)
    sent, reached = float(cost.volume.sent_bytes), link.bandwidth * link.efficiency
    latency, moved, total = Formula("latency part", "a"), Formula("bandwidth part", "m/B"), Formula("total", "a + m/B")
    half = Formula("half of the bandwidth is reached at", "a·B")
    values = {"a": link.latency, "m": sent, "B": reached}
    return Explanation(
        title=f"One message of {readable_bytes(sent)} over {link.name}",
        formula=tuple(map(str, (latency, moved, total, half))),
        numbers=(
            ("m", "bytes of the message", Quantity(sent, "bytes", f"{sent:,.0f}")),
            ("a", "latency, end to end in software", seconds(link.latency)),
            ("B", f"bandwidth, one direction: {link.efficiency:.0%} of the link's is reached", rate(reached)),
        ),
        result=(
            *((one.name, seconds(one.value(values))) for one in (latency, moved, total)),
            (half.name, size(half.value(values))),
        ),
        source=("Hockney 1994: latency and bandwidth of one message", *((link.source,) if link.source else ())),
    )


def _spoken(kind: CollectiveKind) -> str:
    return kind.value.replace("_", "-")


def _row_of(kind: CollectiveKind, topology: Topology, algorithm: str) -> tuple[str, str]:
    """Formula and source of an algorithm, from the table of pairs."""
    name = family(algorithm)
    for pair in pairs():
        if pair.kind is kind and pair.topology == topology.name and pair.algorithm == name:
            return pair.formula, pair.source
    return "sum over the levels of each level's own algorithm", "composition of the levels' algorithms"


def _levels_formula(topology: Topology) -> str:
    if any(level.ramp_bytes or level.startup for level in topology.levels):
        return "every level: startup + hops·a + (V + sqrt(ramp·V))·b, V the bytes over its busiest link"
    return "every level: hops·a + V·b, V the bytes over its busiest link"


def _numbers(kind: CollectiveKind, size_bytes: float, topology: Topology) -> tuple[tuple[str, str, Quantity], ...]:
    meaning = {
        CollectiveKind.ALL_TO_ALL: "bytes one rank sends in all",
        CollectiveKind.ALL_GATHER: "bytes of the gathered whole",
        CollectiveKind.REDUCE_SCATTER: "bytes of the whole before it is scattered",
        CollectiveKind.GATHER: "bytes of the gathered whole",
        CollectiveKind.SCATTER: "bytes of the whole before it is scattered",
    }.get(kind, "bytes every rank holds")
    numbers = [
        ("n", "ranks", number(topology.size)),
        ("m", meaning, Quantity(size_bytes, "bytes", f"{size_bytes:,.0f} ({readable_bytes(size_bytes)})")),
    ]
    for index, level in enumerate(topology.levels):
        suffix = str(index + 1) if len(topology.levels) > 1 else ""
        shape = level.shape.name
        if isinstance(level.shape, GridShape) and len(level.shape.axes) > 1:
            shape += " " + "x".join(str(axis.size) for axis in level.shape.axes)
        where = f"{level.name or shape}, {counted(level.size, 'member')}" if suffix else shape
        numbers.append((f"a{suffix}", f"latency of one message ({where})", seconds(level.latency)))
        numbers.append((f"1/b{suffix}", f"bandwidth, one direction ({where})", rate(level.rate)))
    return tuple(numbers)


def _result(cost: CollectiveCost) -> tuple[tuple[str, Quantity], ...]:
    return (
        ("latency part", seconds(float(cost.latency_seconds))),
        ("bandwidth part", seconds(float(cost.bandwidth_seconds))),
        ("total", seconds(float(cost.seconds))),
        ("steps, one after the other", number(float(cost.steps))),
        ("bytes the busiest rank sends", size(float(cost.sent_bytes))),
        ("bytes the busiest rank receives", size(float(cost.received_bytes))),
        ("bytes of all ranks", size(float(cost.total_bytes))),
    )


def _by_level(cost: CollectiveCost) -> GridTable:
    rows = tuple(
        (
            level.level_name,
            number(float(level.hops)),
            size(float(level.bytes)),
            seconds(float(level.latency_seconds)),
            seconds(float(level.bandwidth_seconds)),
        )
        for level in cost.levels
    )
    columns = {"level": "level", "hops": "hops", "V": "bytes", "hops·a": "latency_seconds", "V·b": "bandwidth_seconds"}
    return GridTable("numbers put in", columns, rows)


def _alternatives(kind: CollectiveKind, size_bytes: float, topology: Topology, chosen: str) -> GridTable:
    rows = []
    for name in dict.fromkeys((chosen, *algorithm_names(kind, topology))):
        cost = collective_cost(kind, size_bytes, topology, name)
        formula, _ = _row_of(kind, topology, name)
        total = float(cost.seconds)
        rows.append((total, (name.replace("_", " "), formula, number(float(cost.steps)), seconds(total))))
    rows.sort(key=lambda row: row[0])
    columns = {"algorithm": "algorithm", "seconds": "formula", "steps": "steps", "total": "total_seconds"}
    return GridTable("every algorithm here, cheapest first", columns, tuple(row for _, row in rows), words=2)


def _schedule_remark(
    kind: CollectiveKind, size_bytes: float, topology: Topology, cost: CollectiveCost
) -> tuple[str, ...]:
    if not cost.exact:
        return ("This closed form is a bound or a model; none of our schedules equals it.",)
    if topology.size > _LARGEST_CHECKED:
        return ()
    try:
        schedule = build_schedule(kind, topology, cost.algorithm, size_bytes)
    except SpecError:
        return ()
    priced = float(price_schedule(schedule, topology, size_bytes).seconds)
    return (
        f"The schedule itself ({counted(len(schedule.rounds), 'round')}), priced by its busiest links: "
        f"{readable_seconds(priced)}, {_distance(priced, float(cost.seconds))}.",
    )


def _distance(priced: float, closed_form: float) -> str:
    error = abs(priced / closed_form - 1) if closed_form else abs(priced)
    return "equal to the closed form" if error < 1e-9 else f"{error:.1e} from the closed form"


def _crossover_remarks(kind: CollectiveKind, topology: Topology) -> tuple[str, ...]:
    return tuple(
        f"From {readable_bytes(least)} on {after.replace('_', ' ')} is cheaper than {before.replace('_', ' ')}."
        for least, before, after in crossovers(kind, topology)
    )


def _drawing(kind: CollectiveKind, topology: Topology, algorithm: str) -> str:
    """The rounds of the same algorithm on a topology small enough to draw."""
    small = _small(topology)
    try:
        schedule = build_schedule(kind, small, algorithm)
    except SpecError:
        return ""
    note = "" if small.size == topology.size else f" (drawn for {small.size} ranks)"
    return f"rounds{note}\n{draw_rounds(schedule)}"


def _small(topology: Topology) -> Topology:
    if topology.size <= _LARGEST_DRAWN:
        return topology
    levels = []
    for level in topology.levels:
        shape = level.shape
        if isinstance(shape, GridShape):
            limit = 4 if len(shape.axes) == 1 and len(topology.levels) == 1 else 3 if len(shape.axes) == 2 else 2
            small = GridShape(tuple(Axis(min(axis.size, limit), axis.wrap) for axis in shape.axes))
            levels.append(replace(level, shape=small))
        else:
            limit = 2 if len(topology.levels) > 1 else 4
            levels.append(replace(level, shape=shape_of(shape.name, min(shape.size, limit)), ports=None))
    return replace(topology, levels=tuple(levels))
