"""`shardwise bench step`: a real step of a tiny model on the CPU, beside what `analyze` says of the same job."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest

import shardwise
from shardwise.cli.main import main
from shardwise.measure.step import PRESETS, cluster_name_here
from shardwise.spec.clusters import cluster_from

JOB = ["--model", "tiny", "--global-batch", "4", "--microbatch", "2", "--seq", "32", "--precision", "fp32"]
ON_CPU = ["--cluster", "laptop:1"]  # also where there is a GPU


def measured(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["bench", "step", *JOB, "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_step_is_measured_beside_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, *ON_CPU, "--steps", "3", "--warmup", "1")
    assert len(found["step_seconds"]) == 3
    assert found["seconds"] == statistics.median(found["step_seconds"])
    assert found["least_seconds"] == min(found["step_seconds"]) <= max(found["step_seconds"]) == found["most_seconds"]
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["seconds"])
    predicted = shardwise.predict(
        model="tiny",
        cluster="laptop:1",
        global_batch=4,
        seq=32,
        strategy={"microbatch": 2},
        training={"precision": "fp32"},
    )
    assert found["predicted_seconds"] == pytest.approx(predicted.predicted_seconds)
    assert found["seconds_error"] == pytest.approx(predicted.predicted_seconds / found["seconds"] - 1)
    assert found["mfu"] == pytest.approx(predicted.mfu * predicted.predicted_seconds / found["seconds"])
    # What the tensors of a step take is counted; the prediction knows it to some percent.
    assert found["predicted_bytes"] == predicted.memory_bytes
    assert found["memory_error"] == pytest.approx(0, abs=0.2)
    assert found["peak_bytes"] == pytest.approx(found["predicted_bytes"] / (1 + found["memory_error"]))
    assert found["first_loss"] == pytest.approx(math.log(512), rel=0.05)  # tokens are random, and new in each step
    assert found["last_loss"] == pytest.approx(found["first_loss"], rel=0.1)
    assert found["last_loss"] != found["first_loss"]
    assert found["graphs"] == "not used: a CPU has none"


@pytest.mark.slow
def test_a_seed_makes_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (measured(capsys, "--steps", "1", "--warmup", "1", "--seed", seed) for seed in "112")
    assert first["last_loss"] == again["last_loss"] != other["last_loss"]


def test_the_table_names_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *JOB, *ON_CPU, "--recompute", "full", "--steps", "1", "--warmup", "1"]) == 0
    shown = capsys.readouterr().out
    title = "tiny, 4 × 32 tokens in 2 microbatches, fp32, recompute full, on CPU: 1 step"
    assert title in shown and "peak memory" in shown and "MFU" in shown


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["--steps", "0"], "--steps: 0 is too few", 2),
        (["--warmup", "-1"], "--warmup: -1 is too few", 2),
        (["--stepz", "3"], "did you mean --steps", 2),
        (["--precision", "bf17"], "--precision", 2),
        (["--cluster", "laptop:2"], "cluster: the job has 2 ranks, this command 1", 2),
        (["--cluster", "laptop", "--gpus", "1", "--set", "run.device=cuda"], "cluster: PyTorch finds no GPU here", 2),
        (["--graphs", "true"], "training.graphs: there are no CUDA graphs: a CPU has none", 2),
        (["--graphs", "maybe"], "--graphs", 2),
        (["--model", "llama3-405b"], "model: llama3-405b needs", 1),
    ],
    ids=str,
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "step", *JOB, *arguments]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_every_known_gpu_has_a_preset_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for called, cluster in PRESETS.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, called=called: called)
        assert cluster_name_here("cuda") == cluster
        model = cluster_from(cluster).device.name.removeprefix("rtx-").partition("-")[0]
        assert model.upper() in called
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA X1")
    with pytest.raises(shardwise.SpecError, match="no preset is known for NVIDIA X1"):
        cluster_name_here("cuda")
