"""A schedule whose ranks wait only for what they need: never later than in rounds, never quicker than its links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectives.agreement import buildable, hierarchies, shapes
from effort import examples
from shardwise.collectives import CollectiveKind, Level, Topology, build_schedule, price_schedule, simulated_seconds

QUICK = settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SIZES = st.sampled_from((1e3, 1e6, 1e8))


def _between(topology: Topology, size: float) -> None:
    for kind in CollectiveKind:
        for name in buildable(kind, topology):
            schedule = build_schedule(kind, topology, name, size)
            in_rounds = price_schedule(schedule, topology, size)
            seconds = simulated_seconds(schedule, topology, size)
            assert seconds <= float(in_rounds.seconds) * (1 + 1e-9), (kind, name)
            if schedule.rounds:
                assert seconds >= schedule.chunk_fraction * size / max(level.rate for level in topology.levels)


@QUICK
@given(shapes(8), SIZES, st.sampled_from((0.0, 1e-4)))
def test_one_level(shape, size: float, startup: float) -> None:
    _between(Topology((Level(shape, 1e9, 1e-4, startup=startup, ramp_bytes=1e3),)), size)


@QUICK
@given(hierarchies(24), SIZES)
def test_several_levels(topology: Topology, size: float) -> None:
    _between(topology, size)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_of_equal_links_takes_as_long_as_its_rounds(n: int, kind: str) -> None:
    topology = Topology.switch(n, 1e9, 1e-4)
    schedule = build_schedule(kind, topology, "ring", 1e6)
    expected = float(price_schedule(schedule, topology, 1e6).seconds)
    assert simulated_seconds(schedule, topology, 1e6) == pytest.approx(expected)


def test_a_ring_through_slow_links_meets_each_in_turn() -> None:
    """Two nodes of two: of its three steps there and three back, a chunk goes at most four over the slow link."""
    topology = Topology.hierarchical([2, 2], [1e15, 1e15], [1e-4, 1e-2])
    schedule = build_schedule("all_reduce", topology, "flat_ring", 1.0)
    assert simulated_seconds(schedule, topology, 1.0) == pytest.approx(4 * 1e-2 + 2 * 1e-4)


def test_groups_of_a_node_share_its_port() -> None:
    both = Topology.hierarchical([2, 2], [1e15, 1e6], [0, 0])
    shared = replace(both, levels=(both.levels[0], replace(both.levels[1], ports=1)))
    schedule = build_schedule("all_reduce", both, "hierarchical", 1e6)
    alone, together = (simulated_seconds(schedule, one, 1e6) for one in (both, shared))
    assert together == pytest.approx(2 * alone)
