"""A host's memory, cores and disk each bound what offload takes, and more of them is never slower."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import simulated_step, step_parts
from shardwise.cost.traffic.offload import host_topology
from shardwise.layout.stages import rank_contents
from shardwise.spec import Job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import UPDATE_BYTES, Cluster
from shardwise.spec.parameters import parameter_count

CLUSTERS = ("dgx-a100", "dgx-h100", "workstation-4090", "gb200-nvl72", "dgx-v100", "ethernet-cluster:2", "tpu-v5e")
STACKS = ("shardwise", "deepspeed", "torchtitan", "megatron-core", "colossalai")
CASES = 60


def drawn(dice: random.Random) -> Job:
    """A job with some offload, on one device of a node or on all."""
    while True:
        cluster = cluster_from(dice.choice(CLUSTERS))
        if cluster.levels[0].topology == "switch":
            cluster = cluster.with_devices(dice.choice((1, 2, 4, cluster.devices)))
        cluster = richer(cluster, dice.choice((1, 16)))["disks"]
        zero = dice.choice((0, 1, 2, 3))
        shares = {"optimizer": dice.choice((0.0, 0.25, 1.0)), "activations": dice.choice((0.0, 0.0, 0.5))}
        if zero == 3:
            shares["weights"] = dice.choice((0.0, 1.0, shares["optimizer"]))
        if zero >= 2:
            shares["gradients"] = dice.choice((0.0, shares["optimizer"]))
        each = dice.choice((1, 2, 8))
        data: dict[str, Any] = {
            "model": dice.choice(("gpt2-xl", "llama2-13b", "llama3-8b")),
            "cluster": cluster.to_dict(),
            "stack": dice.choice(STACKS),
            "strategy": {"dp": cluster.devices, "zero": zero, "offload": shares},
            "training": {"global_batch": each * cluster.devices, "seq": dice.choice((256, 2048)), "precision": "bf16"},
        }
        try:
            return Job.from_dict(data)
        except SpecError:
            continue


def seconds(job: Job) -> float:
    return simulated_step(predict(job)).step_seconds


def on(job: Job, cluster: Cluster) -> float:
    return seconds(job.unchecked(cluster=cluster))


def richer(cluster: Cluster, times: int = 2) -> dict[str, Cluster]:
    """The same cluster with more of one thing its hosts have."""
    host, first = cluster.host, cluster.storage[0]
    return {
        "memory bandwidth": replace(cluster, host=replace(host, memory_bandwidth=times * host.memory_bandwidth)),
        "cores": replace(cluster, host=replace(host, cores=times * host.cores)),
        "disks": replace(cluster, storage=(replace(first, count_per_node=times * first.count_per_node),)),
    }


def test_more_of_a_host_is_never_slower_and_its_disk_never_faster_than_its_memory() -> None:
    dice = random.Random(0)
    for _ in range(CASES):
        job = drawn(dice)
        offload = job.strategy.offload
        of_memory, of_disk = (job.with_strategy(offload=replace(offload, target=one)) for one in ("cpu", "nvme"))
        in_memory, on_disk = seconds(of_memory), seconds(of_disk)
        assert in_memory <= on_disk * (1 + 1e-9), job.to_dict()
        for name, cluster in richer(job.cluster).items():
            assert on(of_memory, cluster) <= in_memory * (1 + 1e-9), (name, of_memory.to_dict())
            assert on(of_disk, cluster) <= on_disk * (1 + 1e-9), (name, of_disk.to_dict())


@pytest.mark.parametrize("zero", (0, 3))
def test_an_update_on_the_host_takes_what_its_memory_takes(zero: int) -> None:
    """ZeRO-Offload's CPU-Adam: 10B parameters in 2.57 s on a DGX-2, whose memory has 256 GB/s."""
    cluster = cluster_from("dgx-a100").with_devices(1)
    cluster = replace(cluster, host=replace(cluster.host, memory_bandwidth=256e9, cores=48))
    data = {"model": "llama2-13b", "cluster": cluster.to_dict(), "stack": "deepspeed",
            "strategy": {"zero": zero, "offload": {"optimizer": 1}},
            "training": {"global_batch": 8, "seq": 2048, "precision": "bf16"}}  # fmt: skip
    job = Job.from_dict(data)
    update = step_parts(simulated_step(predict(job)))["optimizer"]
    assert update == pytest.approx(0.257e-9 * parameter_count(job.model), rel=0.05)
    assert update > UPDATE_BYTES * parameter_count(job.model) / cluster.host.memory_bandwidth
    few = replace(cluster, host=replace(cluster.host, cores=2))
    slow = step_parts(simulated_step(predict(job.unchecked(cluster=few))))["optimizer"]
    assert slow > rank_contents(job, 0).total / (2 * few.host.core_updates) > update


def test_no_link_is_faster_than_its_share_of_host_memory() -> None:
    cluster = cluster_from("dgx-h100")
    narrow = replace(cluster, host=replace(cluster.host, memory_bandwidth=80e9, copied=1.0))
    one_way, both_ways = (host_topology(narrow, "cpu", both_ways=both).levels[0].bandwidth for both in (False, True))
    assert (one_way, both_ways) == (10e9, 5e9)
    assert host_topology(narrow, "nvme").levels[0].bandwidth == min(5e9, narrow.disk_share(out=False))
