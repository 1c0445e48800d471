"""Metrics of a run: lines that are cut and followed, and TensorBoard's files read back by their format."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.api.execution import ready_run
from shardwise.api.given import job_arguments
from shardwise.api.run_options import RunOptions, RunPlace
from shardwise.report import progress as shown_progress
from shardwise.run.metrics.lines import (
    Follower,
    MetricLines,
    cut_after,
    missing_steps,
    read_lines,
    spelled_ranges,
    summarise,
)
from shardwise.run.metrics.recorder import EventFile, Recorder, _checksum, read_prediction, write_prediction
from shardwise.spec.job import Job
from training.runs import full_disk


def steps(folder: Path) -> list[int]:
    return [one["step"] for one in read_lines(folder / "metrics.jsonl")]


def test_no_step_is_twice_in_the_file_after_a_restart(tmp_path: Path) -> None:
    lines = MetricLines(tmp_path, 0)
    for step in range(1, 6):
        lines.write({"step": step, "loss": 1.0 / step})
    lines.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # the process was killed here
    again = MetricLines(tmp_path, 3)
    again.write({"step": 4, "loss": float("nan")})
    again.close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert list(read_lines(tmp_path / "metrics.jsonl"))[-1]["loss"] is None


def figures(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "seconds": 1.0, "tokens_per_second": 1.0, "mfu": 0.1, **more}


@pytest.mark.parametrize(
    "broken", [b'{"step": 4, "loss"\n', b"\x00\xff\n", b'{"step": true}\n', b'{"step": 4, "seconds": "x"}\n']
)
def test_a_broken_line_costs_no_other_and_the_gap_is_told(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    text = [json.dumps(figures(step)).encode() + b"\n" for step in range(1, 11)]
    path.write_bytes(b"".join([*text[:3], broken, *text[4:], b'{"step": 11, "loss'[: len(broken)]]))
    job = Job.from_dict({"model": "tiny", "cluster": "laptop:1", "run": {"logging": {"tensorboard": False}}})
    for _ in range(2):  # told once, however often it starts
        recorder = Recorder(job, tmp_path, 8)
        recorder.write({"step": 8, "checkpoint": 8})
        recorder.close()
        assert [one["step"] for one in read_lines(path) if "loss" in one] == [1, 2, 3, 5, 6, 7, 8]
        assert [one["steps_missing"] for one in read_lines(path) if "steps_missing" in one] == ["4"]
    assert broken in path.read_bytes()  # nobody has thrown it away
    assert summarise(read_lines(path)).missing_steps == "4"


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path: Path) -> None:
    lines = MetricLines(tmp_path, 0)
    lines.write({"step": 1})
    long = "x" * 20_000
    with full_disk():
        for step in range(2, 6):
            lines.write({"step": step, "words": long})
        lines.cut_after(4)  # the run goes back: step 5 has not been
    assert steps(tmp_path) == [1]
    lines.write({"step": 5})
    lines.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_steps_that_have_no_line() -> None:
    def missing(*numbers: int, reached: int | None = None, interval: int = 1) -> list[tuple[int, int]]:
        every = {"interval": interval} if interval > 1 else {}
        return missing_steps([figures(one, **every) for one in numbers], reached)

    assert missing(1, 2, 3) == missing(reached=0) == []
    assert missing(1, 2, 5, 7) == [(3, 4), (6, 6)]
    assert missing(3, reached=6) == [(1, 2), (4, 6)]
    assert missing(10, 20, 30, reached=34, interval=10) == []
    assert missing(10, 30, 37, 40, interval=10) == [(11, 29)]
    later = [figures(10, interval=10), figures(15), figures(16), figures(18)]  # went on from 14, with a line for each
    assert missing_steps(later) == [(17, 17)]
    assert spelled_ranges([(7, 7), (11, 1400)]) == "7, 11 to 1,400"


def test_a_strange_prediction_is_none(tmp_path: Path) -> None:
    for text in (
        "[]",
        "{}",
        '{"predicted_seconds": "x", "predicted_memory_bytes": 1}',
        "{",
        '{"predicted_seconds": 1}',
    ):
        (tmp_path / "prediction.json").write_text(text)
        assert read_prediction(tmp_path) == {}
    write_prediction(tmp_path, 0.5, 7)
    assert read_prediction(tmp_path) == {"predicted_seconds": 0.5, "predicted_memory_bytes": 7}


def test_who_follows_a_file_sees_every_record_and_after_a_cut_the_last_ones_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    lines = MetricLines(tmp_path, 0)
    lines.write({"step": 1})
    lines.write({"step": 2})
    assert [one["step"] for one in follower.new()] == [1, 2]
    assert follower.new() == []
    cut_after(path, 1)
    assert follower.new() == [{"step": 1}]
    lines.write({"step": 2, "again": 1})
    assert follower.new() == [{"step": 2, "again": 1}]


def test_the_progress_shows_the_newest_step_also_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_progress, "LINE_SECONDS", 0.0)
    progress = shown_progress.TrainingProgress(tmp_path / "metrics.jsonl", 20)

    def told_after(first: int, last: int, **more: Any) -> str:
        for step in range(first, last + 1):
            lines.write({"step": step, "loss": 1.0, "seconds": 1.0})
        lines.write({"step": last, **more})
        progress._show_new()
        return capsys.readouterr().err

    lines = MetricLines(tmp_path, 0)
    said = told_after(1, 7, checkpoint_failed="no room", checkpoint_failed_step=4)
    assert re.findall(r"step (\d+)\b", said) == ["4", "7"] and "step 4: no checkpoint: no room" in said
    lines = MetricLines(tmp_path, 4)
    assert re.findall(r"step (\d+) of", told_after(5, 4)) == ["4"]  # nothing new: what there is again
    assert re.findall(r"step (\d+) of", told_after(5, 6)) == ["6"]


def seconds_in(words: str) -> float:
    units = {"day": 86400, "h": 3600, "min": 60, "s": 1, "ms": 0.001}
    return sum(float(value) * units[unit] for value, unit in re.findall(r"([\d.]+) (day|h|min|s|ms)(?:s\b|\b)", words))


@pytest.mark.parametrize(("steps", "seconds"), [(50, 0.5), (119, 0.5), (124, 0.5), (1000, 40.0), (40_000, 9.0)])
def test_a_long_run_says_after_its_first_steps_how_long_it_takes(
    steps: int, seconds: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and only if a minute or more is left."""
    progress = shown_progress.TrainingProgress(tmp_path / "metrics.jsonl", steps)
    lines, said = MetricLines(tmp_path, 0), ""
    for step in range(1, 8):
        lines.write({"step": step, "loss": 1.0, "seconds": seconds, "predicted_seconds": 0.025})
        progress._show_new()
        said += capsys.readouterr().err
    found = re.findall(r"a step takes (.*) \(predicted 25.0 ms\): (.*) for ([\d,]+) more steps", said)
    if (steps - 3) * seconds < 60:
        assert not found
        return
    ((pace, left, more),) = found
    assert seconds_in(pace) == seconds and int(more.replace(",", "")) == steps - 3
    assert seconds_in(left) == pytest.approx((steps - 3) * seconds, rel=0.02)


@pytest.mark.quick(1)
@pytest.mark.parametrize("steps", [100, 20_000, 10_000_000])
def test_a_long_run_says_before_it_starts_how_long_it_is_predicted_to_take(steps: int, tmp_path: Path) -> None:
    job = {"model": "tiny", "cluster": "laptop:2", "seq": 128, "global_batch": 8, "dp": 2}
    said: list[str] = []
    options = RunOptions(steps=steps, run_folder=tmp_path / "run")
    ready = ready_run(options.over(job_arguments(None, job)), options, RunPlace(), note=said.append)
    each = ready.checked.price.step_seconds
    found = [one for one in said if "predicted to take" in one]
    assert bool(found) == (steps * each >= 60)
    for one in found:
        whole, counted = one.partition("predicted to take ")[2].split(": ")
        assert seconds_in(whole) == pytest.approx(steps * each, rel=0.02)
        assert counted.startswith(f"{steps:,} steps of ") and seconds_in(counted) == pytest.approx(each, rel=0.01)


def messages(path: Path) -> list[bytes]:
    """The records of an event file; every checksum is compared."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = data[12 : 12 + length]
        assert data[8:12] == _checksum(data[:8])
        assert data[12 + length : 16 + length] == _checksum(event)
        found.append(event)
        data = data[16 + length :]
    return found


def test_event_files_have_the_format_of_tensorboard(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.forget_after(299)
    events.scalars(301, {"loss": 2.5})
    events.close()
    (path,) = tmp_path.iterdir()
    version, restart, scalars = messages(path)
    assert version.endswith(b"brain.Event:2")
    assert restart[9:] == b"\x10\xac\x02" + b"\x3a\x02\x08\x01"  # step 300; session_log {status: START}
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 2.5)
    assert scalars[9:] == b"\x10\xad\x02" + b"\x2a\x0d" + b"\x0a\x0b" + value
    # RFC 3720, appendix B.4: CRC-32C of 32 zeros is 0x8a9136aa, masked as TFRecord does
    crc = 0x8A9136AA
    assert _checksum(bytes(32)) == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_a_full_disk_leaves_no_half_record_for_tensorboard(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    with full_disk():
        for step in range(10):
            events.scalars(step, {"x" * 3_000: 1.0})
    events.scalars(11, {"loss": 2.5})
    events.close()
    (path,) = tmp_path.iterdir()
    *_, before, last = messages(path)
    assert b"x" * 3_000 in before
    assert b"loss" in last


def test_a_summary_leaves_out_what_is_slow_for_other_reasons() -> None:
    def record(step: int, seconds: float, **more: Any) -> dict[str, Any]:
        return {"step": step, "loss": 5 - step / 10, "seconds": seconds, "tokens_per_second": 8 / seconds, "mfu": 0.1,
                "data_wait_seconds": 0.0, "predicted_seconds": 0.5, **more}  # fmt: skip

    counted = {"memory_bytes": 100, "memory_bytes_of_ranks": [100, 90]}
    slow, quick = [record(step, 9.0) for step in (1, 2, 3)], [record(step, 1.0) for step in (5, 6)]
    evaluated = [{"step": 0, "validation_loss": 6.0}, {"step": 6, "validation_loss": 3.0}]
    records = [evaluated[0], *slow, record(4, 7.0, **counted), *quick, evaluated[1]]
    found = summarise(records)
    assert found.step_seconds == pytest.approx(1.0)
    assert (found.memory_bytes, found.predicted_seconds) == (100, 0.5)
    assert (found.first_validation, found.last_validation) == (6.0, 3.0)
    assert (found.first_loss, found.last_loss, found.recent_loss) == (4.9, 4.4, 4.65)
    assert summarise([]).step_seconds is None


# -- Weights & Biases, whose place another module takes ----------------------------------------------

FAKE = """
import json
from pathlib import Path

class Run:
    def __init__(self, settings):
        self.file = Path(settings["dir"]) / "said.jsonl"
        self.say({"init": settings})
    def say(self, what):
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def log(self, values, step):
        self.say({"step": step, **values})
    def finish(self):
        self.say({"finish": True})

def init(**settings):
    return Run(settings)
"""


def test_weights_and_biases_gets_every_number_and_one_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    logging = {"wandb": "birds", "tensorboard": False}
    job = Job.from_dict({"model": "tiny", "cluster": "laptop:1", "run": {"logging": logging}})
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    for first in (0, 1):  # a start and a restart
        recorder = Recorder(job, folder, first)
        recorder.write({"step": first + 1, "loss": 2.5, "bad": "skipped", "gradient_norm": float("nan")})
        recorder.close()
    monkeypatch.delitem(sys.modules, "wandb")
    said = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    begun, *_ = starts = [one.pop("init") for one in said if "init" in one]
    assert starts == [begun, begun]
    assert (begun["project"], begun["resume"], begun["config"]["model"]) == ("birds", "allow", "tiny")
    assert begun["id"].endswith("-runs-one")
    assert [one for one in said if one] == [
        {"step": 1, "loss": 2.5}, {"finish": True}, {"step": 2, "loss": 2.5}, {"finish": True},
    ]  # fmt: skip


def test_weights_and_biases_that_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    small = ("--model", "tiny", "--cluster", "laptop:1", "--seq", "32", "--global-batch", "4", "--precision", "fp32")
    settings = ("--set", "run.logging.wandb=birds", "--run-folder", str(tmp_path / "run"))
    line = error_line(run("train", *small, *settings))
    assert "run.logging.wandb: needs the package wandb, which is not installed; pip install wandb" in line
    assert not (tmp_path / "run").exists()
