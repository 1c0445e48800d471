"""Names, constructors, the table, the drawing, and what happens when the user errs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.collectives import (
    CollectiveKind,
    Grid,
    InNetwork,
    Level,
    Switch,
    Topology,
    build_schedule,
    collective_cost,
    crossovers,
    draw_rounds,
    pairs,
)
from shardwise.collectives.closed_form import TOPOLOGIES, WHY_NOT
from shardwise.spec.errors import SpecError
from tables import table


@table(("text", "kind"), [
    ("allreduce", "all_reduce"), ("all-reduce", "all_reduce"), ("AllReduce", "all_reduce"), ("a2a", "all_to_all"),
    ("p2p", "send_recv"), ("ReduceScatter", "reduce_scatter"), ("bcast", "broadcast"), ("all_gather", "all_gather"),
])  # fmt: skip
def test_names(text: str, kind: str) -> None:
    assert CollectiveKind.parse(text) == kind == CollectiveKind.parse(CollectiveKind(kind))


def test_constructors() -> None:
    assert Topology.torus("8x4", "50GB/s", "1us") == Topology.torus((8, 4), 50e9, 1e-6)
    assert Topology.switch(8, "400Gb/s", 0).levels[0].bandwidth == 50e9
    net = Topology.hierarchical([8, "4x4"], [450e9, 50e9], ["1us", "5us"], ["fully_connected", "torus"])
    assert net.size == 128 and net.name == "hierarchical" and net.levels[1].shape.name == "torus2d"
    simple = [getattr(Topology, name)(3, 1) for name in ("line", "ring", "tree", "switch", "fully_connected")]
    grids = [Topology.mesh((2, 3), 1), Topology.torus((3, 3), 1), Topology.torus((2, 3, 4), 1)]
    names = {topology.name for topology in (*simple, *grids, net)}
    assert names == set(TOPOLOGIES)
    assert hash(net) == hash(Topology(net.levels))


@table(("make", "text"), [
    (lambda: Topology.switch(0, 1e9), "0 is not a whole number"),
    (lambda: Topology.ring(2.5, 1e9), "2.5"),
    (lambda: Topology.ring(4, 0), "topology.bandwidth: 0 is not positive"),
    (lambda: Topology.ring(4, float("inf")), "topology.bandwidth"),
    (lambda: Topology.ring(4, "fast"), "topology.bandwidth: 'fast'"),
    (lambda: Topology.ring(4, 1e9, -1), "topology.latency: -1"),
    (lambda: Topology.mesh("8x", 1e9), "topology.shape: '8x'.*8x8"),
    (lambda: Topology.mesh((3, 0), 1e9), "below 1"),
    (lambda: Topology.hierarchical([2, 2], [1e9], [0, 0]), "2 sizes, 1 bandwidths"),
    (lambda: Topology.hierarchical([2], [1e9], [0], ["star"]), "'star' is not a shape; choose one of"),
    (lambda: Topology.hierarchical(["2x2"], [1e9], [0], ["switch"]), "one size"),
    (lambda: Level(Switch(2), 1e9, ports=0), "topology.ports: 0"),
    (lambda: InNetwork("magic"), "choose nvls or sharp"),
    (lambda: CollectiveKind.parse("allredcue"), "did you mean all_reduce"),
    (lambda: CollectiveKind.parse(3), "3 is not a collective"),  # type: ignore[arg-type]
    (lambda: collective_cost("ar", -1, Topology.ring(4, 1)), "size_bytes: -1 is negative"),
    (lambda: collective_cost("ar", [1.0, float("nan")], Topology.ring(4, 1)), "size_bytes"),
    (lambda: collective_cost("ar", 1, Topology.ring(4, 1), "rign"), "'rign' cannot run all_reduce on a ring; .*ring"),
    (lambda: collective_cost("ar", 1, Topology.hierarchical([2, 2], [1, 1], [0, 0]), "tree"), "several levels"),
    (lambda: collective_cost("ar", 1, Topology.hierarchical([2, 2], [1, 1], [0, 0]), "hierarchical(ring)"), "2 levels"),
    (lambda: build_schedule("ar", Topology.ring(4, 1), chunks=0), "chunks: 0"),
    (lambda: build_schedule("ar", Topology.hierarchical([2, 2], [1, 1], [0, 0]), "parallel_rings"), "schedule"),
    (lambda: crossovers("ar", Topology.ring(4, 1), []), "no algorithm"),
])  # fmt: skip
def test_mistakes_are_named(make, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make()


def test_every_pair_has_an_algorithm() -> None:
    table = pairs()
    found = {(pair.kind, pair.topology) for pair in table if pair.textbook}
    assert found == {(kind, name) for kind in CollectiveKind for name in TOPOLOGIES}
    assert all(pair.formula and pair.source for pair in table)
    assert {pair.bound for pair in table} == {"exact", "upper bound", "lower bound", "model"}
    assert [pair.algorithm for pair in pairs("all_reduce", "ring")] == ["ring", "bidirectional_ring"]
    offered = {(pair.algorithm, pair.topology) for pair in table}
    refused = {(name, topology): reason for name, networks, reason in WHY_NOT for topology in networks}
    assert offered.isdisjoint(refused)
    assert "middle" in refused["bruck", "ring"]


def test_drawing() -> None:
    ring = build_schedule("all_reduce", Topology.ring(4, 1, 0))
    text = draw_rounds(ring)
    assert text.splitlines()[2].split("|")[1].strip() == "1+3" and len(text.splitlines()) == 6
    assert "more rounds" in draw_rounds(build_schedule("all_gather", Topology.ring(40, 1, 0)), max_rounds=2)
    assert str(ring).splitlines()[1].startswith("0: 1+>0[2]")
    assert draw_rounds(build_schedule("all_reduce", Topology.ring(1, 1, 0)))
    wide = draw_rounds(build_schedule("all_to_all", Topology.switch(12, 1, 0)))
    assert max(map(len, wide.splitlines())) < 100


def test_size_two_rings_do_not_wrap() -> None:
    ring, line = Topology.ring(2, 1e9, 1e-6), Topology.line(2, 1e9, 1e-6)
    for kind in CollectiveKind:
        assert collective_cost(kind, 1e6, ring, "auto").seconds == collective_cost(kind, 1e6, line, "auto").seconds
    assert isinstance(ring.levels[0].shape, Grid)


def test_import_is_light() -> None:
    code = "import sys, shardwise.collectives; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
