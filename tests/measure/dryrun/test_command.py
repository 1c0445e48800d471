"""`shardwise dryrun` on the command line: mistakes end in one line before anything starts; text and data agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.spec.clusters import cluster_from

TINY = "dryrun --model tiny --cluster dgx-h100:1 --dp 8 --global-batch 8 --seq 64"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (f"{TINY} --world 12", "12 is not a whole number of"),
        (f"{TINY} --tp 4 --dp 2 --world 18", "--world: 18 is not a multiple of tp 4"),
        (f"{TINY} --world many", "--world"),
        (f"{TINY} --rank 8", "--rank: 8 is not one of the job's 8 ranks"),
        (f"{TINY} --rank -1", "--rank: '-1' is not a whole number"),
        (f"{TINY} --skew 0", "--skew: '0' is not between"),
        (f"{TINY} --precision mxfp8", "mxfp8"),
        (f"{TINY} --wordl 8", "did you mean --world"),
        (f"{TINY} --tp 3 --dp 1 --gpus 3", "heads"),
        ("dryrun no-such-job.yaml", "no-such-job.yaml"),
        (
            "dryrun --model tiny --cluster laptop:3 --pp 2 --set strategy.stage_tp=[2,1] --global-batch 4 --seq 64",
            "strategy.stage_tp: a dry run traces a rank among stages of equal degrees; `shardwise analyze` prices",
        ),
    ],
)
def test_a_mistake_ends_in_one_line(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_a_world_of_another_size_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{TINY} --zero 3 --world 64 --global-batch 64 --rank 63 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world"], found["rank"], found["coordinates"]["dp"]) == (64, 63, 63)
    assert found["memory"]["peak_bytes"] == pytest.approx(sum(found["memory"]["parts"].values()))
    assert {one["ranks"] for one in found["collectives"] if one["dimension"] == "dp"} == {64}
    assert found["flops"]["traced"]["attention"] == pytest.approx(found["flops"]["planned"]["attention"])


@pytest.mark.slow
def test_the_same_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{TINY} --zero 1".split()) == 0
    printed = capsys.readouterr().out
    for word in ("rank 0 of 8", "optimizer states", "reduce-scatter of gradients", "Beside the plan", "all tensors"):
        assert word in printed


@pytest.mark.slow
def test_what_does_not_fit_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_from("dgx-h100:1")
    small = replace(cluster, device=replace(cluster.device, memory=2.0 * 2**30))  # less than the driver's and ours
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps({**cluster.to_dict(), "device": small.device.to_dict()}), encoding="utf-8")
    assert main(TINY.replace("dgx-h100:1", str(path)).split()) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Does not fit" in printed and "a device has 1.11 GiB" in printed
