"""What a missing feature costs: named with its gain where that is more than noise, and `--any` lists just that."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cli.running import run
from planner.cases import job_of, within
from shardwise.planner.advice.explanation import not_run
from shardwise.planner.constraints import parse_constraints
from shardwise.planner.plan import Plan, plan, what_is_missing
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search

GIGABYTE = 1e9


def request(gigabytes: float) -> Request:
    """Muon's whole matrices rule out ZeRO-2 and 3, which would save recompute where memory is short."""
    job = job_of("llama3.2-1b", "dgx-h100:1", 64, seq=4096, optimizer="muon")
    narrow = within(microbatch="1", pp="1,2", cp="1", schedule="1f1b")
    return Request(job, narrow, memory_bytes=gigabytes * GIGABYTE)


def planned(asked: Request) -> Plan:
    found = plan(asked)
    assert isinstance(found, Plan)
    return found


def test_what_is_lacking_is_named_with_the_strategy_that_any_lists() -> None:
    found = planned(request(10))
    missing = not_run(found)
    assert missing is not None
    assert missing.lacks == "muon with zero-3"
    listed = planned(replace(request(10), any_priced=True))
    assert missing.best.job in [row.best.job for row in listed.rows]
    same = next(one for one in listed.candidates if one.job == missing.best.job)
    assert same.step_seconds == missing.best.step_seconds
    assert missing.best.seconds_per_token * (1 + found.noise.share) < found.fastest.seconds_per_token


@pytest.mark.parametrize("any_priced", [False, True])
def test_nothing_is_said_where_nothing_is_gained(any_priced: bool) -> None:
    assert not_run(planned(replace(request(10 if any_priced else 16), any_priced=any_priced))) is None


def test_where_nothing_runs_the_reason_is_named() -> None:
    wanted = request(16)
    constraints = wanted.constraints.with_allowed(parse_constraints("zero=3"))
    found = plan(replace(wanted, constraints=constraints))
    assert isinstance(found, Search)
    problem, remedy = what_is_missing(found, wanted)
    assert "muon with zero-3-kept: muon works on whole matrices" in problem and "⟨any_priced=true⟩" in remedy


@pytest.mark.slow
def test_the_command_says_it_in_one_line() -> None:
    command = "plan --model llama3.2-1b --cluster dgx-h100:1 --global-batch 64 --seq 4096 --optimizer muon"
    narrow = "--pp 1,2 --cp 1 --microbatch 1 --schedule 1f1b --max-memory 10GB --details --out -"
    result = run(*command.split(), *narrow.split())
    assert result.status == 0
    said = " ".join(result.out.split())
    assert re.search(
        r"Not run by this project's engine: muon with zero-3\. It would give [\d,]+ instead of [\d,]+ tokens/s", said
    )
    assert "--any shows it." in said
