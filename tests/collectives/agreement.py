"""Shared by the tests: networks to try, and the check that a closed form equals its priced, verified schedule."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from shardwise.collectives import (
    Axis,
    CollectiveCost,
    CollectiveKind,
    FullyConnected,
    Grid,
    Level,
    Switch,
    Topology,
    Tree,
    build_schedule,
    collective_cost,
    price_schedule,
    verify,
)
from shardwise.collectives.cost import algorithm_names

BANDWIDTH, LATENCY = 1e9, 1e-4
SIZE = 1e6  # with the two above, pipelines have a handful of chunks
SINGLE = ("line", "ring", "tree", "switch", "fully_connected")
VOLUMES = ("steps", "sent_bytes", "received_bytes", "total_bytes")


def single(name: str, n: int) -> Topology:
    return getattr(Topology, name)(n, BANDWIDTH, LATENCY)


def buildable(kind: CollectiveKind, topology: Topology) -> list[str]:
    """The algorithms with a schedule."""
    without = ("hierarchical_pipelined", "parallel_rings", "nvls", "sharp")
    return [name for name in algorithm_names(kind, topology) if name not in without]


def same(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-15)


def assert_agrees(cost: CollectiveCost, priced: CollectiveCost, where: str) -> None:
    for field in ("seconds", *VOLUMES):
        closed, measured = getattr(cost, field), getattr(priced, field)
        if cost.exact:
            assert same(closed, measured), f"{where}: {field} {closed} is not the schedule's {measured}"
        else:
            assert closed >= measured * (1 - 1e-9), f"{where}: {field} {closed} is below the schedule's {measured}"
    if not cost.exact:
        return
    for closed_level, priced_level in zip(cost.levels, priced.levels, strict=True):
        assert same(closed_level.hops, priced_level.hops), f"{where}: hops of {closed_level}"
        assert same(closed_level.bytes, priced_level.bytes), f"{where}: bytes of {closed_level}"


def assert_schedule_agrees(kind: CollectiveKind, topology: Topology, algorithm: str, size: float = SIZE) -> None:
    where = f"{algorithm} {kind} on {topology}"
    schedule = build_schedule(kind, topology, algorithm, size_bytes=size)
    verify(schedule)
    assert_agrees(collective_cost(kind, size, topology, algorithm), price_schedule(schedule, topology, size), where)


def assert_all_agree(topology: Topology, size: float = SIZE) -> None:
    for kind in CollectiveKind:
        for algorithm in buildable(kind, topology):
            assert_schedule_agrees(kind, topology, algorithm, size)


def shapes(largest: int, strides: tuple[int, ...] = (1,)) -> st.SearchStrategy:
    """Any shape of up to about ``largest`` members, axes of 1 and 2 included."""
    sizes, stride = st.integers(1, largest), st.sampled_from(strides)
    powers = st.sampled_from(tuple(s for s in strides if s & (s - 1) == 0))
    axis = st.builds(Axis, sizes, st.booleans(), stride)
    short = st.builds(Axis, st.integers(1, 3), st.booleans(), stride)
    return st.one_of(
        st.builds(Grid, st.tuples(axis)),
        st.builds(Grid, st.tuples(short, short)),
        st.builds(Grid, st.tuples(short, short, short)),
        st.builds(Switch, sizes),
        st.builds(Tree, sizes, powers),
        st.builds(FullyConnected, sizes),
    )


def levels(largest: int, strides: tuple[int, ...] = (1,)) -> st.SearchStrategy:
    return st.builds(
        Level,
        shapes(largest, strides),
        bandwidth=st.sampled_from((1e9, 3e9, 7e9)),
        latency=st.sampled_from((1e-4, 2e-5)),
        ports=st.sampled_from((None, None, 1, 2, 3)),
        startup=st.sampled_from((0.0, 1e-5)),
        efficiency=st.sampled_from((1.0, 0.8)),
        ramp_bytes=st.sampled_from((0.0, 1e4)),
    )


def hierarchies(most_devices: int) -> st.SearchStrategy:
    """Two to four levels of mixed shapes, some with shared ports."""
    counts = st.one_of(
        st.tuples(levels(6), levels(6)),
        st.tuples(levels(4), levels(4), levels(3)),
        st.tuples(levels(3), levels(2), levels(3), levels(3)),
    )
    return st.builds(Topology, counts).filter(lambda t: t.size <= most_devices)


def placed_hierarchies(most_devices: int) -> st.SearchStrategy:
    """Two levels as place() makes them: only the first axis of all is strided."""
    axis = st.builds(Axis, st.integers(2, 4), st.booleans(), st.integers(2, 3))
    plain = st.builds(Axis, st.integers(1, 3), st.booleans())
    inner = st.builds(Grid, st.tuples(axis) | st.tuples(axis, plain)) | st.builds(Tree, st.integers(2, 4), st.just(2))
    made = st.tuples(levels(1).flatmap(lambda level: inner.map(lambda shape: replace(level, shape=shape))), levels(4))
    return st.builds(Topology, made).filter(lambda t: t.size <= most_devices)
