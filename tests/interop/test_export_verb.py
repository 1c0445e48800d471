"""`shardwise export`: the configuration on standard output, what it does not carry on standard error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.export import run
from shardwise.interop.frameworks import TARGETS
from shardwise.spec import Job, SpecError

TEXT = "--model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --zero 1 --global-batch 1024 --seq 8192"
JOB = TEXT.split()


@pytest.mark.parametrize("name", TARGETS)
def test_every_framework(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*JOB, "--to", name]) == 0
    printed = capsys.readouterr()
    (expected,) = TARGETS[name].export(_job()).files.values()
    assert printed.out == expected
    assert "notes:" in printed.err


def _job() -> Job:
    return Job.from_dict(
        {
            "model": "llama3-70b",
            "cluster": "dgx-h100:64",
            "strategy": {"tp": 8, "pp": 4, "zero": 1},
            "training": {"global_batch": 1024, "seq": 8192},
        }
    )


def test_losses_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    run([*JOB, "--schedule", "zb-h1", "--to", "megatron"])
    assert "strategy.schedule = zb-h1: only 1f1b and interleaved" in capsys.readouterr().err


def test_strict_refuses() -> None:
    assert run([*JOB, "--to", "megatron", "--strict"]) == 0
    with pytest.raises(SpecError, match=r"cannot express strategy\.sequence_parallel = True"):
        run([*JOB, "--to", "deepspeed", "--strict"])


def test_json_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*JOB, "--to", "deepspeed", "--json", "--out", str(tmp_path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lost"][0]["field"] == "strategy.sequence_parallel"
    assert (tmp_path / "ds_config.json").read_text(encoding="utf-8") == data["files"]["ds_config.json"]
    assert run([*JOB, "--to", "megatron", "--out", str(tmp_path / "new" / "args.txt")]) == 0
    assert (tmp_path / "new" / "args.txt").read_text(encoding="utf-8").startswith("# Megatron-LM")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--to: is missing"),
        (["--to", "deepsped"], "did you mean deepspeed"),
        (["--to", "megatron", "--out", "/dev/null/x"], "--out"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecError) as error:
        run([*JOB, *arguments])
    assert message in str(error.value)
