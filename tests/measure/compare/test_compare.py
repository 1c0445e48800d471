"""A profiled run beside its prediction: parts add up, and what is slow on purpose is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run, run_json
from measure.compare.slowed import FIRST, LAST, prepared, profiled_job, run_across, run_profiled
from required import require
from shardwise.launch.emulate.network import why_not
from shardwise.measure.compare.comparison import Comparison, compare, profiled_run
from shardwise.measure.compare.recorded import sent_bytes
from shardwise.measure.recut import recut
from shardwise.spec.job import Job
from shardwise.spec.run import Checkpoints, Evaluation, NonFinite
from training.runs import digest, lines, write_shards
from training.runs import run as train_all


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


def compared(job: Job, folder: Path, **slowed: Any) -> Comparison:
    run_profiled(job, folder, **slowed)
    found = compare(profiled_run(str(folder)))
    assert_adds_up(found)
    return found


def assert_adds_up(found: Comparison) -> None:
    assert found.measured.numbers == tuple(range(FIRST, LAST + 1))
    for rank in found.measured.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_seconds, rel=1e-6)
        assert min(rank.parts.values()) >= 0
    assert sum(one.measured for one in found.parts) == pytest.approx(found.measured.step_seconds, rel=1e-6)
    assert sum(one.predicted for one in found.parts) == pytest.approx(found.predicted.step_seconds, rel=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("strategy", "communicates"),
    [
        pytest.param({"dp": 2, "zero": 0}, {"dp"}, marks=pytest.mark.slow),  # ZeRO-3 sends more of the same
        ({"dp": 2, "zero": 3}, {"dp"}),
        ({"tp": 2}, {"tp"}),
        pytest.param({"cp": 2}, {"cp", "dp"}, marks=pytest.mark.slow),  # gradients of the same weights are summed
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_parts_of_a_step_add_up(
    shards: str, tmp_path: Path, strategy: dict[str, int], communicates: set[str]
) -> None:
    job = profiled_job(shards, 2, **strategy)
    found = compared(job, tmp_path / "run")
    parts = {one.name for one in found.parts if one.measured > 0}
    assert parts & {"tp", "cp", "pp", "dp"} == communicates
    assert {"compute", "data", "optimizer", "host"} <= parts
    rank = found.measured.ranks[0]
    assert sorted(rank.layers) == [0, 1, 2, 3]
    # What every rank began together is seen as one collective: all of them took part in each.
    together = [one for one in found.measured.exchanges if one.dimension in communicates]
    assert together
    assert {one.members for one in together} == {(0, 1)}
    assert all(one.seconds >= 0 and one.bytes > 0 for one in together)
    # The backend's own record knows nothing of our names, and has the same.
    assert {name for one in found.sent for name in one.dimensions} == communicates and found.mismatch is None
    for one in found.sent:
        if one.dimensions in (("dp",), ("tp",)):  # of cp are messages, which gloo does not record
            assert one.recorded == pytest.approx(one.planned, rel=0.01) and not one.unrecorded
    # What else a run does in these steps is not held against the plan of a step.
    busier = replace(job.run, evaluation=Evaluation(interval=2, batches=1), checkpoints=Checkpoints(steps=2))
    again = compared(replace(job, run=busier), tmp_path / "busier")
    assert "checkpoint" in {one.name for one in again.parts}
    assert exchanged(again) == exchanged(found)


def exchanged(found: Comparison) -> list[Any]:
    """What the ranks sent in each dimension, by the backend's record and by the engine's names."""
    run = found.measured
    recorded = [sent_bytes(found.job, one, steps) for one, steps in zip(run.records, run.steps)]
    return [recorded, [(one.label.title, one.what, one.step, one.members, one.bytes) for one in run.exchanges]]


@pytest.mark.slow
def test_a_step_that_is_rolled_back_counts_once(shards: str, tmp_path: Path) -> None:
    """What was exchanged for it, and to load the checkpoint, is no part of a planned step."""
    job = profiled_job(shards, 2, dp=2, zero=3)
    job = replace(
        job, run=replace(job.run, non_finite=NonFinite(policy="roll-back"), evaluation=Evaluation(interval=1))
    )
    sound, spoilt = tmp_path / "sound", tmp_path / "spoilt"
    for folder in (sound, spoilt):
        prepared(job, folder)
    seen = train_all(job, sound)[0]["seen"]
    bad = [digest(tokens) for number, _, tokens in seen if number == LAST - 2]
    train_all(job, spoilt, {"nan_at": bad})
    assert any("rolled_back_from" in one for one in lines(spoilt))
    (plain, _), (rolled, _) = (exchanged(compare(profiled_run(str(folder)))) for folder in (sound, spoilt))
    assert rolled == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, {"dp": 2, "dp_shares": (1, 3)}),
        (3, {"pp": 2, "stage_tp": (2, 1)}),
        pytest.param(3, {"pp": 2, "stage_dp": (1, 2), "zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_unlike_replicas_and_stages(shards: str, tmp_path: Path, ranks: int, strategy: dict[str, Any]) -> None:
    """Parts add up, what each rank sent is as planned for that rank, and a rank with more to do is not a slow one."""
    job = profiled_job(shards, ranks, **strategy)
    found = compared(job, tmp_path / "run")
    assert found.mismatch is None
    for rank in range(ranks):
        for one in sent_bytes(job, found.measured.records[rank], found.measured.steps[rank]):
            if one.dimensions in (("dp",), ("tp",)):
                assert one.recorded == pytest.approx(one.planned, rel=0.01), (rank, one)
    said = run("compare", str(tmp_path / "run"))
    assert said.status == 0, said.err
    if job.strategy.has_unlike_stages:
        assert "stages of unlike degrees are not cut anew" in error_line(
            run("calibrate", "--from", str(tmp_path / "run"))
        )


@pytest.mark.slow  # compiling takes a minute
@pytest.mark.parametrize("strategy", [{"pp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_compiled_layers_are_recorded_too(shards: str, tmp_path: Path, strategy: dict[str, Any]) -> None:
    job = profiled_job(shards, 2, **strategy)
    found = compared(replace(job, training=replace(job.training, compile=True)), tmp_path / "run")
    held = [[0, 1], [2, 3]] if job.strategy.pp == 2 else [[0, 1, 2, 3]] * 2
    assert [sorted(rank.layers) for rank in found.measured.ranks] == held
    assert all(seconds > 0 for rank in found.measured.ranks for seconds in rank.layers.values())
    if job.strategy.pp == 2:
        assert len(recut(job, found.measured).slowness) == 2


@pytest.mark.slow
def test_a_slow_rank_is_named_and_gets_fewer_layers(shards: str, tmp_path: Path) -> None:
    job = profiled_job(shards, 2, layers=8, pp=2)
    found = compared(job, tmp_path / "run", slow_rank=0, times=4.0)
    assert found.slow_rank == 0
    assert found.measured.busiest.rank == 0
    causes = {one.name: one.cause for one in found.differences}
    assert causes.get("bubble", "the others wait for rank 0") == "the others wait for rank 0"
    again = recut(job, found.measured)
    (before, _), (after, _) = again.layers
    assert (before, after < before) == (4, True)
    assert again.gain > 1

    written = run("calibrate", "--from", str(tmp_path / "run"), "--out", str(tmp_path / "job.yaml"))
    assert written.status == 0
    assert "rank 0" in written.out
    new = Job.from_yaml((tmp_path / "job.yaml").read_text())
    assert new.strategy.stage_layers == again.layers[1]
    assert new.run.folder is None

    said = run("compare", str(tmp_path / "last"))
    assert said.status == 0, said
    assert "Slow rank: 0 (node 0)" in said.out
    told = run_json("compare", str(tmp_path / "run"), "--json")
    assert told["slow_rank"] == 0
    trace = json.loads(Path(told["trace"]).read_text())["traceEvents"]
    processes = {one["args"]["name"] for one in trace if one["name"] == "process_name"}
    assert {"measured: rank 0, node 0", "predicted: pipeline rank 1 of 2"} <= processes
    assert all(one["dur"] >= 0 for one in trace if one["ph"] == "X")

    (tmp_path / "run" / "job.yaml").write_text(profiled_job(shards, 2, layers=8, dp=2).to_yaml())
    assert "recorded with another layout" in error_line(run("compare", str(tmp_path / "run")))


@pytest.mark.slow
def test_a_slow_link_is_named(shards: str, tmp_path: Path) -> None:
    """Two pipelines side by side: messages of one of them come late."""
    job = profiled_job(shards, 4, dp=2, pp=2)
    found = compared(job, tmp_path / "run", late_pair=(0, 2), late_seconds=0.02)
    assert found.slow_link is not None
    assert found.slow_link.link.members == (0, 2)
    assert found.slow_link.link.dimension == "pp"
    assert "between ranks 0 and 2" in run("compare", str(tmp_path / "run")).out


@pytest.mark.slow
def test_a_slow_link_between_virtual_nodes_is_named(shards: str, tmp_path: Path) -> None:
    """A pipeline over three nodes, two of which are far from each other."""
    require("emulate", why_not())
    job = profiled_job(shards, 3, layers=6, pp=3, stage_layers="balanced", emulate="3x1,1Gbit,1ms")
    run_across(job, tmp_path / "run", delay_seconds=0.03, pair=(1, 2))
    found = compare(profiled_run(str(tmp_path / "run")))
    assert_adds_up(found)
    assert found.slow_link is not None
    assert (found.slow_link.link.members, found.slow_link.link.nodes) == ((1, 2), (1, 2))
    assert "between ranks 1 and 2 (nodes 1 and 2)" in run("compare", str(tmp_path / "run")).out


def test_a_folder_without_a_profile(tmp_path: Path, shards: str) -> None:
    assert "is not a run's folder" in error_line(run("compare", str(tmp_path / "last")))
    job = profiled_job(shards, 2, dp=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.yaml").write_text(job.to_yaml())
    for verb in (["compare"], ["calibrate", "--from"]):
        line = error_line(run(*verb, str(tmp_path / "run")))
        assert "this run was not profiled; train with --profile steps=10:12" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10:12", "names no steps; write it like steps=10:12"),
        ("steps=12:10", "from step 12 to 10 are not 1 to 100 steps"),
        ("steps=10:12", "step 12 is after the last, 5"),
    ],
)
def test_steps_that_cannot_be_profiled(text: str, said: str, tmp_path: Path) -> None:
    flags = ["--model", "tiny", "--cluster", "laptop:1", "--global-batch", "4", "--seq", "32", "--steps", "5"]
    assert said in error_line(run("train", *flags, "--profile", text, "--run-folder", str(tmp_path / "run")))
