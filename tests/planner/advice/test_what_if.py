"""Another machine: the plan on a changed cluster is that on the same cluster written down by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from planner.cases import MODELS, job_of, within
from shardwise.planner.advice.what_if import changed_cluster, what_if
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster

DEVICE = {
    "peak": {"bf16": 1e14},
    "memory": 4e7,
    "memory_bandwidth": 1e12,
    "framework_memory": 0,
    "units_taken": {"collectives": 0.2},
}


def written(**changes: Any) -> Cluster:
    """Sixteen devices: 4 on fast links in each of 4 nodes, a slow network between."""
    device = {**DEVICE, **changes.pop("device", {})}
    inner = {"name": "nvlink", "size": 4, "bandwidth": 1e11, "latency": 1e-6, **changes.pop("nvlink", {})}
    outer = {"name": "infiniband", "size": 4, "bandwidth": 2e9, "latency": 5e-6, **changes.pop("infiniband", {})}
    host = {"host_memory": 8e8, "host_link": {"bandwidth": 1e10, "latency": 1e-6}}
    return Cluster.from_dict({"device": device, "levels": [inner, outer], **host, **changes})


def request_on(cluster: Cluster) -> Request:
    constraints = within(microbatch="1,2", recompute="none,full", pp="1", cp="1", zero="0,1,3", shard_group="all")
    return Request(job_of(MODELS["dense"], cluster, 64, seq=2048), constraints)


@cache
def after(change: str) -> Plan:
    found = what_if(request_on(written()), change).result if change else plan(request_on(written()))
    assert isinstance(found, Plan)
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "ib=400Gb/s": {"infiniband": {"bandwidth": 50e9}},
    "network=1GB/s": {"infiniband": {"bandwidth": 1e9}},
    "nvlink=20GB/s": {"nvlink": {"bandwidth": 20e9}},
    "infiniband-latency=1ms": {"infiniband": {"latency": 1e-3}},
    "memory=16MB": {"device": {"memory": 16e6}},
    "memory=400MB": {"device": {"memory": 4e8}},
    "nvlink-size=16": {"nvlink": {"size": 16}, "infiniband": {"size": 1}},
    "nvlink-size=2": {"nvlink": {"size": 2}, "infiniband": {"size": 8}},
    "sm-free": {"device": {"units_taken": {}}},
    "host-memory=1MB": {"host_memory": 1e6},
    "ib=400Gb/s, memory=400MB": {"infiniband": {"bandwidth": 50e9}, "device": {"memory": 4e8}},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_the_plan_of_the_changed_machine(change: str) -> None:
    found, by_hand = after(change), plan(request_on(written(**CHANGES[change])))
    assert isinstance(by_hand, Plan)
    assert found.best.job.strategy == by_hand.best.job.strategy
    assert found.best.memory == by_hand.best.memory
    assert [one.step_seconds for one in found.candidates] == [one.step_seconds for one in by_hand.candidates]
    assert (found.search.priced, found.search.too_large) == (by_hand.search.priced, by_hand.search.too_large)


@pytest.mark.parametrize(
    ("change", "faster"),
    [("ib=400Gb/s", True), ("network=1GB/s", False), ("memory=16MB", False), ("memory=400MB", True), ("sm-free", True)],
)
def test_a_better_machine_has_a_faster_plan(change: str, faster: bool) -> None:
    assert (after(change).best.step_seconds < after("").best.step_seconds) == faster


def test_a_device_is_that_of_the_catalogue() -> None:
    changed = changed_cluster(cluster_from("dgx-h100:2"), "device=b200")
    assert changed.device == cluster_from("dgx-b200:2").device
    assert changed.levels == cluster_from("dgx-h100:2").levels


def test_what_large_messages_reach_of_a_link_stays() -> None:
    before, changed = cluster_from("dgx-h100:2"), changed_cluster(cluster_from("dgx-h100:2"), "ib=800Gb/s")
    assert changed.levels[1].reached_share == before.levels[1].reached_share
    assert changed.levels[1].bandwidth_per_direction == 100e9


@pytest.mark.parametrize(
    "change",
    ["", "faster", "memory=", "memory=much", "ethernet=1GB/s", "nvlink-size=3", "infiniband-size=2", "device=h1000",
     "nvlink-colour=red", "sm-free=1", "memory=-1GB"],
)  # fmt: skip
def test_what_cannot_be_changed_is_refused_in_one_line(change: str) -> None:
    with pytest.raises(SpecError) as caught:
        changed_cluster(written(), change)
    assert "\n" not in str(caught.value)


def test_a_torus_has_no_size_to_change() -> None:
    with pytest.raises(SpecError):
        changed_cluster(cluster_from("tpu-v5p:4x2x2"), "ici-size=4")
