"""An emulated cluster in one line of text, and what the planner makes of it."""

from __future__ import annotations

import pytest

from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.errors import SpecError


def test_text_becomes_numbers() -> None:
    found = Emulation.parse("2x4, 200Mbit, 1.5ms, loss=0.1%")
    assert (found.nodes, found.ranks_per_node, found.rate, found.delay, found.loss) == (2, 4, 25e6, 1.5e-3, 1e-3)
    assert Emulation.parse("3x1,1Gbit").delay == 0


@pytest.mark.parametrize("text", ["2x2,1Gbit,1ms", "2x1,200Mbit,0", "4x8,1.5GB/s,30us,loss=0.001", "2x2,3B/s,1s"])
def test_an_emulation_reads_back(text: str) -> None:
    assert Emulation.parse(str(Emulation.parse(text))) == Emulation.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "NODESxRANKS"),
        ("2,1Gbit,1ms", "NODESxRANKS"),
        ("2x2", "no rate"),
        ("2x2,fast,1ms", "--emulate.rate"),
        ("2x2,1Gbit,1Gbit", "--emulate.delay"),
        ("2x2,1Gbit,1ms,2ms", "'2ms' is not understood"),
        ("2x2,1Gbit,1ms,jitter=1ms", "'jitter=1ms' is not understood"),
        ("2x2,1Gbit,1ms,loss=80%", "--emulate.loss"),
        ("2x2,1Gbit,1ms,loss=1%,loss=2%", "5 parts"),
        ("1x2,1Gbit,1ms", "--emulate.nodes"),
        ("2x0,1Gbit,1ms", "--emulate.ranks_per_node"),
        ("65x1,1Gbit,1ms", "--emulate.nodes"),
        ("2x2,0bit,1ms", "--emulate.rate"),
        ("2x2,1Gbit,-1ms", "--emulate.delay"),
    ],
)
def test_a_mistake_is_one_line(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        Emulation.parse(text, "--emulate")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_planner_sees_one_port_per_node() -> None:
    found = cluster_of(Emulation.parse("2x4,1Gbit,1ms"), cluster_from("laptop"))
    inside, between = found.levels
    assert (inside.width, between.width, found.devices, found.nodes) == (4, 2, 8, 2)
    assert (between.bandwidth_per_direction, between.latency_per_step, between.ports) == (125e6, 1e-3, 1)
    assert inside.bandwidth_per_direction == cluster_from("laptop").levels[0].bandwidth_per_direction
    assert cluster_from(found.to_dict()) == found
    assert found.host_memory_per_device == cluster_from("laptop:8").host_memory_per_device
