"""What a step waits for offloaded states that the device updates: its price against chunks, slots and layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.memory.sum import first_elements
from shardwise.cost.step.prediction import predict, rank_prediction
from shardwise.cost.traffic.offload import share_in_layers
from shardwise.layout.pieces import update_chunk, update_slots
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.spec import Job
from shardwise.spec.clusters import cluster_from

STATES_BYTES = 12  # two moments and a master weight


def job(batch: int, layers: int, offload: dict[str, Any], vocab: int = 8192) -> Job:
    cluster = cluster_from("dgx-h200").with_devices(1)
    assert cluster.host_link is not None
    cluster = replace(cluster, host_link=replace(cluster.host_link, outward=0.9, duplex=0.8))
    model = {"name": "one", "layers": layers, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": vocab}
    return Job.from_dict(
        {
            "model": model,
            "cluster": cluster.to_dict(),
            "strategy": {"microbatch": batch, "offload": offload},
            "training": {"global_batch": batch, "seq": 8192, "precision": "bf16"},
            "run": {"device": "cuda"},
        }
    )


def played(one: Job) -> float:
    """Seconds that layers and the head wait, with every chunk's copies in turn and a slot used again once it was copied
    out."""
    contents, link = rank_contents(one, 0), one.cluster.host_link
    assert link is not None
    elements, first = contents.total, first_elements(contents, sharding_of(one.strategy), tied=False)
    chunk, slots = update_chunk(elements), int(update_slots(elements, first))
    each = chunk * STATES_BYTES / (link.bandwidth * link.efficiency * link.duplex)
    chunks = -int(-elements // chunk)
    arrived, left = [0.0] * min(slots, chunks), []
    for number in range(chunks):
        if number >= slots:
            arrived.append(max(arrived[-1], left[number - slots]) + each)
        left.append(max(arrived[number], left[-1] if left else 0.0) + each)
    compute = rank_prediction(one, contents).compute.forward
    layer = compute * share_in_layers(one, contents) / contents.layers
    embedding, per_layer = contents.others / 2, contents.layer_matrices / contents.layers
    now = 0.0
    for number in range(contents.layers):
        needed = embedding + (number + 1) * per_layer
        now = max(now, arrived[min(chunks, -int(-needed // chunk)) - 1]) + layer
    return max(now, arrived[-1]) - contents.layers * layer


@pytest.mark.parametrize("layers", [4, 12])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
def test_a_step_waits_as_long_as_layers_do(batch: int, layers: int) -> None:
    one = job(batch, layers, {"optimizer": 1})
    priced = predict(one).last.exposed("offload")
    assert priced == pytest.approx(played(one), rel=0.1, abs=0.003)  # a chunk and its copy


def test_the_first_layer_waits_for_nothing() -> None:
    """As many slots as the embedding and a layer need, with three that move; a larger embedding takes more."""
    small, large = (rank_contents(job(8, 12, {}, vocab), 0) for vocab in (8192, 65536))
    sharding = sharding_of(job(8, 12, {}).strategy)
    for contents in (small, large):
        first = first_elements(contents, sharding, tied=False)
        assert first == pytest.approx(contents.others / 2 + contents.layer_matrices / 12)
        slots, chunk = update_slots(contents.total, first), update_chunk(contents.total)
        assert first + 2 * chunk < slots * chunk <= first + 4 * chunk


def test_the_slots_are_in_the_memory() -> None:
    """Everything else that the states take leaves the device."""
    here, there = (memory_of_rank(job(8, 12, offload), 0) for offload in ({}, {"optimizer": 1}))
    contents = rank_contents(job(8, 12, {}), 0)
    first = first_elements(contents, sharding_of(job(8, 12, {}).strategy), tied=False)
    slots = update_slots(contents.total, first) * update_chunk(contents.total) * STATES_BYTES
    saved = contents.total * 10  # moments, and masters in two bytes; on the host they have four
    assert here.total - there.total == pytest.approx(saved - slots, rel=1e-3)
    assert there.host == pytest.approx(contents.total * STATES_BYTES)


def played_activations(one: Job, seconds_out: float, seconds_back: float) -> float:
    """Seconds that a step waits, if every layer but the last sends an equal part: the head waits for all, and a layer's
    backward pass for its own, which comes once the backward pass has reached the last layer."""
    contents = rank_contents(one, 0)
    compute, layers = rank_prediction(one, contents).compute, contents.layers
    in_layers = share_in_layers(one, contents)
    forward = compute.forward * in_layers / layers
    backward = (compute.input_gradient + compute.weight_gradient) * in_layers / layers
    waited = max(0.0, seconds_out - layers * forward)
    now = backward
    for number in range(layers - 1):
        now = max(now, (number + 1) * seconds_back / (layers - 1)) + backward
    return waited + now - layers * backward


@pytest.mark.parametrize("layers", [2, 4, 12])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("share", [0.25, 0.5, 1])
def test_a_step_waits_as_long_as_its_activations_take(batch: int, layers: int, share: float) -> None:
    one = job(batch, layers, {"activations": share})
    last = predict(one).last
    sent = {str(each.payload): each.cost.seconds for each in last.traffics if each.dimension == "offload"}
    out, back = (next(each for name, each in sent.items() if way in name) for way in ("to host", "from host"))
    assert last.exposed("offload") == pytest.approx(played_activations(one, out, back), rel=0.05, abs=1e-4)


@pytest.mark.parametrize("layers", [4, 12])
def test_weights_wait_for_what_states_wait_for(layers: int) -> None:
    """What a backward pass reads again comes while it is in other layers; the last layer's weights stay."""
    states = job(2, layers, {"optimizer": 1})
    strategy = {"microbatch": 2, "zero": 3, "offload": {"optimizer": 1, "weights": 1}}
    weights = Job.from_dict({**states.to_dict(), "strategy": strategy})
    assert predict(weights).last.exposed("offload") == pytest.approx(predict(states).last.exposed("offload"), rel=0.1)
    contents = rank_contents(weights, 0)
    again = [
        each.size_bytes
        for each in predict(weights).last.traffics
        if each.dimension == "offload" and str(each.payload).startswith("weights from host")
    ]
    assert again == [pytest.approx(4 * contents.layer_matrices * (1 - 1 / layers))]
