"""For every model and every cluster of the catalogue there is a plan, or a line that says what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from planner.cases import job_of, within
from shardwise.cost.memory.device import peak_memory
from shardwise.planner.constraints import Allowed
from shardwise.planner.plan import Plan, plan, what_is_missing
from shardwise.planner.request import Request
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.model import Model

PAIRS = [(model, cluster) for model in presets.names("model") for cluster in presets.names("cluster")]
SAMPLE = Random(5).sample(PAIRS, 12)


def request_of(model_name: str, cluster: str | Cluster) -> Request:
    """Few choices: what takes time is the number of layouts, which stay all."""
    constraints = within(microbatch="1", schedule="1f1b", zero="1,3", recompute="full", order="tp-cp-dp-pp",
                         context_method="all-gather", sequence_parallel="true", stage_layers="even,balanced",
                         keep_parameters="false")  # fmt: skip
    constraints = constraints.with_allowed({"recompute_layers": Allowed((None,)), "shard_group": Allowed((None,))})
    model = presets.load("model", Model, model_name)
    if model.moe:
        constraints = constraints.with_allowed({"expert_tp": Allowed((1,)), "ep": Allowed((1, 8))})
    return Request(job_of(model, cluster_from(cluster), "4M-tokens", seq=min(model.max_seq, 4096)), constraints)


def check(model: str, cluster: str) -> None:
    request = request_of(model, cluster)
    found = plan(request)
    if isinstance(found, Plan):
        assert peak_memory(found.best.job).total <= request.capacity_bytes
        assert 0 < found.best.mfu < 1
        return
    problem, remedy = what_is_missing(found, request)
    assert problem.startswith("nothing fits") and "\n" not in problem + remedy
    assert re.search(r"needs? [\d.,]+ [KMGTP]?i?B", problem), problem
    assert re.search(r"use [\d,]+ devices|devices with [\d.,]+ [KMGTP]?i?B|more devices", remedy), remedy


@pytest.mark.parametrize("cluster", presets.names("cluster"))
def test_every_cluster_has_a_plan_for_a_model_that_fits_it(cluster: str) -> None:
    assert isinstance(plan(request_of("gpt2", cluster)), Plan)


@pytest.mark.parametrize("device", presets.names("device"))
def test_every_device_has_a_plan(device: str) -> None:
    pair = replace(cluster_from("workstation-3090"), device=presets.load("device", Device, device))
    assert isinstance(plan(request_of("gpt2", pair)), Plan)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("model", "cluster"), SAMPLE)
def test_a_pair_has_a_plan_or_a_reason(model: str, cluster: str) -> None:
    check(model, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("model", presets.names("model"))
def test_a_model_has_a_plan_or_a_reason_on_every_cluster(model: str) -> None:
    for cluster in presets.names("cluster"):
        check(model, cluster)
