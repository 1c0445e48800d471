"""More memory, bandwidth, FLOP/s or devices never make the fastest plan slower, beyond noise; nor does offload.

Where more devices have to wait for a slower network at the same batch, the plan names the part that is faster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from effort import examples
from shardwise.planner.advice.what_if import faster_part
from shardwise.planner.constraints import OFFLOADS, Allowed, Constraints
from shardwise.planner.plan import Plan, plan, searched
from shardwise.planner.request import Request
from shardwise.planner.search.search import PricedStrategy
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.training import Training
from shardwise.uncertainty.residuals import noise_of

CLUSTERS = ("workstation-4090", "workstation-3090", "dgx-a100-40gb", "dgx-a100", "dgx-h100", "ethernet-cluster",
            "dgx-v100", "mi300x-node", "h100-pcie-server", "hgx-a800", "over-the-internet", "dgx-b200")  # fmt: skip
MODELS = ("llama3.2-1b", "llama3.2-3b", "llama2-7b", "llama3-8b", "llama2-13b", "mixtral-8x7b", "llama2-70b")
# Few values of what multiplies a space; what recompute and offload free memory for is left in.
FEW: dict[str, tuple[object, ...]] = {
    "microbatch": (1, 4),
    "cp": (1,),
    "schedule": ("1f1b",),
    "recompute": ("none", "full"),
    "sequence_parallel": (True,),
    "zero": (0, 3),
    "keep_parameters": (False,),
    "offload": tuple(OFFLOADS[name] for name in ("none", "optimizer", "states", "activations")),
}


def request(model: str, cluster: Cluster, batch: int, seq: int, *, few: bool) -> Request:
    allowed = {name: Allowed(values) for name, values in FEW.items()} if few else {}
    job = Job(model=model, cluster=cluster)  # type: ignore[arg-type]
    training = Training(global_batch=batch, seq=seq, precision="bf16")
    return Request(job.unchecked(training=training), constraints=Constraints().with_allowed(allowed))


def richer(cluster: Cluster, times: float) -> Iterator[tuple[str, Cluster]]:
    """The cluster with more of one thing."""
    device, link, host = cluster.device, cluster.host_link, cluster.host
    assert link is not None and cluster.host_memory is not None
    peak = {name: times * rate for name, rate in device.peak.items()}
    yield "memory", replace(cluster, device=replace(device, memory=times * device.memory))
    yield "FLOP/s", replace(cluster, device=replace(device, peak=peak))
    yield "memory bandwidth", replace(cluster, device=replace(device, memory_bandwidth=times * device.memory_bandwidth))
    for index, level in enumerate(cluster.levels):
        if level.width > 1:
            faster = level.with_speed(times * level.bandwidth_per_direction, level.wire_latency)
            yield f"bandwidth of level {index}", cluster.with_level(index, faster)
    yield "host link", replace(cluster, host_link=replace(link, bandwidth=times * link.bandwidth))
    yield "host bandwidth", replace(cluster, host=replace(host, memory_bandwidth=times * host.memory_bandwidth))
    yield "host memory", replace(cluster, host_memory=times * cluster.host_memory)


def doubled(cluster: Cluster, index: int) -> Cluster:
    """Twice the devices: larger nodes, or more of them."""
    level = cluster.levels[index]
    return cluster.with_level(index, replace(level, size=2 * level.width))


def fastest(asked: Request) -> PricedStrategy | None:
    found, _ = searched(asked.started())
    return found.best[0] if found.best else None


def names_a_faster_part(asked: Request, on_more: Request) -> bool:
    """Of the plan on a larger cluster; fails if it is slower than on the other and names none."""
    before, after = plan(asked), plan(on_more)
    assert isinstance(before, Plan) and isinstance(after, Plan)
    part = faster_part(after)
    best = after.fastest if part is None else part.best
    told = (on_more.job.model.name, on_more.job.cluster.name, on_more.job.training, before.best.job.strategy, part)
    assert best.seconds_per_token <= before.fastest.seconds_per_token * (1 + after.noise.share), told
    return part is not None


def check_pairs(seed: int, pairs: int, *, few: bool) -> None:
    dice, done = random.Random(seed), 0
    while done < pairs:
        cluster = cluster_from(dice.choice(CLUSTERS)).with_devices(1 if few else dice.choice((1, 2)))
        if dice.random() < 0.5:
            cluster = doubled(cluster, dice.randrange(len(cluster.levels)))
        model, seq, batch = dice.choice(MODELS), dice.choice((512, 2048, 4096)), dice.choice((16, 64, 256))
        asked = request(model, cluster, batch, seq, few=few)
        before, limit = fastest(asked), 1 + noise_of(asked.job).share
        if before is None:
            continue
        larger = doubled(cluster, dice.randrange(len(cluster.levels)))
        others = [(what, asked.on(more)) for what, more in richer(cluster, dice.choice((1.25, 1.5, 2.0, 4.0)))]
        others += [
            ("devices", asked.on(larger)),
            ("devices and batch", request(model, larger, 2 * batch, seq, few=few)),
        ]
        for what, other in others:
            after, done = fastest(other), done + 1
            told = (model, cluster.name, [level.width for level in cluster.levels], batch, seq, what, before.strategy())
            assert after is not None, told
            if after.seconds_per_sequence > before.seconds_per_sequence * limit:
                assert what.startswith("devices"), (told, after.strategy())
                names_a_faster_part(asked, other)


def test_more_devices_behind_a_slow_network_are_left_out() -> None:
    """Two nodes of two cards, one pipeline: 10 Gb/s for the gradients of embeddings that both ends hold."""
    node = cluster_from("workstation-4090").with_devices(2)
    asked = request("llama3.2-1b", node, 16, 512, few=True)
    assert names_a_faster_part(asked, asked.on(doubled(node, 1)))


def test_more_of_a_machine_is_not_slower() -> None:
    check_pairs(0, examples(160), few=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_more_of_a_machine_is_not_slower_thoroughly(seed: int) -> None:
    """Two seeds in whole spaces, which take ten times as long."""
    check_pairs(seed, 250, few=seed > 2)


@pytest.mark.slow
def test_a_plan_that_fits_is_not_slower_than_one_that_has_to_offload() -> None:
    """Of the ranked plans: the first is within noise of the fastest."""
    cluster = cluster_from("ethernet-cluster").with_devices(2)
    tight, wide = (
        plan(request("llama3-8b", one, 256, 2048, few=False)) for one in (cluster, dict(richer(cluster, 1.5))["memory"])
    )
    assert isinstance(tight, Plan) and isinstance(wide, Plan)
    assert tight.best.job.strategy.offload.any
    assert wide.best.step_seconds <= tight.best.step_seconds * (1 + wide.noise.share)
