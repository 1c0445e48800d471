"""How a run is doing, as `status` and Prometheus say: a real one while it goes on and after it was killed, and folders
in every state that a run can leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.running import run, run_json
from launch.observe.exposition import parse
from launch.running import wait_until
from shardwise.launch.observe.prometheus import CONTENT_TYPE, Metric, exposition, metrics_of
from shardwise.launch.observe.state import RunObserver, rank_states
from shardwise.launch.preflight import preflight
from shardwise.launch.run import prepare
from shardwise.run.attempt import write_beat, write_progress
from shardwise.run.checkpoint.folder import RunFolder, lock_held
from shardwise.run.metrics.lines import read_lines
from shardwise.run.metrics.recorder import EventLog
from training.faults import small_job
from training.runs import write_shards

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


# -- a real run ------------------------------------------------------------------------------------


@contextmanager
def training(folder: Path, job: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`shardwise train` as a process of its own, and what it prints to standard error."""
    said = folder.with_suffix(".err")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise", "train", job, "--run-folder", str(folder), *flags]
    with said.open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, text=True)
        try:
            yield process, said
        finally:
            process.kill()
            process.wait()


def scraped(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_run_is_seen_while_it_goes_on_and_after_it_was_killed(tmp_path: Path, shards: str) -> None:
    file = tmp_path / "job.yaml"
    settings = {"steps": 5000, "logging": {"tensorboard": False, "memory": 3}}
    file.write_text(small_job(shards, run=settings).to_yaml())
    folder = tmp_path / "run"
    with training(folder, str(file), "--metrics-port", "0") as (process, said):
        wait_until(lambda: any(line["step"] >= 5 for line in read_lines(folder / "metrics.jsonl")), seconds=400)
        url = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", said.read_text())
        assert url, said.read_text()
        before = run_of(folder)
        kind, text = scraped(url[1])
        after = run_of(folder)
        assert kind == CONTENT_TYPE
        found = parse(text)
        assert before["step"] <= found["shardwise_step"].value() <= after["step"]
        assert found["shardwise_run_state"].value(state="running") == 1
        assert sum(found["shardwise_run_state"].samples.values()) == 1
        assert found["shardwise_steps_planned"].value() == 5000
        assert found["shardwise_restarts_total"].value() == 0
        assert found["shardwise_memory_bytes"].value(rank="0") == after["memory_bytes_of_ranks"][0] > 0
        assert found["shardwise_loss"].value() > 0 and found["shardwise_tokens_per_second"].value() > 0
        assert 0 < found["shardwise_goodput_ratio"].value() <= 1
        assert found["shardwise_predicted_step_seconds"].value() == after["predicted_seconds"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scraped(url[1].replace("/metrics", "/else"))
        assert after["state"] == "running" and len(after["ranks"]) == 2
        assert after["saved"]["step"] % 2 == 0 and after["left_seconds"] > 0
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed = run("status", str(folder))
    assert killed.status == 1
    assert ": killed, step " in killed.out and "start the same command again to resume" in killed.out
    with pytest.raises(urllib.error.URLError):
        scraped(url[1])
    for name in ("metrics.jsonl", "events.jsonl", "prediction.json", "job.yaml"):  # half of each is there
        path = folder / name
        path.write_bytes(path.read_bytes()[:-7])
        assert run("status", str(folder)).status == 1, name


def run_of(folder: Path) -> dict[str, Any]:
    return dict(run_json("status", str(folder))) if (folder / "events.jsonl").exists() else {}


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path, shards: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job(shards).to_yaml())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = run("train", str(file), "--run-folder", str(tmp_path / "run"), "--metrics-port", port)
        observed = run("status", str(tmp_path), "--metrics-port", port)
    assert refused.status == 2
    assert refused.err.splitlines()[-1] == (
        f"shardwise: error: --metrics-port: 127.0.0.1:{port} is taken; name another port, or 0 for any that is free"
    )
    assert not (tmp_path / "run" / "attempts").exists()
    assert observed.status == 2
    for wrong in ("70000", "-1", "1.5", "http"):
        assert "--metrics-port: " in run("train", str(file), "--metrics-port", wrong).err
        assert "is not a port" in run("status", str(tmp_path), "--metrics-port", wrong).err


def test_status_serves_a_run_that_has_ended(tmp_path: Path, shards: str) -> None:
    folder = prepared(tmp_path, shards)
    EventLog(folder.events).write("started", 0)
    EventLog(folder.events).ended(0, 0)
    command = [sys.executable, "-m", "shardwise", "status", str(folder.path), "--metrics-port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("metrics at ").strip()
        assert parse(scraped(url)[1])["shardwise_run_state"].value(state="ended") == 1
        process.terminate()
        assert process.wait(timeout=20) == 0


# -- folders ---------------------------------------------------------------------------------------


def prepared(tmp_path: Path, shards: str) -> RunFolder:
    job, folder = small_job(shards), RunFolder(tmp_path / "run")
    folder.path.mkdir()
    prepare(job, folder, preflight(job))
    folder.metrics.write_text("".join(json.dumps(line(step)) + "\n" for step in range(1, 5)))
    return folder


def line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 6.0 - step, "seconds": 0.5, "tokens_per_second": 512.0, "mfu": 0.25}


@pytest.mark.parametrize(
    ("events", "state", "status"),
    [
        ([], "killed", 1),  # metrics, and nobody there
        ([("started", 0)], "killed", 1),
        ([("started", 0), ("ended", 0, {"status": 0})], "ended", 0),
        ([("started", 0), ("ended", 0, {"status": 0, "stopped": True})], "stopped", 0),  # by earlier versions
        ([("started", 0), ("ended", 0, {"status": 76, "stopped": True})], "stopped", 0),
        ([("started", 0), ("ended", 0, {"status": 75, "stopped": True})], "stopped", 0),
        ([("started", 0), ("failed", 0), ("ended", 0, {"status": 1, "text": "rank 1: broke"})], "failed", 1),
        ([("started", 0), ("failed", 0), ("started", 1), ("ended", 1, {"status": 0})], "ended", 0),
    ],
)
def test_the_state_is_what_the_run_told_last(
    tmp_path: Path, shards: str, events: list[Any], state: str, status: int
) -> None:
    folder = prepared(tmp_path, shards)
    log = EventLog(folder.events)
    for kind, attempt, *more in events:
        fields = dict(more[0]) if more else {}
        log.write(kind, attempt, fields.pop("text", ""), **fields)
    found = run("status", str(folder.path), "--json")
    told = json.loads(found.out)
    assert (told["state"], found.status) == (state, status)
    assert (told["step"], told["steps"], told["loss"]) == (4, 8, 2.0)
    assert told["restarts"] == sum(kind == "started" and attempt > 0 for kind, attempt, *_ in events)
    unsaved = "before its final checkpoint was complete" if "75" in str(events) else ""
    assert told["why"] == ("rank 1: broke" if state == "failed" else unsaved)


def test_a_locked_folder_runs_restarts_and_stalls(tmp_path: Path, shards: str) -> None:
    folder = prepared(tmp_path, shards)
    log, attempt = EventLog(folder.events), folder.attempts / "attempt-0001"
    attempt.mkdir(parents=True)
    with folder.checkpoints.locked():
        log.write("started", 0, folder=str(attempt))
        assert RunObserver(folder).state().state == "running"  # no rank reports: by its steps
        progress = os.open(attempt / "rank-0.progress", os.O_RDWR | os.O_CREAT)
        write_progress(progress, 1, "start", 0, time.monotonic(), 0.0)
        write_beat(progress, time.monotonic())
        assert RunObserver(folder).state().state == "starting"
        log.write("failed", 0, "rank 0: broke; restart 1 of 3 from step 2")
        assert RunObserver(folder).state().state == "restarting"
        log.write("started", 1, folder=str(attempt))
        assert RunObserver(folder).state().state == "restarting"
        write_progress(progress, 2, "step", 4, time.monotonic(), 0.0)
        assert RunObserver(folder).state().state == "running"
        long_ago = time.time() - 3600
        os.utime(folder.metrics, (long_ago, long_ago))
        assert RunObserver(folder).state().state == "stalled"
        write_progress(progress, 3, "checkpoint", 4, time.monotonic(), 0.0)
        assert RunObserver(folder).state().state == "running"
        assert lock_held(folder.path / "checkpoints" / ".lock")
        os.close(progress)
    assert RunObserver(folder).state().state == "killed"
    assert lock_held(folder.path / "checkpoints" / ".lock") is False


def test_a_rank_that_reports_is_where_it_says(tmp_path: Path) -> None:
    file = os.open(tmp_path / "rank-3.progress", os.O_RDWR | os.O_CREAT)
    write_progress(file, 1, "step", 17, 1000.0, 0.0)
    write_beat(file, 1007.0)
    os.close(file)
    os.utime(tmp_path / "rank-3.progress", (5000.0, 5000.0))
    (one,) = rank_states(tmp_path, 5002.0)
    assert (one.rank, one.phase, one.step, one.silent_seconds, one.phase_seconds) == (3, "step", 17, 2.0, 9.0)


def test_goodput_is_the_share_of_time_in_steps_that_count(tmp_path: Path, shards: str) -> None:
    """Two commands of 4 s and 6 s, a day apart; four steps of half a second, one of them left out as bad."""
    folder = prepared(tmp_path, shards)
    with folder.metrics.open("a") as metrics:
        metrics.write(json.dumps({**line(5), "bad": "left out"}) + "\n")
    begin = time.time() - 2 * 86_400
    at = [("started", 0, 0.0), ("failed", 0, 1.0), ("started", 1, 1.5), ("ended", 1, 4.0)]
    at += [("started", 0, 86_400.0), ("ended", 0, 86_406.0)]
    folder.events.write_text(
        "".join(
            json.dumps({"at": begin + when, "kind": kind, "attempt": n, "status": 0}) + "\n" for kind, n, when in at
        )
    )
    state = RunObserver(folder).state()
    assert state.running_seconds == pytest.approx(10.0)
    assert state.goodput == pytest.approx(4 * 0.5 / 10.0)
    assert state.restarts == 1


def test_an_observer_follows_a_run_that_rolls_back(tmp_path: Path, shards: str) -> None:
    folder = prepared(tmp_path, shards)
    observer = RunObserver(folder)
    assert observer.state().figures.useful_seconds == pytest.approx(2.0)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    rewritten = [json.dumps({**line(step), "seconds": 0.25}) + "\n" for step in (3, 4, 5, 6)]
    folder.metrics.write_text("".join(lines[:2] + rewritten))  # cut after step 2, and longer than before since
    state = observer.state()
    assert state.step == 6
    assert state.figures.useful_seconds == pytest.approx(2 * 0.5 + 4 * 0.25)


def test_checkpoints_alone_are_told_from_a_run(tmp_path: Path) -> None:
    found = run("status", str(tmp_path))
    assert found.status == 2
    assert "holds neither a run nor a checkpoint" in found.err


# -- the format ------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))


@given(_TEXT, _TEXT, st.floats(allow_nan=False, allow_infinity=False))
def test_any_label_help_and_number_survives_the_format(label: str, meaning: str, value: float) -> None:
    written = exposition([Metric("one", meaning or "help", (({"run": label, "rank": "0"}, value),))])
    family = parse(written)["shardwise_one"]
    assert family.value(run=label, rank="0") == value
    assert family.help == (meaning or "help")


def test_every_metric_of_every_state_is_well_formed(tmp_path: Path, shards: str) -> None:
    folder = prepared(tmp_path, shards)
    found = parse(exposition(metrics_of(RunObserver(folder).state())))
    assert found["shardwise_run_info"].value(run=str(folder.path), model="tiny") == 1
    assert [name for name, one in found.items() if one.kind == "counter"] == ["shardwise_restarts_total"]


@pytest.mark.parametrize("elsewhere", [("--on", "slurm"), ("--on", "kubernetes"), ("--print-torchrun",)], ids=str)
def test_what_no_launcher_of_ours_serves_is_refused(tmp_path: Path, shards: str, elsewhere: tuple[str, ...]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job(shards).to_yaml())
    refused = run("train", str(file), "--run-folder", str(tmp_path / "run"), "--metrics-port", "0", *elsewhere)
    assert refused.status == 2
    assert "`shardwise status RUN --metrics-port N` serves any run" in refused.err.splitlines()[-1]
