"""`shardwise doctor`: each check on this machine, and what it says where something is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli.running import error_line, run, run_json
from launch.warm import warm_ranks
from shardwise.measure.doctor.host import (
    Examination,
    check_clocks,
    check_disk,
    check_loopback,
    check_open_files,
    check_ports,
    examine,
)


@pytest.fixture
def asked(tmp_path: Path) -> Examination:
    return Examination(folder=tmp_path, processes=2, device="cpu")


def test_a_whole_examination_with_a_real_all_reduce(tmp_path: Path) -> None:
    job = ["--model", "tiny", "--cluster", "laptop:2", "--global-batch", "8", "--seq", "64"]
    with warm_ranks():
        found = run_json("doctor", *job, "--set", f"run.folder={tmp_path / 'later'}")
    checks = {one["check"]: one for one in found["findings"]}
    assert found["ok"]
    assert list(checks) == ["loopback", "ports", "shared memory", "open files", "clock", "disk space", "disk speed",
                            "Python", "PyTorch", "CPU", "device memory", "all-reduce"]  # fmt: skip
    assert f"free in {tmp_path}" in checks["disk space"]["figure"]
    assert checks["all-reduce"]["figure"].startswith("4.00 MiB over 2 cpu processes in ")
    assert checks["all-reduce"]["figure"].endswith("the sum is right")
    assert list(tmp_path.iterdir()) == []


def test_one_machine_needs_loopback_and_no_port(asked: Examination) -> None:
    assert check_loopback(asked).status == "pass"
    assert check_ports(asked).status == "pass"


def test_too_few_open_files_for_many_processes(asked: Examination) -> None:
    found = check_open_files(replace(asked, processes=10**9))
    assert (found.status, found.remedy) in (("warn", "ulimit -n 64000000000"), ("pass", ""))


def test_a_disk_that_is_too_small_or_too_slow_for_the_checkpoints(asked: Examination) -> None:
    space, speed = check_disk(replace(asked, checkpoint_bytes=1e18))
    assert (space.status, speed.status) == ("fail", "warn")
    assert "timeouts.checkpoint is 600 s" in speed.remedy
    space, speed = check_disk(replace(asked, checkpoint_bytes=1e3))
    assert space.status == "pass"
    assert "part of a checkpoint in" in speed.figure
    assert list(asked.folder.iterdir()) == []


def test_clocks(asked: Examination) -> None:
    ours, theirs = check_clocks(replace(asked, others=("no.such.host.invalid",)))
    assert (ours.check, ours.status) == ("clock", "pass")
    assert (theirs.check, theirs.status) == ("clock of no.such.host.invalid", "fail")


def test_a_folder_that_cannot_be_written_is_a_finding_and_the_rest_goes_on() -> None:
    findings = examine(Examination(folder=Path("/proc"), processes=2, device="cpu"))
    found = {one.check: one for one, _ in zip(findings, range(6))}
    assert found["clock"].status == "fail"
    assert "disk space" in found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--run-folder", "/no/such"], "--run-folder: '/no/such' is not a folder; make it, or name another"),
        (["--hosts", "a,,b"], "--hosts: '' is not a host; write them like node-1,node-2"),
        (["--hosts=-oProxyCommand=x"], "--hosts: '-oProxyCommand=x' is not a host; write them like node-1,node-2"),
        (["no.yaml"], "is not there"),
        (["--tp", "2"], "model: is missing"),
        (["--jsno"], "did you mean --json"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], line: str) -> None:
    assert line in error_line(run("doctor", *arguments))
