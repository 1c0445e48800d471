"""Whether a job fits: what a device has for a process, and the margin that follows from the error bar of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cost.builders import GPT, job, switched
from cost.jobs import valid_jobs
from effort import examples
from planner.cases import within
from shardwise.cost.analysis import analyze
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import fit_of, fit_probability, room_of
from shardwise.cost.step.verdict import fitting_change
from shardwise.planner.automatic import decided, smallest_offload
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec import presets
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.uncertainty.residuals import error_bar, memory_quantile

GIB = 2**30
PROPERTY = settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


def with_memory(memory: float, **fields: Any) -> Cluster:
    cluster = switched(8)
    return replace(cluster, device=replace(cluster.device, memory=memory, **fields))


def test_a_driver_keeps_some_of_the_memory() -> None:
    """PyTorch's out-of-memory messages name 79.11 GiB on an H100 of 80 GB (vllm-project/vllm issue 27508)."""
    device = presets.load("device", Device, "h100-sxm")
    assert device.memory == 80 * GIB
    assert device.usable_memory / GIB == pytest.approx(79.11, abs=0.01)
    for name in presets.names("device"):
        one = presets.load("device", Device, name)
        assert 0.95 * one.memory < one.usable_memory <= one.memory
    assert presets.load("device", Device, "cpu").driver_memory == 0


@pytest.mark.parametrize(("name", "seen"), [
    ("a100-80gb", 79.14), ("h200-sxm", 139.80), ("b200", 178.35), ("gb200", 184.31), ("b300", 267.69),
    ("gb300", 276.50), ("ascend-910b", 60.97), ("tpu-v4", 30.75), ("tpu-v5e", 15.75), ("tpu-v5p", 95.74),
    ("tpu-v6e", 31.25),
])  # fmt: skip
def test_usable_memory_is_what_frameworks_say_there_is(name: str, seen: float) -> None:
    """In GiB, from their out-of-memory messages; 139.80 was also measured (`torch.cuda.mem_get_info`)."""
    assert presets.load("device", Device, name).usable_memory / GIB == pytest.approx(seen, abs=0.01)


def test_a_driver_that_keeps_everything_is_refused() -> None:
    with pytest.raises(SpecError, match="driver_memory"):
        with_memory(GIB, driver_memory=float(GIB))


def test_the_margin_is_what_the_risk_asks() -> None:
    """With the prediction at the limit, tensors that exceed it by as much as that risk says just fill the device."""
    one = job(GPT, with_memory(80 * GIB, framework_memory=1.5 * GIB, driver_memory=1.0 * GIB), dp=8)
    for risk in (0.02, 0.05, 0.2):
        risky = replace(one, run=replace(one.run, memory_risk=risk))
        room, more = room_of(risky), memory_quantile(risky, risk)
        assert room.usable_bytes == 79 * GIB
        assert (room.planned_bytes - 1.5 * GIB) * max(1, more) + 1.5 * GIB == pytest.approx(room.usable_bytes)
    assert one.run.memory_risk == 0.05


def test_a_smaller_risk_leaves_more_free() -> None:
    one = job(GPT, with_memory(80 * GIB), dp=8)
    free = [
        room_of(replace(one, run=replace(one.run, memory_risk=risk))).margin_bytes for risk in (0.4, 0.1, 0.05, 0.01)
    ]
    assert free == sorted(free) and free[0] < free[-1]


@pytest.mark.parametrize("risk", [0.0, -0.1, 0.6, "5 GB"])
def test_a_risk_is_a_share_up_to_a_half(risk: Any) -> None:
    with pytest.raises(SpecError, match="memory_risk"):
        Job.from_dict({**FIELDS, "run": {"memory_risk": risk}})
    assert Job.from_dict({**FIELDS, "run": {"memory_risk": "7%"}}).run.memory_risk == pytest.approx(0.07)


def test_a_job_fits_with_the_probability_that_is_asked_of_plans() -> None:
    """The probability falls with what the job needs; what fits has at least the one asked for, what is tight less."""
    one = job(GPT, with_memory(80 * GIB), dp=8)
    room = room_of(one)
    sizes = [share * room.usable_bytes for share in (0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 2.0)]
    likely = [fit_probability(one, size) for size in sizes]
    assert likely == sorted(likely, reverse=True) and likely[0] >= 0.95 and likely[-1] < 0.5
    assert fit_probability(one, room.planned_bytes) >= 0.95 > fit_probability(one, room.planned_bytes + GIB)


def test_a_cap_takes_the_place_of_the_margin() -> None:
    one = job(GPT, with_memory(80 * GIB), dp=8)
    assert room_of(one, 10e9).planned_bytes == room_of(one, 10e9).usable_bytes == 10e9
    assert room_of(one, 1e15).planned_bytes == 80 * GIB


def test_fits_tight_and_not() -> None:
    needed = analyze(job(GPT, dp=8)).memory.total
    over, least = memory_quantile(job(GPT, dp=8), 0.05), 1 + error_bar(job(GPT, dp=8)).memory_low
    assert least < 1 < over
    for memory, fit in (
        (needed * over + 1, "fits"),
        (needed * over - 1, "tight"),
        (needed * least + 1, "tight"),
        (needed * least - 1, "does not fit"),
    ):
        one = job(GPT, with_memory(memory), dp=8)
        assert analyze(one).fit == fit_of(one) == fit
        assert analyze(one).fits == (fit != "does not fit")


FIELDS = {"model": "llama3-8b", "cluster": "dgx-h100:1", "training": {"global_batch": 64, "seq": 8192}}


def planned(memory_bytes: float | None = None) -> Plan:
    few = within(microbatch="1,2", schedule="1f1b", cp="1", recompute_layers="1")
    found = plan(Request(Job.from_dict(FIELDS), few, memory_bytes=memory_bytes, offload=False))
    assert isinstance(found, Plan)
    return found


def test_everybody_gives_the_same_answer() -> None:
    """What a plan, an automatic microbatch and the least offload choose is what `analyze` calls fitting."""
    strategy = {"dp": 8, "zero": 3, "recompute": "selective", "microbatch": "auto"}
    of_microbatch = decided(Job.from_dict({**FIELDS, "strategy": strategy}))
    larger = of_microbatch.with_strategy(microbatch=2 * of_microbatch.strategy.microbatch)
    assert analyze(larger).fit != "fits"
    longer = {**FIELDS, "training": {"global_batch": 64, "seq": 10240}}
    of_offload = smallest_offload(Job.from_dict({**longer, "strategy": {"dp": 8, "zero": 1}}))
    assert of_offload.strategy.offload.any
    for one in (*(each.job for each in planned().candidates), of_microbatch, of_offload):
        assert analyze(one).fit == "fits"


def test_the_first_choice_leaves_what_the_risk_asks() -> None:
    """The first choice used to leave 218 MiB of 80 GiB, of which a process never sees the last 0.9."""
    found, capped = planned(), planned(30e9)
    tensors = found.best.memory.total - found.best.memory.allowance
    assert found.left_bytes(found.best) >= tensors * (memory_quantile(found.best.job, 0.05) - 1) * (1 - 1e-9)
    assert found.fit_probability(found.best) >= 0.95
    assert found.left_bytes(found.best) == 79.11 * GIB - found.best.memory.total
    assert capped.left_bytes(capped.best) == 30e9 - capped.best.memory.total > 0


def half_the_margin(**run: Any) -> tuple[Plan, Candidate]:
    """A plan for devices that have half of the margin left for what would be fastest, and that strategy."""
    few = within(microbatch="1", schedule="1f1b", cp="1", pp="1", recompute_layers="1")
    job = Job.from_dict({**FIELDS, "run": run})
    roomy = replace(job.cluster, device=replace(job.cluster.device, memory=2000.0 * GIB))
    free = plan(Request(replace(job, cluster=roomy), few, offload=False))
    assert isinstance(free, Plan)
    tensors, device = free.fastest.memory.total - free.fastest.memory.allowance, job.cluster.device
    usable = device.framework_memory + tensors * (1 + memory_quantile(job, 0.05)) / 2
    short = replace(job.cluster, device=replace(device, memory=usable + device.driver_memory))
    found = plan(Request(replace(job, cluster=short), few, offload=False))
    assert isinstance(found, Plan)
    return found, free.fastest


def test_what_is_faster_but_tight_is_shown_beside_the_plan() -> None:
    """The tight ones are faster than all candidates and fit as predicted, but not with the margin."""
    found, fastest = half_the_margin()
    room = room_of(found.best.job)
    assert found.tight[0].job.strategy == fastest.job.strategy
    for one in found.tight:
        assert room.planned_bytes < one.memory.total <= room.usable_bytes
        assert one.seconds_per_token < found.fastest.seconds_per_token
        assert found.fit_probability(one) < 0.95
    assert not planned(30e9).tight


def test_what_is_not_planned_is_called_tight_if_it_may_fit() -> None:
    request = Request(Job.from_dict(FIELDS))
    room = request.room
    between = (room.planned_bytes + room.usable_bytes) / 2
    assert "tight, it fits with " in request.short_words(between)
    assert "tight" in request.short_words((room.usable_bytes + room.refused_bytes) / 2)
    assert "tight" not in request.short_words(room.refused_bytes + GIB)


@pytest.mark.slow
def test_accepting_more_risk_takes_them() -> None:
    likely = half_the_margin()[0].fit_probability(half_the_margin()[0].tight[0])
    found, fastest = half_the_margin(memory_risk=1 - likely)
    assert found.fastest.job.strategy == fastest.job.strategy
    assert found.best.job.run.memory_risk == pytest.approx(1 - likely)


@PROPERTY
@given(valid_jobs())
def test_a_change_that_is_said_to_fit_does(case: Job) -> None:
    """On devices with half of the memory that the job needs."""
    device = case.cluster.device
    needed = peak_memory(case).total - device.framework_memory
    small = replace(device, memory=device.framework_memory + device.driver_memory + needed / 2)
    short = replace(case, cluster=replace(case.cluster, device=small))
    assert analyze(short).fit == "does not fit"
    change = fitting_change(short)
    if change is not None:
        assert analyze(change.job).fit == "fits"
        assert change.memory.total == candidate(change.job).memory.total
