"""place(): the closed form of one group equals the price of all groups communicating at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from collectives.agreement import SIZE, assert_agrees, buildable
from effort import examples
from shardwise.collectives import (
    Axis,
    CollectiveKind,
    FullyConnected,
    Grid,
    InNetwork,
    Level,
    Switch,
    Topology,
    Tree,
    build_schedule,
    collective_cost,
    place,
    price_schedule,
)
from shardwise.spec.errors import SpecError

SHAPES = st.one_of(
    st.builds(lambda n, wrap: Grid((Axis(n, wrap),)), st.sampled_from((2, 4, 6, 8, 9, 12)), st.booleans()),
    st.builds(
        lambda x, y, wrap: Grid((Axis(x, wrap), Axis(y, not wrap))),
        st.sampled_from((2, 3, 4)),
        st.sampled_from((2, 4, 6)),
        st.booleans(),
    ),
    st.builds(Tree, st.sampled_from((2, 4, 8))),
    st.builds(Switch, st.sampled_from((2, 3, 4, 6, 8))),
    st.builds(FullyConnected, st.sampled_from((2, 4, 6))),
)
LEVELS = st.builds(
    Level,
    SHAPES,
    bandwidth=st.sampled_from((1e9, 3e9)),
    latency=st.sampled_from((1e-4, 2e-5)),
    ports=st.sampled_from((None, 1, 2, 4)),
)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def uneven_ports(topology: Topology, stride: int) -> bool:
    """Neither divides the other: which groups meet on a port differs, and place() takes the worst."""
    for index, level in enumerate(topology.levels):
        skipped = min(stride, topology.below(index))
        if level.ports and level.ports % skipped and skipped % level.ports:
            return True
    return False


def all_groups(topology: Topology, stride: int, degree: int) -> list[list[int]]:
    """The ranks of all groups; on a grid a rank's place is made of the factors that each axis has of each degree."""
    degrees = (stride, degree, topology.size // (stride * degree))
    groups: dict[tuple[int, int], list[int]] = {}
    for number in range(topology.size):
        coordinates = (number % stride, number // stride % degree, number // (stride * degree))
        groups.setdefault((coordinates[0], coordinates[2]), []).append(_place(topology, degrees, coordinates))
    assert sorted(rank for group in groups.values() for rank in group) == list(range(topology.size))
    return list(groups.values())


def _place(topology: Topology, degrees: tuple[int, ...], coordinates: tuple[int, ...]) -> int:
    left, at = list(degrees), list(coordinates)
    rank, unit = 0, 1
    for size in [size for level in topology.levels for size, _ in level.shape.strides]:
        taken = 1
        for number in range(len(left)):
            factor = math.gcd(left[number], size // taken)
            rank += at[number] % factor * taken * unit
            at[number] //= factor
            left[number] //= factor
            taken *= factor
        unit *= size
    return rank


@settings(max_examples=examples(800), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_one_group_sees_what_all_groups_do(data: st.DataObject) -> None:
    made = data.draw(st.lists(LEVELS, min_size=1, max_size=3))
    topology = Topology(tuple(made))
    n = topology.size
    assume(n <= 96)
    degree = data.draw(st.sampled_from(divisors(n)))
    stride = data.draw(st.sampled_from(divisors(n // degree)))
    seen = place(topology, stride, degree)
    assert seen.size == degree
    assume(not seen.straddles)
    groups = all_groups(topology, stride, degree)
    kind = data.draw(st.sampled_from(list(CollectiveKind)))
    algorithm = data.draw(st.sampled_from(buildable(kind, seen)))
    if algorithm == "none":
        return
    schedule = build_schedule(kind, seen, algorithm, size_bytes=SIZE)
    cost, priced = collective_cost(kind, SIZE, seen, algorithm), price_schedule(schedule, topology, SIZE, groups)
    if uneven_ports(topology, stride):
        assert cost.seconds >= priced.seconds * (1 - 1e-9)
    else:
        assert abs(cost.seconds - priced.seconds) <= 1e-9 * cost.seconds or (
            not cost.exact and cost.seconds >= priced.seconds
        ), f"{algorithm} {kind}, stride {stride}, degree {degree} on {topology}: {cost} is not {priced}"
        if len(seen.levels) == len(topology.levels):
            assert_agrees(cost, price_schedule(schedule, seen, SIZE), "on its own")


def test_what_becomes_of_an_axis() -> None:
    ring = Topology.ring(8, 1e9, 1e-6)
    cases = {(1, 8): Axis(8, True), (1, 4): Axis(4), (2, 4): Axis(4, True, 2), (2, 2): Axis(2, False, 2),
             (4, 2): Axis(2, True, 4)}  # fmt: skip
    for (stride, degree), axis in cases.items():
        assert place(ring, stride, degree).levels[0].shape == Grid((axis,))
    torus = Topology.torus("4x4", 1e9, 1e-6)
    assert place(torus, 4, 4).levels[0].shape == Grid((Axis(4, True),))
    assert place(torus, 1, 8).levels[0].shape == Grid((Axis(4, True), Axis(2)))
    assert place(Topology.tree(16, 1e9, 0), 4, 4).levels[0].shape == Tree(4, stride=4)


def test_levels_and_ports() -> None:
    nvls = InNetwork("nvls")
    node = Level(Switch(8), 450e9, 1e-6, startup=1e-6, in_network=nvls, name="nvlink")
    net = Topology((node, Level(Switch(16), 50e9, 5e-6, ports=4, name="ib")), pipelined_levels=True)
    tensor, data = place(net, 1, 8), place(net, 8, 16)
    assert tensor.levels == (node,) and tensor.pipelined_levels
    (ib,) = data.levels
    assert (ib.size, ib.bandwidth, ib.ports, ib.name) == (16, 25e9, None, "ib")  # 8 devices on 4 ports
    both = place(net, 2, 16)
    assert [level.size for level in both.levels] == [4, 4] and both.levels[1].ports == 2
    assert place(net, 1, 1).levels == () and place(net, 1, 128).levels[1].ports == 4


@pytest.mark.parametrize(("stride", "degree", "text"), [
    (1, 12, "groups of 12 ranks, 1 apart, do not divide the 32 devices.*nearest degrees that fit: 8 and 16"),
    (3, 2, "groups of 2 ranks, 3 apart, do not divide"),
    (8, 32, "groups of 32 ranks, 8 apart, do not divide the 32 devices.*fit: 4"),
    (0, 2, "stride: 0"),
    (1, True, "degree: true"),
])  # fmt: skip
def test_what_does_not_fit(stride: int, degree: int, text: str) -> None:
    net = Topology((Level(Switch(8), 1e9, name="nvlink"), Level(Switch(4), 1e9, name="ib")))
    with pytest.raises(SpecError, match=text):
        place(net, stride, degree)


# -- groups that straddle a level --------------------------------------------------------------------


def test_the_poorest_domain_counts() -> None:
    """12 ranks on nodes of 8 are 8 + 4; 6 ranks are 6, 2 + 4 or 4 + 2; 39 at strides of 8 leave one alone in a rack."""
    nodes = Topology((Level(Switch(8), 450e9, 1e-6), Level(Switch(6), 50e9, 5e-6)))
    racks = Topology((Level(Switch(64), 900e9, 1e-6), Level(Switch(39), 50e9, 5e-6)))
    cases = {(nodes, 1, 12): [4, 3], (nodes, 1, 6): [2, 3], (nodes, 3, 2): [2], (racks, 8, 39): [39]}
    for (network, stride, degree), sizes in cases.items():
        seen = place(network, stride, degree)
        assert seen.straddles
        assert [level.size for level in seen.levels] == sizes
    assert place(nodes, 3, 2).levels[0].bandwidth == 50e9


def test_a_torus_is_split_by_factors() -> None:
    """16 of a 12 x 16 plane: 4 of each axis; the other dimension takes the rest of both, whole."""
    torus = Topology.torus("8x12x16", 1e9, 1e-6)
    assert place(torus, 8, 16).levels[0].shape == Grid((Axis(4), Axis(4)))
    assert place(torus, 128, 12).levels[0].shape == Grid((Axis(3, True, 4), Axis(4, True, 4)))
    assert not place(torus, 8, 16).straddles


def members_by_domain(world: int, domain: int, stride: int, degree: int) -> list[list[int]]:
    """Of every group, its members in each domain of consecutive ranks that it reaches."""
    counts = []
    for base in range(0, world, stride * degree):
        for first in range(base, base + stride):
            held: dict[int, int] = {}
            for rank in range(first, first + stride * degree, stride):
                held[rank // domain] = held.get(rank // domain, 0) + 1
            counts.append(list(held.values()))
    return counts


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_straddling_costs_no_less_than_inside_and_no_more_than_outside(data: st.DataObject) -> None:
    """And what enters the poorest domain has to pass the ports of the members there."""
    inner, outer = data.draw(st.integers(2, 24)), data.draw(st.integers(2, 12))
    ports = data.draw(st.sampled_from((None, 1, 2, 3)))
    slow = Level(Switch(outer), 1e9, 5e-5, ports=ports, name="ib")
    network = Topology((Level(Switch(inner), 8e9, 1e-5, name="nvlink"), slow))
    n = network.size
    degree = data.draw(st.sampled_from([one for one in divisors(n) if one > 1]))
    stride = data.draw(st.sampled_from(divisors(n // degree)))
    seen = place(network, stride, degree)
    assume(seen.straddles)
    assert seen.size == degree
    poorest = min(min(held) for held in members_by_domain(n, inner, stride, degree))
    inside = Topology((Level(Switch(degree), 8e9, 1e-5),))
    share = 1 if ports is None or ports >= inner else math.ceil(inner / ports)
    outside = Topology((Level(Switch(degree), 1e9 / share, 5e-5),))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        cost, least, most = (collective_cost(kind, SIZE, one, "auto").seconds for one in (seen, inside, outside))
        assert least * (1 - 1e-9) <= cost <= most * (1 + 1e-9), kind
    entering = SIZE * (degree - poorest) / degree / poorest / slow.bandwidth
    assert collective_cost("all_gather", SIZE, seen, "auto").seconds >= entering


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(2, 6), st.integers(2, 4), st.data())
def test_three_levels_keep_the_order_of_domains(inner: int, middle: int, outer: int, data: st.DataObject) -> None:
    """Never more members of a group below a level than its poorest domain there has."""
    network = Topology(tuple(Level(Switch(size), 1e9, name=name) for size, name in zip((inner, middle, outer), "abc")))
    degree = data.draw(st.sampled_from(divisors(network.size)))
    stride = data.draw(st.sampled_from(divisors(network.size // degree)))
    seen = place(network, stride, degree)
    assert seen.size == degree
    for name, domain in (("a", inner), ("b", inner * middle)):
        poorest = min(min(held) for held in members_by_domain(network.size, domain, stride, degree))
        below = math.prod(level.size for level in seen.levels if level.name <= name)
        assert below <= poorest
        assert seen.straddles or below == poorest
