"""Explains a collective on a topology (formula, numbers, alternatives, its rounds drawn), or a message over a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.collectives import (
    CollectiveCost,
    CollectiveKind,
    Level,
    Topology,
    build_schedule,
    collective_cost,
    crossovers,
    draw_rounds,
    p2p_latency,
    pairs,
    price_schedule,
)
from shardwise.collectives.closed_form import ClosedForm, closed_form, legend
from shardwise.collectives.cost import algorithm_names, family, parse_composite, without_unit_levels
from shardwise.collectives.shapes import Axis, shape_of
from shardwise.collectives.shapes import Grid as GridShape
from shardwise.collectives.table import IN_NETWORK
from shardwise.collectives.work import link_figures
from shardwise.report.explain.explanation import (
    Explanation,
    Formula,
    GridTable,
    Quantity,
    Value,
    number,
    rate,
    seconds,
    size,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.network import Link
from shardwise.spec.units import counted, readable_bytes, readable_seconds

_LARGEST_CHECKED = 64  # ranks up to which the schedule itself is built and priced
_LARGEST_DRAWN = 8


def explain_collective(kind: CollectiveKind, size_bytes: float, network: Topology, algorithm: str) -> Explanation:
    topology, _ = without_unit_levels(network)
    cost = collective_cost(kind, size_bytes, topology, algorithm)
    names = tuple(dict.fromkeys((cost.algorithm, *algorithm_names(kind, topology))))
    forms = {name: closed_form(kind, size_bytes, topology, name) for name in names}
    ideal = _ideal(topology)
    whole = "total" if ideal == topology else "on ideal links"
    return Explanation(
        title=f"{kind.value.replace('_', '-')} of {readable_bytes(size_bytes)} on a {topology.name} of "
        f"{topology.size}, algorithm: {cost.algorithm.replace('_', ' ')}",
        formula=(f"{whole} = {forms[cost.algorithm]}", *_per_level(topology, ideal, cost.algorithm)),
        numbers=_numbers(kind, size_bytes, topology),
        result=(
            *(() if ideal == topology else ((whole, _seconds(kind, size_bytes, ideal, cost.algorithm)),)),
            *_result(cost),
        ),
        tables=(
            *((_by_level(cost, topology, ideal),) if cost.levels else ()),
            _alternatives(kind, size_bytes, topology, forms),
        ),
        remarks=(
            *((f"Symbols: {legend(tuple(forms.values()))}.",) if topology.levels else ()),
            *_schedule_remark(kind, size_bytes, topology, cost),
            *_crossover_remarks(kind, topology),
        ),
        drawing=_drawing(kind, topology, cost.algorithm),
        source=(_source(kind, topology, cost.algorithm),),
    )


def explain_message(size_bytes: float | str, link: Link) -> Explanation:
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
            *((formula.name, seconds(formula.value(values))) for formula in (latency, moved, total)),
            (half.name, size(half.value(values))),
        ),
        source=("Hockney 1994: latency and bandwidth of one message", *((link.source,) if link.source else ())),
    )


def _source(kind: CollectiveKind, topology: Topology, algorithm: str) -> str:
    """Where the closed form comes from: looked up in the table of collectives and topologies."""
    name = family(algorithm)
    for pair in pairs():
        if pair.kind is kind and pair.topology == topology.name and pair.algorithm == name:
            return pair.source
    return "composition of the levels' algorithms"


def _ideal(topology: Topology) -> Topology:
    """The same network on ideal links: no startup time, and full bandwidth for messages of any size."""

    def without(level: Level) -> Level:
        switch = level.in_network and replace(level.in_network, startup=0.0, ramp_bytes=0.0)
        return replace(level, startup=0.0, ramp_bytes=0.0, in_network=switch)

    return replace(topology, levels=tuple(map(without, topology.levels)))


def _seconds(kind: CollectiveKind, size_bytes: float, topology: Topology, algorithm: str) -> Quantity:
    return seconds(float(collective_cost(kind, size_bytes, topology, algorithm).seconds))


def _per_level(topology: Topology, ideal: Topology, algorithm: str) -> tuple[str, ...]:
    """How the columns of the table of levels follow from each other, and the total from them."""
    if not topology.levels:
        return ()
    together = "max" if family(algorithm) in ("hierarchical_pipelined", "parallel_rings") else "sum"
    plain = ideal == topology
    return (
        f"latency = {'' if plain else 'startup + '}hops·a",
        f"bandwidth = {'V·b' if plain else '(V + sqrt(ramp·V))·b'}",
        f"total = sum(latency) + {together}(bandwidth)",
    )


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
        if suffix:
            numbers.append((f"n{suffix}", f"members ({level.name or shape})", number(level.size)))
        numbers.append((f"a{suffix}", f"latency of one message ({where})", seconds(level.latency)))
        numbers.append((f"1/b{suffix}", f"bandwidth, one direction ({where})", rate(level.rate)))
        if level.in_network is not None:
            reached, *_ = link_figures(level, True)
            numbers.append((f"1/c{suffix}", f"the same where the switch reduces ({where})", rate(reached)))
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


def _by_level(cost: CollectiveCost, topology: Topology, ideal: Topology) -> GridTable:
    """What each level carries and how long that takes; startup and ramp only where a level has them."""
    columns = {"level": "level", "hops": "hops", "V": "bytes", "a": "hop_seconds", "1/b": "bytes_per_second"}
    if ideal != topology:
        columns |= {"startup": "startup_seconds", "ramp": "ramp_bytes"}
    columns |= {"latency": "latency_seconds", "bandwidth": "bandwidth_seconds"}
    names = parse_composite(cost.algorithm) or [cost.algorithm] * len(topology.levels)
    rows: list[tuple[Value, ...]] = []
    for name, level, part in zip(names, topology.levels, cost.levels):
        reached, ramp, startup = link_figures(level, name in IN_NETWORK)
        own: tuple[Value, ...] = () if ideal == topology else (seconds(startup), size(ramp))
        hops = float(part.hops)
        step = (float(part.latency_seconds) - startup) / hops if hops and level.ring_step else level.latency
        carried = (
            number(hops),
            size(float(part.bytes)),
            seconds(step),
            rate(reached),
        )
        took = (seconds(float(part.latency_seconds)), seconds(float(part.bandwidth_seconds)))
        rows.append((part.level_name, *carried, *own, *took))
    return GridTable("numbers put in: V bytes over the busiest link of a level", columns, tuple(rows))


def _alternatives(
    kind: CollectiveKind, size_bytes: float, topology: Topology, forms: Mapping[str, ClosedForm]
) -> GridTable:
    ideal = _ideal(topology)
    columns = {"algorithm": "algorithm", "formula": "formula", "steps": "steps"}
    if ideal != topology:
        columns["on ideal links"] = "ideal_seconds"
    rows = []
    for name, form in forms.items():
        cost = collective_cost(kind, size_bytes, topology, name)
        total, steps = float(cost.seconds), number(float(cost.steps))
        own = () if ideal == topology else (_seconds(kind, size_bytes, ideal, name),)
        rows.append((total, (name.replace("_", " "), str(form), steps, *own, seconds(total))))
    rows.sort(key=lambda row: row[0])
    columns["total"] = "total_seconds"
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
