"""Two binary trees: the form against the rounds of the built schedule, and against its messages one by one."""

from __future__ import annotations

import pytest

from shardwise.collectives import (
    CollectiveKind,
    Topology,
    build_schedule,
    collective_cost,
    price_schedule,
    simulated_seconds,
)
from shardwise.collectives.algorithms.trees import double_tree_chunks

SIZES = (2**10, 2**20, 2**24, 2**28)


def costs(n: int, size: int) -> tuple[float, float, float]:
    """Seconds by the form, of the rounds and of the messages of the schedule in as many chunks."""
    network = Topology.switch(n, "25GB/s", "5us")
    chunks = int(double_tree_chunks(CollectiveKind.ALL_REDUCE, network.levels[0], size))
    schedule = build_schedule("all_reduce", network, "double_binary_tree", chunks=chunks)
    form = collective_cost("all_reduce", size, network, "double_binary_tree").seconds
    return (
        float(form),
        float(price_schedule(schedule, network, size).seconds),
        simulated_seconds(schedule, network, size),
    )


@pytest.mark.quick(15)
@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33])
@pytest.mark.parametrize("size", SIZES)
def test_the_form_is_its_rounds_or_a_little_more(n: int, size: int) -> None:
    form, rounds, messages = costs(n, size)
    assert messages <= rounds * (1 + 1e-9)  # nobody waits for the slowest message of a round, only for its own
    assert rounds <= form * (1 + 1e-9)
    assert form <= 1.1 * rounds or n == 3  # of three ranks none is inside one tree and a leaf of the other


@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_it_is_exact_for_powers_of_two_and_many_chunks(n: int) -> None:
    form, rounds, _ = costs(n, 2**28)
    assert form == pytest.approx(rounds, rel=1e-9)


def test_small_messages_are_not_priced_far_too_high() -> None:
    """1 MiB over 12 and 16 ranks was priced 1.7 times as high as its messages take."""
    for n in (12, 16):
        form, _, messages = costs(n, 2**20)
        assert form < 1.35 * messages
