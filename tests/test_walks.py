"""How many files a value passes: from a flag to the job, from the command line to a figure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import FrameType

import pytest

import shardwise
from shardwise.api import execution
from shardwise.cli.main import main
from shardwise.cost.memory.device import device_memories
from shardwise.spec.job import Job
from shardwise.ui.given import job_of
from source_rules import SOURCE

MOST_FILES = 8
# A job that no other test has, so that nothing is remembered of it.
UNKNOWN = "analyze --model llama3-70b --cluster dgx-h100:8 --tp 8 --pp 4 --zero 1 --global-batch 92 --seq 1880"


def files_called(frame: FrameType | None) -> tuple[str, ...]:
    """The files of the package whose functions are being called, from the command line to this frame."""
    files: dict[str, None] = {}
    while frame is not None:
        place = Path(frame.f_code.co_filename)
        if place.is_relative_to(SOURCE):
            files[place.relative_to(SOURCE).as_posix()] = None
        frame = frame.f_back
    return tuple(reversed(files))


def test_the_memory_of_a_device_is_at_most_eight_files_from_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chains: set[tuple[str, ...]] = set()  # of every call from when a device's memory is asked for until it is known

    def watch(frame: FrameType, event: str, _: object) -> None:
        asked = frame.f_code is device_memories.__code__
        if event == "call" and (asked or chains):
            chains.add(files_called(frame))
        elif event == "return" and asked:
            sys.setprofile(None)

    sys.setprofile(watch)
    try:
        assert main(UNKNOWN.split()) == 0
    finally:
        sys.setprofile(None)
    to_memory = [chain for chain in chains if chain and chain[-1].startswith("cost/memory/")]
    assert {chain[0] for chain in to_memory} == {"cli/main.py"}
    assert {"cost/memory/device.py", "cost/memory/sum.py"} <= {chain[-1] for chain in to_memory}
    longest = max(to_memory, key=len)
    assert len(longest) <= MOST_FILES, longest


SEQ = "1877"  # a value that nothing else has
A_JOB = ["--model", "llama3-8b", "--cluster", "dgx-h100:8", "--gpus", "8", "--dp", "8", "--global-batch", "64"]
NUMBERS = ["--layers=4", "--hidden=256", "--heads=4", "--topology=ring", "--bandwidth=50GB/s", "--gpus=2", "--dp=2"]


def has(value: object, wanted: str) -> bool:
    if isinstance(value, str):
        return wanted in value.split("=")
    if isinstance(value, Mapping):
        return any(has(item, wanted) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(has(item, wanted) for item in value)
    is_record = isinstance(value, argparse.Namespace) or is_dataclass(type(value))
    return is_record and has(dict(vars(value)), wanted)


def files_entered_with(wanted: str, call: Callable[[], object]) -> list[str]:
    """The files whose functions are called with a value, one after the other, until a `Job` is made of it."""
    entered: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        place = Path(frame.f_code.co_filename)
        if event != "call" or not place.is_relative_to(SOURCE) or not has(list(frame.f_locals.values()), wanted):
            return
        file = place.relative_to(SOURCE).as_posix()
        if entered[-1:] != [file]:
            entered.append(file)
        if frame.f_code is Job.from_dict.__func__.__code__:
            sys.setprofile(None)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("source", ["flags", "bare numbers", "a job file", "a framework's file"])
def test_a_flag_goes_straight_to_the_job(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"flags": A_JOB, "bare numbers": NUMBERS}.get(source)
    if source == "a job file":
        job = [str(tmp_path / "job.yaml")]
        Path(job[0]).write_text("model: tiny\ncluster: laptop:2\nstrategy: {dp: 2}\n")
    elif source == "a framework's file":
        job = [str(tmp_path / "ds_config.json"), *A_JOB]
        Path(job[0]).write_text('{"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true}}')
    assert job is not None
    files = files_entered_with(SEQ, lambda: main(["analyze", *job, f"--seq={SEQ}"]))
    assert (files[0], files[-1]) == ("cli/main.py", "spec/job.py")
    assert len(files) == len(set(files)) <= MOST_FILES, files  # none is entered again


def test_so_do_a_keyword_and_a_control_of_the_page() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-h100:8", "gpus": 8, "dp": 8, "global_batch": 64, "seq": SEQ}
    for call in (lambda: shardwise.predict(**job), lambda: job_of(job)):
        files = files_entered_with(SEQ, call)
        assert files[-1] == "spec/job.py"
        assert len(files) == len(set(files)) < MOST_FILES, files


def test_a_run_is_made_ready_by_at_most_twelve_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is execution.ready_run.__code__:
            called.add("api/execution.py")
            sys.setprofile(watch if event == "call" else None)
        elif event == "call" and called and frame.f_back is not None:
            called.update(files_called(frame)[-1:] if frame.f_back.f_code.co_filename == execution.__file__ else ())

    command = "train --model tiny --cluster laptop:1 --global-batch 2 --precision fp32 --print-torchrun --run-folder"
    sys.setprofile(watch)
    try:
        assert main([*command.split(), str(tmp_path / "run")]) == 0
    finally:
        sys.setprofile(None)
    assert {"api/inputs.py", "launch/preflight.py"} < called
    assert len(called) <= 12, called
