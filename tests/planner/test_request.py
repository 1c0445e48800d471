"""A search ends: numbers that no job has are refused before it, and a limit of time gives the best so far."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.running import run, strict_json
from planner.cases import job_of, within
from shardwise.planner.plan import Plan, plan, required
from shardwise.planner.request import Deadline, Request
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
    for verb in ("plan --out -", "analyze", "dryrun"):
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
    monkeypatch.setattr(time, "process_time", Clock())
    part = plan(replace(request, time_limit_seconds=12.0))
    assert isinstance(part, Plan) and part.search.was_stopped
    assert 0 < part.search.priced < whole.search.priced


def test_where_there_was_no_time_to_find_anything_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(job_of("llama3-70b", "dgx-h100:1", 64), offload=False, time_limit_seconds=2.0)
    monkeypatch.setattr(time, "process_time", Clock())
    with pytest.raises(SpecError, match="within the time limit of 2 s"):
        required(plan(request), request)


def test_one_limit_holds_for_all_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is no time for is left out and named; the plan is there."""
    command = "plan --model tiny --cluster laptop:2 --global-batch 4 --seq 64 --out - --json --pp 1 --time-limit 6s"
    clock = Clock()
    monkeypatch.setattr(time, "process_time", clock)
    found = run(*command.split(), *(["--why-not", "tp=2", "--what-if", "memory=192GB", "--what-if", "device=cpu"]))
    assert found.status == 0, found.err
    answer = json.loads(found.out)
    assert answer["candidates"] and not answer["why_not"] and not answer["what_if"]
    assert any(note.startswith("stopped at the time limit of 6 s") for note in answer["notes"])
    assert any("not answered" in note and "--why-not tp=2, --what-if memory=192GB" in note for note in answer["notes"])


LARGEST = [
    "--model tiny-mla --cluster dgx-h100:2 --global-batch 1048576 --seq 1073741824",
    "--model llama3-8b --cluster dgx-h100:125 --global-batch 999999937 --seq 4096 --tp 8 --pp 1",
    "--model tiny-moe --cluster dgx-h100:2 --global-batch 1024 --seq 4096 --set model.moe.experts=65536",
    "--model tiny --cluster laptop:4 --global-batch 1024 --seq 64 --set model.layers=2048 --schedule 1f1b --pp 4",
    "--model tiny --cluster laptop:2 --global-batch 64 --seq 64 --set model.ffn=16777216 --set model.vocab=16777216",
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("asked", LARGEST)
def test_the_largest_jobs_are_answered(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the largest numbers that are taken: an answer or one line, and no figure that is none."""
    monkeypatch.setattr(time, "process_time", Clock())
    for verb in ("plan --out - --json --time-limit 6s", "analyze --json"):
        found = run(*verb.split(), *asked.split())
        assert found.status in (0, 1, 2), found.err
        if found.out:
            strict_json(found.out)
        else:
            assert found.status and len(found.err.strip().splitlines()) == 1


def test_parts_leave_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    whole = Deadline(16.0)
    parts = []
    for _ in range(3):
        parts.append(whole.part())
        now[0] += parts[-1].seconds or 0.0
    assert [one.seconds for one in parts] == [8.0, 4.0, 2.0] and not whole.was_hit
    now[0] += 1
    assert list(parts[-1].until([1, 2])) == [1] and whole.was_hit and not whole.passed


@pytest.mark.slow
def test_a_mixed_cluster_has_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", Clock())
    command = "plan --model llama3-8b --cluster dgx-h100:1+dgx-a100:1 --global-batch 64 --seq 4096 --tp 8 --json"
    assert json.loads(run(*command.split(), "--time-limit", "100000s").out)["was_stopped"] is False
    found = run(*command.split(), "--time-limit", "40s")
    assert found.status == 0 and json.loads(found.out)["was_stopped"], found.err
    hurried = run(*command.split(), "--time-limit", "1s")
    assert hurried.status == 0 or "within the time limit" in hurried.err


@pytest.mark.slow
def test_the_command_takes_a_limit() -> None:
    command = "plan --model tiny --cluster laptop:2 --global-batch 4 --seq 64 --out - --json --time-limit"
    assert run(*command.split(), "0s").status == 2
    found = run(*command.split(), "10min")
    assert found.status == 0 and not any("stopped" in note for note in json.loads(found.out)["notes"])
