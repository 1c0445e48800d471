"""What no price may do, over random jobs of the whole catalogue: fall as work grows, or rise as hardware improves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest

from cost.jobs import with_faster_level
from cost.random_jobs import random_job
from shardwise.cost.analysis import analyze
from shardwise.cost.memory.states import rank_state_bytes
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Device
from shardwise.spec.job import Job
from shardwise.spec.stack import default_stack
from shardwise.uncertainty.residuals import error_bar

ROUNDING = 1 + 1e-9
# A pipeline rank hides under its passes, not under its idle time: passes that fill the idle time hide more at no cost.
# And its input gradients, for which others wait, last longer where shorter weight gradients hide less.
PIPELINED = 1.02
# NCCL runs more channels, on more compute units, on a faster network, also while it waits for latencies.
MORE_CHANNELS = 1.01
# A tensor-parallel collective hides beside its own matmul only, though the host may bound the pass that they are in.
BESIDE_ONE_MATMUL = 1.001
# So do keys and values that travel beside attention alone.
BESIDE_ATTENTION = 1.005
Pair = tuple[float, float]  # a figure that may not exceed the other


def seconds(job: Job) -> float:
    return analyze(job).predicted_seconds


def states(job: Job) -> float:
    sharding, optimizer = sharding_of(job.strategy), job.training.optimizer
    ranks = (rank_contents(job, rank) for rank in range(job.strategy.pp))
    return max(float(rank_state_bytes(one, sharding, job.recipe, optimizer)) for one in ranks)


def longer_sequences(job: Job, random: Random) -> Pair:
    return seconds(job), seconds(replace(job, training=replace(job.training, seq=job.training.seq * 2)))


def larger_microbatches(job: Job, random: Random) -> Pair:
    training = replace(job.training, global_batch=2 * job.sequences)
    strategy = replace(job.strategy, microbatch=2 * job.strategy.microbatch)
    return seconds(job), seconds(replace(job, strategy=strategy, training=training))


def larger_batch(job: Job, random: Random) -> Pair:
    return seconds(job), seconds(replace(job, training=replace(job.training, global_batch=2 * job.sequences)))


def a_faster_level(job: Job, random: Random) -> Pair:
    return seconds(with_faster_level(job, random.randrange(len(job.cluster.levels)))), seconds(job)


def _on(job: Job, device: Device) -> Job:
    return replace(job, cluster=replace(job.cluster, device=device))


def more_flops(job: Job, random: Random) -> Pair:
    device = job.cluster.device
    peak = FrozenMapping({name: 1.5 * rate for name, rate in device.peak.items()})
    return seconds(_on(job, replace(device, peak=peak))), seconds(job)


def more_memory_bandwidth(job: Job, random: Random) -> Pair:
    device = job.cluster.device
    return seconds(_on(job, replace(device, memory_bandwidth=1.5 * device.memory_bandwidth))), seconds(job)


def a_higher_stage_of_zero(job: Job, random: Random) -> Pair:
    zero = min(job.strategy.zero, 2)
    job = replace(job, stack=default_stack()) if random.random() < 0.5 else job
    whole_experts = job.model.moe and sharding_of(job.with_strategy(zero=1).strategy).expert_shards == 1
    if zero == 0 and job.stack.is_own and (job.strategy.offload.optimizer or whole_experts):
        # From ZeRO-1 on fp32 shards stay on the device; without it masters are 2 bytes, or go to the host.
        raise SpecError("strategy.zero", "is another way to keep master weights", "")
    less, more = (states(job.with_strategy(zero=stage)) for stage in (zero + 1, zero))
    return less, more


def less_recompute(job: Job, random: Random) -> Pair:
    if job.strategy.offload.activations:  # what is kept would be offloaded
        raise SpecError("strategy.offload", "moves more with less recompute", "")
    full = job.with_strategy(recompute="full")
    return seconds(full.with_strategy(recompute="none")), seconds(full)


def floor_and_bar(job: Job, random: Random) -> Pair:
    found, bar = analyze(job), error_bar(job)
    low = found.step.low_seconds(bar.time_low)
    assert low <= found.predicted_seconds <= found.predicted_seconds * (1 + bar.time_high)
    return found.floor_seconds, low


PROPERTIES: Mapping[str, Callable[[Job, Random], Pair]] = {
    one.__name__: one
    for one in (longer_sequences, larger_microbatches, larger_batch, a_faster_level, more_flops, more_memory_bandwidth,
                a_higher_stage_of_zero, less_recompute, floor_and_bar)
}  # fmt: skip
OVERLAPPED = ("larger_microbatches", "a_faster_level", "more_flops", "more_memory_bandwidth", "less_recompute")


def slack(name: str, job: Job) -> float:
    if name in OVERLAPPED and job.strategy.pp > 1:
        return PIPELINED
    if name == "more_flops" and job.strategy.tp > 1:
        return BESIDE_ONE_MATMUL
    if name == "more_flops" and job.strategy.cp > 1:
        return BESIDE_ATTENTION
    return MORE_CHANNELS if name == "a_faster_level" else ROUNDING


def check(name: str, pairs: int, seed: str) -> None:
    random, checked = Random(f"{name} {seed}"), 0
    while checked < pairs:
        job = random_job(random)
        try:
            less, more = PROPERTIES[name](job, random)
        except SpecError:  # no such job
            continue
        checked += 1
        assert less <= more * slack(name, job), f"{less / more - 1:+.4%} in\n{job.to_yaml()}"


@pytest.mark.parametrize("name", PROPERTIES)
def test_no_price_goes_the_wrong_way(name: str) -> None:
    check(name, 23, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_no_price_goes_the_wrong_way_in_many_jobs(name: str) -> None:
    check(name, 250, "many")
