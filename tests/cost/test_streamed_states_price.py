"""What a step waits for offloaded states that the device updates: its price against chunks, slots and layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.memory.offload import first_elements, update_chunk, update_slots
from shardwise.cost.memory.states import sharding_of
from shardwise.cost.step.prediction import predict, rank_prediction
from shardwise.cost.traffic.offload import share_in_layers
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
