"""Whatever the planner offers runs, fits and keeps to what was asked for; and its seconds add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from planner.cases import MODELS, NETWORKS, host_room, job_of
from shardwise.cost.memory.device import memory_of_rank
from shardwise.cost.step.stage_time import optimizer_seconds
from shardwise.layout.sharding import sharding_of
from shardwise.planner.candidate import PARTS, Candidate
from shardwise.planner.constraints import Allowed, Constraints, allowed, field_value, parse_constraints
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict

SEEDS = [4, 7, 9, 12, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (5, 8, 11, 13))]
TEXTS = {
    "tp": ("1,2", "2..4", "..2", "4"),
    "cp": ("1", "2", "1,2"),
    "pp": ("1,2", "2..", "..4", "4"),
    "dp": ("2..", "..8"),
    "zero": ("1..2", "0,1", "3", "1..3"),
    "schedule": ("1f1b,gpipe", "zbv,dualpipev,interleaved", "interleaved,zb-h1"),
    "recompute": ("none", "selective,full", "none,full"),
    "recompute_layers": ("1", "..2"),
    "interleave": ("1,2", "2..4", "2"),
    "shard_group": ("all", "2..4", "2"),
    "keep_parameters": ("true", "false"),
    "accumulate": ("local", "sharded"),
    "sequence_parallel": ("true", "false"),
    "context_method": ("all-gather,ulysses", "ring"),
    "order": ("tp-cp-pp-dp", "tp-cp-dp-pp"),
    "stage_layers": ("even", "balanced"),
}
EXCLUDED = ("tp=4", "zero=3", "schedule=zbv,recompute=full", "pp=2,zero=2", "microbatch=1,tp=2", "recompute=none",
            "zero=1,shard_group=2", "offload=activations", "offload=optimizer,recompute=full", "dp=4,schedule=1f1b",
            "keep_parameters=true,accumulate=local", "context_method=ring,zero=0", "pp=1,zero=0")  # fmt: skip
# Where a field makes a difference.
MATTERS = {
    "sequence_parallel": lambda s: s.tp > 1,
    "context_method": lambda s: s.cp > 1,
    "schedule": lambda s: s.pp > 1,
    "interleave": lambda s: s.pp > 1,
    "stage_layers": lambda s: s.pp > 1,
    "recompute_layers": lambda s: s.recompute == "full",
    "shard_group": lambda s: s.zero > 0,
    "keep_parameters": lambda s: s.zero == 3,
    "accumulate": lambda s: s.zero > 1,
    "order": lambda s: s.pp > 1 and s.data_parallel > 1,
}
# To ask for one of these is to ask for what it acts on: a schedule for a pipeline, a shard group for ZeRO.
DEMANDING = ("schedule", "interleave", "shard_group", "keep_parameters", "accumulate")


def drawn(seed: int) -> Request:
    """A random request on 16 devices, with so little memory that much does not fit."""
    random = Random(seed)
    cluster, model = random.choice(list(NETWORKS.values())), random.choice(list(MODELS.values()))
    device = replace(cluster.device, memory=2.0 ** random.uniform(22, 25), framework_memory=0.0, driver_memory=0.0)
    cluster = replace(cluster, device=device, host_memory=2.0 ** random.uniform(24, 28))
    minimum = random.choice((None, None, 24))
    batch: Any = None if minimum else random.choice((48, 64, 96, "512k-tokens"))
    job = job_of(model, cluster, batch, seq=2048, optimizer=random.choice(("adamw", "adamw", "muon")))
    texts = {name: random.choice(TEXTS[name]) for name in random.sample(sorted(TEXTS), 2)}
    experts = {"ep": "1,4", "tp": "1,4"} if model.moe else {}
    texts = {"microbatch": random.choice(("1", "2..4", "1,8")), **experts, **texts}
    return Request(
        job,
        Constraints(
            {name: allowed(name, text) for name, text in texts.items()},
            tuple(parse_constraints(text) for text in random.sample(EXCLUDED, 2)),
        ),
        minimum,
        random.choice((None, device.memory / 2)),
        random.choice((None, None, True, False)),
        random.random() < 0.3,
    )


def has(strategy: Strategy, name: str, values: Allowed) -> bool:
    """Whether a field has one of the values; a shard group of all ranks has two names."""
    own = {
        field_value(strategy, name),
        strategy.sharding_group if name == "shard_group" else field_value(strategy, name),
    }
    return any(value in values for value in own)


def matters(strategy: Strategy, name: str) -> bool:
    return name not in MATTERS or MATTERS[name](strategy)


def keeps_to(strategy: Strategy, wish: Mapping[str, Allowed]) -> bool:
    return all(
        has(strategy, name, values) or (name not in DEMANDING and not matters(strategy, name))
        for name, values in wish.items()
    )


def matches(strategy: Strategy, entry: Mapping[str, Allowed]) -> bool:
    """Whether all fields of ``entry`` make a difference and have one of its values."""
    return all(matters(strategy, name) and has(strategy, name, values) for name, values in entry.items())


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_offered_is_what_was_asked_for(seed: int) -> None:
    request = drawn(seed)
    found = plan(request)
    assert isinstance(found, Plan)
    assert found.search.too_large > 0
    for one in (*found.candidates, *found.front):
        check_that_it_runs(request, one)
        check_that_it_keeps_to(request, one)
        check_its_parts(one)
    check_the_first(found)


def check_that_it_runs(request: Request, one: Candidate) -> None:
    memories = [memory_of_rank(one.job, rank) for rank in range(one.job.strategy.pp)]
    assert max(memory.total for memory in memories) <= request.capacity_bytes
    assert max(memory.host for memory in memories) <= host_room(one.job.cluster)
    assert verdict(one.job).status in (("runs", "priced only") if request.offers_priced else ("runs",))


def check_that_it_keeps_to(request: Request, one: Candidate) -> None:
    strategy, batch = one.job.strategy, request.job.training.global_batch
    assert keeps_to(strategy, request.constraints.allowed)
    assert not any(matches(strategy, entry) for entry in request.constraints.excluded)
    assert request.offload is not False or not strategy.offload.any
    if request.minimum_batch is not None:
        assert request.minimum_batch <= one.job.sequences <= 2 * request.minimum_batch
    elif isinstance(batch, int):
        assert one.job.sequences == batch
    else:
        assert one.job.tokens_per_step == pytest.approx(512_000, rel=0.05)


def check_its_parts(one: Candidate) -> None:
    """They add up, and none is below zero; what is sent once a step is a part of its dimension."""
    step = one.step_seconds
    assert tuple(one.parts) == PARTS
    assert sum(one.parts.values()) == pytest.approx(step, rel=1e-9)
    for name, seconds in one.parts.items():
        assert seconds >= -1e-9 * step, name
    if len(one.prediction.ranks) == 1:
        (rank,) = one.prediction.ranks
        own = float(optimizer_seconds(one.job, rank.contents, sharding_of(one.job.strategy)))
        assert one.parts["optimizer"] == pytest.approx(own, rel=1e-6, abs=1e-9 * step)
        assert one.parts["bubble"] == pytest.approx(0.0, abs=1e-9 * step)


def check_the_first(found: Plan) -> None:
    """It has the fewest dimensions of those that noise does not tell from the fastest."""
    fastest = min(one.seconds_per_token for one in found.candidates)
    near = [one for one in found.candidates if one.seconds_per_token <= (1 + found.noise.share) * fastest]
    assert found.best in near
    assert len(found.best.dimensions) == min(len(one.dimensions) for one in near)
