"""Why not another strategy: the constraint or the loss that is named is the one that trying everything finds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

import pytest

from planner.cases import SHARDINGS, every_job, fits, narrow_request, narrow_values, runs, why_not
from planner.test_offers import keeps_to
from shardwise.cost.memory.device import peak_memory
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.constraints import Allowed, allowed
from shardwise.planner.plan import Plan, plan
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes

REQUEST = narrow_request("llama3.2-1b", cluster_from("dgx-h100:1").with_devices(4), 16, 2048, memory_bytes=13e9)
WISHES = {
    "tp": ("1", "2", "4", "3", "8", "2..4"),
    "cp": ("1", "2", "4"),
    "pp": ("1", "2", "4", "3"),
    "dp": ("1", "2", "4", "3"),
    "zero": ("0", "1", "2", "3", "..1"),
    "schedule": ("1f1b", "interleaved", "zbv", "gpipe"),
    "recompute": ("none", "full", "selective"),
    "microbatch": ("1", "2", "4"),
    "sequence_parallel": ("true", "false"),
    "keep_parameters": ("true", "false"),
    "accumulate": ("local", "sharded"),
    "context_method": ("ring", "all-gather"),
}
CHOSEN = (
    {"tp": "4", "pp": "2"},
    {"schedule": "zbv", "zero": "3", "keep_parameters": "false"},
    {"tp": "1", "cp": "1", "pp": "1", "zero": "0"},
    {"cp": "2"},
    {"tp": "4"},
    {"accumulate": "local", "zero": "2"},
    {"recompute": "selective"},
    {"tp": "4", "zero": "1..3"},
    {"tp": "4", "keep_parameters": "true"},
)


def drawn(seed: int) -> dict[str, str]:
    """A wish for one to three fields."""
    random = Random(seed)
    names = random.sample(sorted(WISHES), random.choice((1, 2, 2, 3)))
    return {name: random.choice(WISHES[name]) for name in names}


ALL = (*CHOSEN, *(drawn(seed) for seed in range(20)))


@cache
def planned() -> Plan:
    found = plan(REQUEST)
    assert isinstance(found, Plan)
    return found


@cache
def simulated(strategy: Strategy) -> Candidate:
    return candidate(REQUEST.job.unchecked(strategy=strategy))


def tried(wish: Mapping[str, Allowed]) -> list[Job]:
    """Every job of the request's space that has the wanted values, wherever they make a difference."""
    values: dict[str, tuple[Any, ...]] = narrow_values(REQUEST)
    asked = REQUEST.constraints.allowed
    for name, one in wish.items():
        if name in values and one.values is not None:
            wanted = tuple(value for value in one.values if name not in asked or value in asked[name])
            idle = {"sequence_parallel": (True,), "context_method": ("ring",)}.get(name, ())
            values[name] = tuple(dict.fromkeys((*wanted, *idle)))
    # To wish for kept parameters or another accumulation is to wish for the ZeRO stage that has them.
    named = ((2, False, "local"), (3, False, "local")) if "accumulate" in wish else ()
    fields = [name for name in ("zero", "keep_parameters", "accumulate") if name in wish]
    values["sharding"] = tuple(
        one
        for one in (*SHARDINGS, *named)
        if all(dict(zip(("zero", "keep_parameters", "accumulate"), one))[name] in wish[name] for name in fields)
    )
    return [job for job in every_job(REQUEST, values) if keeps_to(job.strategy, wish)]


@pytest.mark.quick(4)
@pytest.mark.parametrize("texts", ALL, ids=lambda texts: ",".join(f"{name}={text}" for name, text in texts.items()))
def test_the_verdict_is_that_of_trying_everything(texts: dict[str, str]) -> None:
    wish = {name: allowed(name, text) for name, text in texts.items()}
    every = tried(wish)
    running = [job for job in every if runs(REQUEST, job)]
    fitting = [job for job in running if fits(REQUEST, job)]
    answer = why_not(planned(), wish)
    if not every:
        assert answer.verdict == "does not divide"
    elif not running:
        assert answer.verdict == "not supported"
    elif not fitting:
        assert answer.verdict == "does not fit"
        assert readable_bytes(min(peak_memory(job).total for job in running)) in answer.reason
    else:
        assert answer.verdict in ("within noise", "slower", "the plan itself")
        assert answer.best is not None and answer.loss is not None
        assert keeps_to(answer.best.job.strategy, wish)
        best, first = min(simulated(job.strategy).seconds_per_token for job in fitting), planned().best
        # Where noise does not tell it from the fastest, the simplest counts as the best.
        limit = (
            best
            if answer.verdict == "slower"
            else planned().fastest.seconds_per_token * (1 + planned().noise.share + 0.0005)
        )
        assert best <= answer.best.seconds_per_token * (1 + 1e-12) <= limit * (1 + 1e-9)
        assert answer.loss == planned().loss_of(answer.best)
        assert (answer.verdict == "the plan itself") == (answer.best.job.strategy == first.job.strategy)
    assert "\n" not in answer.reason


VERDICTS = ("does not divide", "not supported", "does not fit", "within noise", "slower")


@pytest.mark.parametrize(("texts", "verdict"), list(zip(CHOSEN, VERDICTS)))
def test_every_verdict_occurs(texts: dict[str, str], verdict: str) -> None:
    assert why_not(planned(), {name: allowed(name, text) for name, text in texts.items()}).verdict == verdict


def test_a_wish_that_the_request_forbids_says_so() -> None:
    answer = why_not(planned(), {"recompute": Allowed(("selective",))})
    assert answer.verdict == "does not divide"
    assert "the request rules it out" in answer.reason
