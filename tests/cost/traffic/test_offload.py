"""Bytes that offload moves in a step; and jobs that send nothing."""

from __future__ import annotations

from typing import Any

import pytest

from cost.builders import (
    LLAMA,
    MOE,
    job,
    sent,
    sent_in,
    switched,
    traffics,
)
from shardwise.cost.analysis import analyze
from shardwise.cost.step.simulation import COMMUNICATION
from shardwise.cost.traffic.traffic import Traffic
from shardwise.layout.stages import rank_contents
from shardwise.spec.parameters import parameter_count


def offload(shares: dict[str, float], **strategy: Any) -> list[Traffic]:
    cluster = switched(8, host_link={"bandwidth": 1e9, "latency": 0})
    return traffics(job(MOE, cluster, **{"dp": 8, "offload": shares, **strategy}), "offload")


def test_offloaded_optimizer_moves_gradients_down_and_weights_up_once() -> None:
    parameters = parameter_count(MOE)
    assert sent(offload({"optimizer": 1})) == pytest.approx(2 * 2 * parameters)
    assert sent(offload({"optimizer": 0.5}, zero=1)) == pytest.approx(0.5 * 2 * 2 * parameters / 8)


def test_what_lives_on_the_host_is_not_moved_for_the_optimizer_again() -> None:
    everything = offload({"optimizer": 1, "gradients": 1, "weights": 1})
    parts = [*offload({"gradients": 1}), *offload({"weights": 1})]
    assert sent(everything) == pytest.approx(sent(parts))


def test_offloaded_weights_come_up_in_both_passes_of_every_microbatch() -> None:
    """ep 8: experts are whole on their device, only the dense rest is sharded."""
    case = job(MOE, dp=8, ep=8)
    contents = rank_contents(case, 0)
    found = offload({"weights": 1}, ep=8, zero=3)
    assert sent(found) == pytest.approx(2 * 2 * (contents.dense / 8 + contents.experts))
    assert {t.window for t in found} == {"forward", "backward"}


def test_offloaded_weights_gradients_and_activations_move_every_microbatch() -> None:
    for share in ("weights", "gradients", "activations"):
        once, four = (offload({share: 1}, zero=3, training={"global_batch": 8 * m}) for m in (1, 4))
        assert sent(four) == pytest.approx(4 * sent(once))
    once, four = (offload({"optimizer": 1}, training={"global_batch": 8 * m}) for m in (1, 4))
    assert sent(four) == sent(once)


def test_dimensions_without_ranks_send_nothing() -> None:
    analysis = analyze(job(LLAMA, dp=1))
    assert all(analysis.dimension_traffics(name) == () for name in COMMUNICATION)
    assert analysis.exposed_share == 0
    assert sent_in(analysis, "dp") == 0
