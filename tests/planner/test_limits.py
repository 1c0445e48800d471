"""A search ends: numbers that no job has are refused before it, and a limit of time gives the best so far."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.running import run
from planner.cases import job_of, within
from shardwise.planner import deadline
from shardwise.planner.plan import Plan, plan, required
from shardwise.planner.request import Request
from shardwise.spec import Job
from shardwise.spec.errors import SpecError

ABSURD = 9007199254740993
FIELDS = ["model.layers", "model.hidden", "model.heads", "model.ffn", "model.vocab", "model.max_seq", "model.kv_heads",
          "model.head_dim", "model.mtp_layers", "model.moe.experts", "model.moe.ffn", "model.mla.kv_rank",
          "training.seq", "training.global_batch", "strategy.tp", "strategy.microbatch", "strategy.ep"]  # fmt: skip


@pytest.mark.parametrize("path", FIELDS)
def test_what_no_job_has_is_refused_by_its_field(path: str) -> None:
    fields: dict[str, Any] = Job.from_dict({"model": "tiny-mla", "cluster": "laptop:1"}).to_dict()
    fields["model"] = job_of("tiny-mla", "laptop:1", 1).model.to_dict()
    *parents, last = path.split(".")
    place = fields
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = ABSURD
    with pytest.raises(SpecError, match="is above") as caught:
        Job.from_dict(fields)
    assert caught.value.field == path and caught.value.remedy.startswith("use ")


def test_the_command_says_so_at_once(tmp_path: Path) -> None:
    example = (Path(__file__).parents[2] / "examples" / "deepseek-v3-hgx-h800.yaml").read_text(encoding="utf-8")
    job = tmp_path / "job.yaml"
    job.write_text(example.replace("seq: 4096", f"seq: {ABSURD}"), encoding="utf-8")
    for verb in ("plan --output -", "analyze", "dryrun"):
        found = run(*verb.split(), str(job))
        assert found.status == 2 and len(found.err.strip().splitlines()) == 1
        assert f"training.seq: {ABSURD} is above" in found.err


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_a_search_that_takes_too_long_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(job_of("llama3-8b", "dgx-h100:2", 64), within(cp="1", schedule="1f1b", recompute="none"))
    whole = plan(request)
    assert isinstance(whole, Plan) and not whole.search.was_stopped
    monkeypatch.setattr(deadline.time, "process_time", Clock())
    part = plan(replace(request, time_limit_seconds=12.0))
    assert isinstance(part, Plan) and part.search.was_stopped
    assert 0 < part.search.priced < whole.search.priced


def test_where_there_was_no_time_to_find_anything_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(job_of("llama3-70b", "dgx-h100:1", 64), offload=False, time_limit_seconds=2.0)
    monkeypatch.setattr(deadline.time, "process_time", Clock())
    with pytest.raises(SpecError, match="in the 2 s that a search may take"):
        required(plan(request), request)


def test_the_command_takes_a_limit() -> None:
    command = "plan --model tiny --cluster laptop:2 --global-batch 4 --seq 64 --output - --json --time-limit"
    assert run(*command.split(), "0s").status == 2
    found = run(*command.split(), "10min")
    assert found.status == 0 and not any("stopped" in note for note in json.loads(found.out)["notes"])
