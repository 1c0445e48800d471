"""`shardwise plan`: what it says, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.running import Result, error_line, run, run_json
from shardwise.interop.jobs import read_job
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_seconds

SMALL = "plan --model llama3.2-1b --cluster dgx-h100:1 --global-batch 64 --seq 2048 --microbatch 1,2 --schedule 1f1b"


def planned(tmp_path: Path, *more: str) -> Result:
    return run(*SMALL.split(), "--out", str(tmp_path / "job.yaml"), *more)


def test_the_job_it_writes_is_the_best_it_names_and_runs(tmp_path: Path) -> None:
    result = planned(tmp_path, "--json")
    assert result.status == 0
    data = json.loads(result.out)
    job = read_job(tmp_path / "job.yaml")
    assert job.to_dict() == data["job"]
    assert verdict(job).status == "runs"
    best, *_ = data["layouts"]
    assert best["strategy"] == job.strategy.to_dict()
    assert best["group"] == "within noise" and data["ranking"][0]["words"] == best["words"]
    fastest = min(one["predicted_seconds"] for one in data["layouts"])
    near = fastest * (1 + data["noise"]["share"])
    assert all((one["predicted_seconds"] <= near) == (one["group"] == "within noise") for one in data["layouts"])
    assert best["predicted_seconds_low"] < best["predicted_seconds"] < best["predicted_seconds_high"]
    assert sum(best["parts_seconds"].values()) == pytest.approx(best["predicted_seconds"])
    assert best["margin_bytes"] >= 0
    batch = best["batch"]
    assert batch["data_parallel"] * batch["accumulation"] * batch["microbatch"] == batch["sequences"] == 64


@pytest.mark.slow
def test_a_plan_may_be_analyzed_and_exported(tmp_path: Path) -> None:
    assert planned(tmp_path).status == 0
    assert run("analyze", str(tmp_path / "job.yaml")).status == 0
    assert run("export", str(tmp_path / "job.yaml"), "--to", "megatron").status == 0


@pytest.mark.slow
def test_the_text_answers_what_is_asked(tmp_path: Path) -> None:
    questions = ["--why-not", "tp=8", "--why-not", "tp=3", "--what-if", "nvlink=900GB/s", "--what-if", "sm-free",
                 "--pareto", "memory", "--tokens", "1T", "--price", "2/h"]  # fmt: skip
    result = planned(tmp_path, *questions, "--details")
    assert result.status == 0
    for part in (
        "Best plan",
        "Why 1 wins",
        "textbook",
        "How the batch is spent",
        "Why not tp 8? Slower than the fastest by",
        "Why not tp 3? Does not divide",
        "sm-free",
        "Time against memory",
        "The whole run",
        "Who can run 1: shardwise",
        "do not fit",
        "Error bars: step time",
    ):
        assert part in result.out


def test_the_answer_is_one_screen(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    result = run(*SMALL.split(), "--out", str(path), columns=100)
    assert result.status == 0
    lines = result.out.splitlines()
    assert 24 <= len(lines) <= 40 and max(map(len, lines)) <= 100
    order = ("Best plan", "Memory", "Predicted step", "Throughput", "Time goes to", "The best", "Why 1", "Runs on")
    places = [next(place for place, line in enumerate(lines) if line.strip().startswith(part)) for part in order]
    assert places == sorted(places)
    assert "\n 3  " in result.out and "\n 4  " not in result.out
    assert f"Next: shardwise analyze {path}" in " ".join(result.out.split())
    assert "How the batch is spent" in run(*SMALL.split(), "--out", "-", "--markdown").out


@pytest.mark.slow
def test_bounds_hold_for_every_candidate(tmp_path: Path) -> None:
    bounds = "--tp 2..4 --zero 1,3 --exclude pp=2 --exclude tp=4,zero=3 --max-memory 40%"
    result = planned(tmp_path, "--json", *bounds.split())
    assert result.status == 0
    for one in json.loads(result.out)["candidates"]:
        strategy = one["strategy"]
        assert strategy["tp"] in (2, 4)
        assert strategy.get("zero", 0) in (1, 3)
        assert strategy.get("pp", 1) != 2
        assert not (strategy["tp"] == 4 and strategy["zero"] == 3)
        assert one["memory"]["total_bytes"] <= 0.4 * 80 * 2**30


def test_for_a_framework_only_what_it_can_say(tmp_path: Path) -> None:
    result = planned(tmp_path, "--json", "--for", "ddp")
    assert result.status == 0
    strategy = json.loads(result.out)["job"]["strategy"]
    assert strategy.get("zero", 0) == 0
    assert all(strategy.get(name, 1) == 1 for name in ("tp", "cp", "pp"))


@pytest.mark.slow
def test_a_file_that_plan_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: gpt2\n")
    assert "exists" in error_line(planned(tmp_path))
    assert path.read_text() == "model: gpt2\n"
    path.unlink()
    assert planned(tmp_path).status == planned(tmp_path).status == 0  # its own it replaces


def test_a_file_that_cannot_be_written_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.symlink_to(path)
    assert "--out" in (line := error_line(planned(tmp_path))) and "Errno" not in line
    path.unlink()
    path.write_bytes(bytes(range(256)))
    assert "not written by plan" in error_line(planned(tmp_path))


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2"])
def test_a_search_that_is_stopped_at_once_has_an_answer(model: str) -> None:
    command = f"plan --model {model} --cluster dgx-h100:4 --out - --time-limit 1e-9s --json"
    data = json.loads(run(*command.split()).out)
    assert all(one["least_memory_bytes"] > 0 for one in data["families"])


@pytest.mark.slow
def test_what_a_plan_has_from_its_stack_is_noted(tmp_path: Path) -> None:
    result = planned(tmp_path, "--dispatch", "deduplicated", "--set", "strategy.overlap.pp=true")
    assert "note: strategy.dispatch is ignored" in result.out
    assert "note: strategy.overlap.pp is ignored" in result.out


@pytest.mark.slow
def test_a_plan_for_a_stack_overlaps_as_that_does(tmp_path: Path) -> None:
    """It was refused: what the stack overlaps was read as if it had been given."""
    assert planned(tmp_path, "--stack", "megatron-core").status == 0


@pytest.mark.slow
def test_a_plan_overlaps_tp_where_that_is_asked_for(tmp_path: Path) -> None:
    """`analyze` proposes it for a plan without; the job file has it, and a search from that file too."""
    command = "plan --model llama3-70b --cluster dgx-h100:8 --global-batch 64 --tp 8 --pp 1 --cp 1 --json --out"
    plain = json.loads(run(*command.split(), "-").out)["layouts"][0]["predicted_seconds"]
    path = str(tmp_path / "job.yaml")
    asked = run(*command.split(), path, "--set", "strategy.overlap.tp=true")
    found = json.loads(asked.out)["layouts"][0]["predicted_seconds"]
    assert found < plain and "overlap:\n    tp: true" in Path(path).read_text()
    again = run("plan", path, "--tp", "8", "--pp", "1", "--cp", "1", "--json", "--out", "-")
    assert json.loads(again.out)["layouts"][0]["predicted_seconds"] == pytest.approx(found)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--tp 5", "5 does not divide"),
        ("--tp 9..3", "empty range"),
        ("--tp x", "not a whole number"),
        ("--zero 4", "out of range"),
        ("--schedule zigzag", "not known"),
        ("--pp 99", "99"),
        ("--tp 8 --pp 8", "64"),
        ("--exclude tp", "FIELD=VALUE"),
        ("--exclude tq=8", "not a field of a strategy"),
        ("--max-memory 0%", "not a share"),
        ("--max-memory -5GB", "-5"),
        ("--min-global-batch 0", "positive"),
        ("--for llama.cpp", "not known"),
        ("--why-not tp", "FIELD=VALUE"),
        ("--what-if ethernet=1Gb/s", "has no"),
        ("--what-if nvlink", "NAME=VALUE"),
        ("--what-if memory=lots", "lots"),
        ("--global-batch 7 --dp 8", "do not divide"),
        ("--offload --no-offload", "are mutually exclusive"),
        ("--tokens -1", "-1"),
        ("--price 2/h", "--tokens"),
        ("--out /nonexistent/job.yaml", "not a directory"),
        ("--top 0", "positive"),
        ("--microbatch 0", "out of range"),
        ("--out .", "is a folder"),
        ("--out /dev/zero", "not written by plan"),
        ("--zero=--", "'--' is not a value"),
        ("--why-not=--", "'--' is not a value"),
        ("--set training=auto", "training: 'auto' should be a mapping of fields"),
        ("--set strategy=bucket", "strategy: 'bucket' should be a mapping of fields"),
        ("--set strategy.tpp=8", "strategy.tpp: unknown field; did you mean tp or pp?"),
        ("--set strategy.overlap.cp=8", "neither true nor false"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path: Path, flags: str, says: str) -> None:
    given = flags.split()
    kept = [] if "--out" in given else ["--out", str(tmp_path / "job.yaml")]
    result = run(*SMALL.split(), *kept, *given)
    assert says in error_line(result)
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.slow
def test_two_kinds_of_nodes_share_a_job(tmp_path: Path) -> None:
    command = "plan --model llama3.2-1b --cluster dgx-h100:1+dgx-a100:1 --global-batch 64 --seq 2048 --schedule 1f1b"
    file = str(tmp_path / "job.yaml")
    text = run(*command.split(), "--microbatch", "1", "--out", file)
    assert text.status == 0
    assert f"Wrote {file}" in text.out and "dgx-h100" in text.out and "dgx-a100" in text.out
    priced = run_json("analyze", file)
    assert f"step {readable_seconds(priced['time']['predicted_seconds'])}" in text.out
    assert "--scaling" in error_line(run("analyze", file, "--scaling"))
    assert "is not supported" in error_line(run(*command.split(), "--why-not", "tp=8"))
    assert "unknown cluster" in error_line(run(*command.replace("dgx-a100:1", "nothing").split()))
