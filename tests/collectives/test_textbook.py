"""The formulas of the text books, written out by hand, and the bounds no algorithm can beat."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectives.agreement import SINGLE, hierarchies, same, shapes, single
from effort import examples
from shardwise.collectives import (
    CollectiveKind,
    FullyConnected,
    Grid,
    InNetwork,
    Level,
    Switch,
    Topology,
    build_schedule,
    collective_cost,
    collective_latency_and_volume,
    crossovers,
    p2p_latency,
    price_schedule,
)
from shardwise.collectives.cost import SMALL_MESSAGES, algorithm_names

QUICK = settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
A, B, M = 3e-6, 50e9, 2.0**26
b = 1 / B


def seconds(kind: str, topology: Topology, algorithm: str = "textbook") -> float:
    return collective_cost(kind, M, topology, algorithm).seconds


@pytest.mark.parametrize("n", [2, 3, 8, 13, 64])
def test_classic_formulas(n: int) -> None:
    q = ceil(log2(n))
    ring, tree, switch = Topology.ring(n, B, A), Topology.tree(n, B, A), Topology.switch(n, B, A)
    full = Topology.fully_connected(n, B, A)
    expected = [
        (seconds("all_reduce", ring), 2 * (n - 1) * (M / (n * B) + A)),
        (seconds("all_gather", ring), (n - 1) * (M / (n * B) + A)),
        (seconds("reduce_scatter", ring), (n - 1) * (M / (n * B) + A)),
        (seconds("all_reduce", tree), 2 * q * (M / B + A)),
        (seconds("all_reduce", switch), 2 * A + 2 * (n - 1) / n * M * b),
        (seconds("all_gather", switch, "bruck"), q * A + (n - 1) / n * M * b),
        (seconds("broadcast", switch), q * (A + M * b)),
        (seconds("gather", tree), q * A + (n - 1) / n * M * b),
        (seconds("all_to_all", switch, "pairwise"), (n - 1) * (A + M * b / n)),
        (seconds("all_to_all", ring), (n - 1) * A + (n - 1) / 2 * M * b),
        (seconds("all_reduce", full), 2 * A + 2 * M * b / n),
        (seconds("send_recv", switch), A + M * b),
    ]
    for got, wanted in expected:
        assert same(got, wanted)


def test_grids_with_equal_axes() -> None:
    for d, axes in ((4, 2), (8, 2), (4, 3), (6, 3)):
        n, shape = d**axes, (d,) * axes
        mesh, torus = Topology.mesh(shape, B, A), Topology.torus(shape, B, A)
        assert same(seconds("all_gather", mesh), axes * (d - 1) * A + (n - 1) / n * M * b / axes)
        assert same(seconds("all_reduce", torus), 2 * (axes * (d // 2) * A + (n - 1) / n * M * b / (2 * axes)))
    # scaling-book: all-to-all on a ring costs a quarter of an all-gather of n times the bytes
    ring = Topology.ring(16, B, 0)
    gather_both_ways = collective_cost("all_gather", 16 * M, ring, "bidirectional_ring").seconds
    assert same(seconds("all_to_all", ring, "direct"), gather_both_ways / 4 * 16 / 15)


def test_hierarchical_is_the_node_and_network_formula() -> None:
    g, k, b1, b2, a1, a2 = 8, 4, 1 / 450e9, 1 / 50e9, 1e-6, 5e-6
    net = Topology.hierarchical([g, k], ["450GB/s", "50GB/s"], ["1us", "5us"])
    inside, outside = (g - 1) * (a1 + M * b1 / g), (k - 1) * (a2 + M / g * b2 / k)
    assert same(seconds("all_reduce", net), 2 * inside + 2 * outside)
    assert same(seconds("all_gather", net), inside + outside)
    assert same(seconds("all_to_all", net), (g - 1) * (a1 + M / g * b1) + (k - 1) * (a2 + M / k * b2))
    n = g * k
    assert same(seconds("all_reduce", net, "flat_ring"), 2 * (n - 1) * (a2 + M / n * b2))
    pipelined = collective_cost("all_reduce", M, net, "hierarchical_pipelined")
    serial = collective_cost("all_reduce", M, net)
    assert same(pipelined.bandwidth_seconds, max(level.bandwidth_seconds for level in serial.levels))
    assert same(pipelined.latency_seconds, serial.latency_seconds) and not pipelined.exact


def test_in_network_reduction() -> None:
    level = Level(Switch(8), B, A, efficiency=0.9, startup=1e-6, in_network=InNetwork("nvls", 0.8, startup=9e-6))
    one = Topology((level,))
    assert same(seconds("all_reduce", one, "nvls"), 9e-6 + 2 * A + M * (1 + 1 / 8) / (B * 0.8))
    assert collective_cost("all_reduce", M, one, "auto").algorithm == "nvls"
    both = Topology((level, Level(Switch(4), 10e9, A)))
    cost = collective_cost("all_reduce", M, both, "hierarchical(nvls,ring)")
    assert same(cost.levels[0].bytes, M * 9 / 8) and same(cost.levels[1].bytes, 2 * 3 / 4 * M / 8)
    with pytest.raises(ValueError, match="nvls"):
        collective_cost("all_reduce", M, Topology.switch(8, B, A), "nvls")
    with pytest.raises(ValueError, match="no schedule"):
        build_schedule("all_reduce", one, "nvls")


def test_double_binary_tree_nears_two_m_b() -> None:
    for n in (8, 64, 1000):
        cost = collective_cost("all_reduce", 2.0**34, Topology.switch(n, B, A), "double_binary_tree")
        assert 2 * 2.0**34 * b < cost.seconds < 2.1 * 2.0**34 * b


def test_tree_gives_way_to_ring() -> None:
    """NCCL's tuner: trees for small messages, rings for large ones."""
    net = Topology.switch(16, "25GB/s", "5us")
    [(size, first, last)] = crossovers("all_reduce", net, ["ring", "double_binary_tree"])
    assert (first, last) == ("double_binary_tree", "ring")
    for name, factor in ((first, 0.9), (last, 1.1)):
        other = last if name == first else first
        here = collective_cost("all_reduce", size * factor, net, name).seconds
        assert here < collective_cost("all_reduce", size * factor, net, other).seconds
    assert crossovers("all_reduce", Topology.switch(1, 1, 0)) == []
    names = [step[1:] for step in crossovers("broadcast", net)]
    assert names[0][0] == "binomial" and all(a[1] == c[0] for a, c in pairwise(names))


def _ports(topology: Topology) -> int:
    """Links into the best connected device."""
    shape = topology.levels[0].shape
    if isinstance(shape, Grid):
        return sum(min(2, axis.size - 1) for axis in shape.live)
    return shape.size - 1 if shape.family == "fully_connected" else 1


@pytest.mark.parametrize("name", [*SINGLE, "mesh", "torus"])
def test_nothing_beats_the_links(name: str) -> None:
    """What a rank must receive has to come in over its links (Chan et al. 2007)."""
    for n in (2, 3, 8, 12):
        shape: object = {8: (4, 2), 12: (3, 4)}.get(n, (n, 1)) if name in ("mesh", "torus") else n
        net = getattr(Topology, name)(shape, B, 0)
        share = (n - 1) / n * M * b / _ports(net)
        least = {"all_gather": share, "reduce_scatter": share, "all_reduce": 2 * share, "gather": share,
                 "scatter": share, "all_to_all": share, "broadcast": M * b / _ports(net)}  # fmt: skip
        for kind, bound in least.items():
            for algorithm in algorithm_names(CollectiveKind(kind), net):
                assert seconds(kind, net, algorithm) >= bound * (1 - 1e-12), (kind, algorithm)


@QUICK
@given(hierarchies(200) | st.builds(lambda s: Topology((Level(s, 1e9, 1e-5, ramp_bytes=100),)), shapes(12)))
def test_auto_arrays_and_monotony(net: Topology) -> None:
    sizes = np.array([0.0, 1, 1e3, 3e4, 1e6, 1e6 + 1, 1e8, 1e11])
    for kind in CollectiveKind:
        models = ("hierarchical_pipelined", "parallel_rings")  # what "auto" takes only from a library
        names = [n for n in algorithm_names(kind, net) if n not in models]
        auto = collective_cost(kind, sizes, net, "auto")
        for name in [*names, "auto"]:
            costs = [collective_cost(kind, float(size), net, name) for size in sizes]
            array = collective_cost(kind, sizes, net, name)
            for field in ("seconds", "latency_seconds", "steps", "sent_bytes", "received_bytes", "total_bytes"):
                scalar = [float(getattr(cost, field)) for cost in costs]
                assert np.allclose(np.broadcast_to(getattr(array, field), sizes.shape), scalar, rtol=1e-12, atol=0)
            times = np.array([float(cost.seconds) for cost in costs])
            assert np.all(np.diff(times) >= -1e-12 * times[1:]), (kind, name)
            assert np.all(auto.seconds <= times * (1 + 1e-12)), (kind, name)


def test_pipelined_levels_only_if_asked() -> None:
    serial = Topology.hierarchical([8, 4], [450e9, 50e9], [1e-6, 5e-6])
    overlapped = Topology(serial.levels, pipelined_levels=True)
    assert "pipelined" not in collective_cost("all_reduce", M, serial, "auto").algorithm
    assert "pipelined" in collective_cost("all_reduce", M, overlapped, "auto").algorithm
    assert seconds("all_reduce", overlapped, "auto") < seconds("all_reduce", serial, "auto")


def test_a_library_limits_the_choice() -> None:
    free = Topology.hierarchical([8, 4], [450e9, 50e9], [1e-6, 5e-6])
    nccl = Topology(free.levels, library="nccl")
    assert collective_cost("all_to_all", M, nccl, "auto").algorithm == "direct"
    assert collective_cost("all_gather", M, nccl, "auto").algorithm == "parallel_rings"
    with pytest.raises(ValueError, match=r"topology\.library"):
        Topology(free.levels, library="mpi")


def test_rings_of_a_library_use_every_link_of_a_fully_connected_node() -> None:
    """RCCL on 8 MI300X: 313 GB/s of bus bandwidth, of 7 links of 64 GB/s (stas00/ml-engineering network/README.md)."""
    node = Topology((Level(FullyConnected(8), 64e9 * 0.72, 3e-6),), library="nccl")
    for kind, factor in (("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_reduce", 7 / 4)):
        cost = collective_cost(kind, 8e9, node, "auto")
        assert cost.algorithm == "parallel_rings"
        assert factor * 8e9 / cost.seconds == pytest.approx(313e9, rel=0.04)
    nodes = Topology((*node.levels, Level(Switch(4), 1e12, 1e-6)), library="nccl")
    inside = collective_cost("all_gather", 8e9, nodes, "parallel_rings").levels[0]
    assert inside.bytes == pytest.approx(31 / 32 * 8e9 * 7 / 8 / 7)
    for size, rings in ((2, 1), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6), (8, 7)):
        assert FullyConnected(size).disjoint_rings == rings


def rings_between(nodes: int, inside: int = 8, kind: str = "all_gather", size: Any = M) -> Any:
    """Nodes of ``inside`` devices on which a step of large messages takes longer than one of small messages."""
    levels = (
        Level(Switch(inside), 450e9, 1e-6, ring_step=4.76e-6),
        Level(Switch(nodes), 50e9, 5e-6, ring_step=19.6e-6),
    )
    return collective_cost(kind, size, Topology(levels, library="nccl"), "parallel_rings")


def test_a_ring_between_nodes_waits_for_every_rank() -> None:
    """Large messages pay a step of their protocol for every rank: NCCL's gathers and scatters have no tree."""
    large = 64e9
    for nodes in (8, 64, 128):
        waits = float(rings_between(nodes, size=large).latency_seconds)
        assert waits == pytest.approx((nodes - 1) * 19.6e-6 + nodes * 7 * 4.76e-6)
        both = float(rings_between(nodes, kind="all_reduce", size=large).latency_seconds)
        assert both == pytest.approx(2 * waits)
    small = float(rings_between(64, size=1e3).latency_seconds)
    assert small == pytest.approx(63 * 5e-6 + 64 * 7 * 1e-6, rel=1e-3)


def test_a_ring_takes_its_cheaper_protocol() -> None:
    sizes = np.array([0.0, 1e3, 1e6, 1e7, 3e7, 1e8, 1e9, 1e11])
    costs = [rings_between(64, size=float(size)) for size in sizes]
    times = np.array([float(cost.seconds) for cost in costs])
    assert np.all(np.diff(times) > 0)
    together = rings_between(64, size=sizes)
    assert np.allclose(together.seconds, times, rtol=1e-12)
    for cost in (*costs, together):
        of_levels = sum(level.latency_seconds for level in cost.levels)
        assert np.allclose(of_levels, cost.latency_seconds, rtol=1e-12)
    moving = float(costs[5].bandwidth_seconds)
    flags = float(costs[5].sent_bytes) / SMALL_MESSAGES - moving
    short, long = 63 * 5e-6 + 64 * 7e-6, 63 * 19.6e-6 + 64 * 7 * 4.76e-6
    assert float(costs[5].latency_seconds) == pytest.approx(min(short + max(moving, flags), long))


def test_one_device_costs_nothing() -> None:
    for net in (Topology(()), Topology.ring(1, B, A), Topology.hierarchical([1, 1], [B, B], [A, A])):
        for kind in CollectiveKind:
            for algorithm in ("textbook", "auto"):
                cost = collective_cost(kind, M, net, algorithm)
                assert cost.seconds == cost.total_bytes == cost.steps == 0
    assert np.array_equal(collective_cost("all_reduce", np.ones(3), Topology(()), "auto").seconds, np.zeros(3))


def test_unit_levels_vanish() -> None:
    thick = Topology.hierarchical([1, 8, 1], [1e9, B, 1e9], [1, A, 1])
    cost = collective_cost("all_reduce", M, thick)
    assert same(cost.seconds, seconds("all_reduce", Topology.switch(8, B, A)))
    assert [level.level_index for level in cost.levels] == [0, 1, 2] and cost.levels[1].bytes > 0


def test_latency_and_volume() -> None:
    got = collective_latency_and_volume("allreduce", "64MiB", Topology.ring(4, B, A))
    assert same(got.latency, 6 * (A + M * b / 4)) and got.steps == 6
    assert got.volume.sent_bytes == got.volume.received_bytes == 1.5 * M and got.volume.total_bytes == 6 * M
    message = p2p_latency(M, Level(Switch(2), B, A, efficiency=0.5))
    assert same(message.latency, A + M / (B / 2)) and message.steps == 1 and message.volume.sent_bytes == M


def test_price_on_a_slower_network_than_meant() -> None:
    """A schedule may be priced on any network: a ring's rounds on a line pay for the way back."""
    ring = build_schedule("all_gather", single("ring", 6))
    assert same(price_schedule(ring, Topology.line(6, B, A), M).seconds, 5 * (5 * A + M * b / 6))
    with pytest.raises(ValueError, match="groups"):
        price_schedule(ring, Topology.line(4, B, A), M)
