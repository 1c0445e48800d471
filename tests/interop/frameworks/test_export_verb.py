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
    assert run([*JOB, "--to", name, "--anyway"]) == 0
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


def test_what_the_framework_makes_larger_is_refused_or_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """Accelerate has neither tensor parallelism with ZeRO-1 nor pipelines: what would be left does not fit."""
    with pytest.raises(SpecError, match=r"as accelerate runs it, the job does not fit: .* where this job takes"):
        run([*JOB, "--to", "accelerate"])
    assert run([*JOB, "--to", "accelerate", "--anyway", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)["priced"]
    assert priced["exported"]["memory_bytes"] > 80 * 2**30 > priced["job"]["memory_bytes"]
    assert run([*JOB, "--to", "nanotron"]) == 0
    assert "priced: " in capsys.readouterr().err
    own = ["--stack", "megatron-core", "--precision", "bf16-fp32-grads"]
    assert run([*JOB, *own, "--to", "megatron"]) == 0
    assert "priced: " not in capsys.readouterr().err  # Megatron runs just that


def test_selective_recompute_that_megatron_lacks_is_priced_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Norms are fused into products and the activation of a dense MLP is kept: nothing would be made again."""
    text = (
        "--model llama3-70b --cluster dgx-h100:64 --tp 2 --zero 3 --global-batch 1024 --seq 8192 --stack megatron-core"
    )
    arguments = [*text.split(), "--recompute", "selective", "--to", "megatron"]
    with pytest.raises(SpecError, match=r"does not fit: .* 95\.7 GiB \(without recompute\), where .* 68\.2 GiB"):
        run(arguments)
    run([*arguments, "--anyway"])
    printed = capsys.readouterr()
    assert "--recompute" not in printed.out
    assert "strategy.recompute = selective: no module of --recompute-modules recomputes exactly that" in printed.err


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


@pytest.mark.parametrize("to", TARGETS)
def test_the_data_says_whether_it_fits_as_the_command_does(to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page shows these words, so that nothing fits there which the command refuses."""
    assert run([*JOB, "--to", to, "--anyway", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)["priced"]["exported"]
    try:
        assert run([*JOB, "--to", to]) == 0 and there["fit"] != "does not fit"
    except SpecError as error:
        assert "does not fit" in str(error) and there["fit"] == "does not fit"
