"""place(): the closed form of one group equals the price of all groups communicating at once."""

from __future__ import annotations

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


@settings(max_examples=examples(800), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_one_group_sees_what_all_groups_do(data: st.DataObject) -> None:
    made = data.draw(st.lists(LEVELS, min_size=1, max_size=3))
    topology = Topology(tuple(made))
    n = topology.size
    assume(n <= 96)
    degree = data.draw(st.sampled_from(divisors(n)))
    stride = data.draw(st.sampled_from(divisors(n // degree)))
    try:
        seen = place(topology, stride, degree)
    except SpecError:
        assume(False)
    assert seen.size == degree
    groups = [
        [base + offset + i * stride for i in range(degree)]
        for base in range(0, n, stride * degree)
        for offset in range(stride)
    ]
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
    (1, 12, "straddles nvlink.*nearest degrees that fit: 8 and 16"),
    (1, 3, "degree 3 .* straddles nvlink.*2 and 4"),
    (3, 2, "stride 3 straddles nvlink"),
    (8, 32, "exceeds the 32 devices.*4"),
    (0, 2, "stride: 0"),
    (1, True, "degree: true"),
])  # fmt: skip
def test_what_does_not_fit(stride: int, degree: int, text: str) -> None:
    net = Topology((Level(Switch(8), 1e9, name="nvlink"), Level(Switch(4), 1e9, name="ib")))
    with pytest.raises(SpecError, match=text):
        place(net, stride, degree)
