"""Every exact closed form equals the price of its schedule, and every schedule is proved right."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectives.agreement import (
    SINGLE,
    SIZE,
    assert_all_agree,
    assert_schedule_agrees,
    hierarchies,
    levels,
    placed_hierarchies,
    shapes,
    single,
)
from effort import examples
from shardwise.collectives import (
    Axis,
    CollectiveKind,
    Grid,
    Level,
    Topology,
    build_schedule,
    collective_cost,
    price_schedule,
    verify,
)
from shardwise.collectives.table import rows_for_level_of_hierarchy
from tables import table

QUICK = settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LONG = settings(QUICK, max_examples=examples(600))

GRIDS = [
    (1, 1), (2, 2), (3, 2), (2, 3), (1, 5), (4, 3), (3, 4), (5, 3), (7, 2), (4, 4), (6, 2), (2, 6), (8, 4), (5, 7),
    (8, 8), (2, 2, 2), (3, 3, 3), (2, 3, 4), (4, 3, 2), (4, 2, 5), (1, 4, 1), (5, 1, 2), (4, 4, 4), (2, 2, 3, 2),
]  # fmt: skip


axes = st.builds(Axis, st.sampled_from((1, 2, 3, 5, 6, 7)), st.booleans())
grids = st.builds(Grid, st.tuples(axes, axes) | st.tuples(axes, axes, axes)).filter(lambda grid: grid.size <= 100)


@pytest.mark.parametrize("name", SINGLE)
@table("n", [*range(1, 34), 64])
def test_one_level(name: str, n: int) -> None:
    assert_all_agree(single(name, n))


@table("shape", GRIDS)
@table("name", ["mesh", "torus"])
def test_grids(name: str, shape: tuple[int, ...]) -> None:
    assert_all_agree(getattr(Topology, name)(shape, 1e9, 1e-4))


@settings(QUICK, max_examples=examples(120))
@given(shapes(8, strides=(1, 2, 3, 4)), st.sampled_from((0.0, 2e-5, 1e-3)), st.sampled_from((1.0, 3e4, 4e6)))
def test_strided_and_mixed_shapes(shape, latency: float, size: float) -> None:
    topology = Topology((Level(shape, 1e9, latency or 1e-5, ramp_bytes=1e3),))
    assert_all_agree(topology, size)


@settings(QUICK, max_examples=examples(150))
@given(hierarchies(60))
def test_hierarchies(topology: Topology) -> None:
    assert_all_agree(topology)


@table("sizes", [(2, 2), (2, 3), (4, 2), (3, 4), (2, 2, 2)])
@table("ratio", [1, 5, 100])
def test_overlapped_levels_cost_at_least_the_slowest(sizes: tuple[int, ...], ratio: float) -> None:
    """Where the rounds of a level fill its ports, as rings through a switch do; and no more than levels in turn."""
    rates = [1e10 / ratio**index for index in range(len(sizes))]
    topology = Topology.hierarchical(sizes, rates, [1e-5] * len(sizes))
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        for size in (1e4, 1e6, 1e8):
            schedule = build_schedule(kind, topology, "hierarchical_pipelined", size)
            verify(schedule)
            priced = price_schedule(schedule, topology, size)
            floor = collective_cost(kind, size, topology, "hierarchical_pipelined")
            in_turn = collective_cost(kind, size, topology, "hierarchical")
            assert floor.bandwidth_seconds * (1 - 1e-9) <= priced.bandwidth_seconds
            assert priced.seconds <= in_turn.seconds * 1.2


@settings(QUICK, max_examples=examples(20))
@given(grids)
def test_uneven_grids(shape: Grid) -> None:
    assert_all_agree(Topology((Level(shape, 1e9, 1e-4),)))


@settings(QUICK, max_examples=examples(60))
@given(placed_hierarchies(24))
def test_strided_hierarchies(topology: Topology) -> None:
    assert_all_agree(topology)


@settings(QUICK, max_examples=examples(200))
@given(st.data())
def test_any_algorithm_on_any_level(data: st.DataObject) -> None:
    some = st.lists(levels(5).filter(lambda level: level.size > 1), min_size=2, max_size=3)
    topology = Topology(tuple(data.draw(some.filter(lambda made: Topology(tuple(made)).size <= 60))))
    kind = data.draw(st.sampled_from([k for k in CollectiveKind if k is not CollectiveKind.SEND_RECV]))
    last = len(topology.levels) - 1
    rows = [rows_for_level_of_hierarchy(kind, level, i == last) for i, level in enumerate(topology.levels)]
    names = [data.draw(st.sampled_from([row.name for row in some if row.algorithm.build])) for some in rows]
    assert_schedule_agrees(kind, topology, f"hierarchical({','.join(names)})", SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(34, 64))
@pytest.mark.parametrize("name", SINGLE)
def test_one_level_of_every_size(name: str, n: int) -> None:
    assert_all_agree(single(name, n))


@pytest.mark.slow
@LONG
@given(hierarchies(120) | placed_hierarchies(60))
def test_many_hierarchies(topology: Topology) -> None:
    assert_all_agree(topology)
