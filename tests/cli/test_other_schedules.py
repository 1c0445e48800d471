"""Pipeline schedules of another package: listed, verified, priced, searched, drawn and run, without a change here.

The package is "installed" as pip would leave it, modules and entry points in a folder on PYTHONPATH: the example of the
documents, and one that interleaves three chunks per rank and leaves no choice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_schedule.py"  # 1F1B with one more forward pass ahead
MODULE = """
from dataclasses import replace

from shardwise.pipeline.builders.flush import interleaved
from shardwise.spec.schedules import ScheduleRecord


def thrice(ranks, microbatches):
    return replace(interleaved(ranks, microbatches, 3), name="thrice")


SCHEDULES = (ScheduleRecord(name="thrice", builder="thrice:thrice", source="a test", chunks=3, in_rounds=True),)
"""
ENTRY_POINTS = "[shardwise.schedules]\neager = own_schedule:EAGER\nothers = thrice:SCHEDULES\n"
MODEL = {"name": "small", "layers": 6, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "max_seq": 64}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "own_schedule.py").write_text(EXAMPLE.read_text(encoding="utf-8"))
    (folder / "thrice.py").write_text(MODULE)
    (folder / "model.yaml").write_text(json.dumps(MODEL))
    info = folder / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def shardwise(installed: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    command = [sys.executable, "-m", "shardwise", *arguments.split()]
    return subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, timeout=300)


def answer(installed: Path, arguments: str) -> Any:
    result = shardwise(installed, arguments + " --json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def job(schedule: str) -> str:
    return f"--model model.yaml --cluster laptop:2 --pp 2 --global-batch 8 --seq 32 --schedule {schedule}"


def test_they_are_listed(installed: Path) -> None:
    rows = {row["name"]: row for row in answer(installed, "list schedules")}
    assert rows["eager"]["bubble"] == "simulated" and rows["eager"]["engine"] == "runs"
    assert (rows["thrice"]["stages per rank"], rows["thrice"]["microbatches"]) == ("3", "multiples of pp")
    assert rows["1f1b"]["bubble"] == "closed form"


def test_they_are_verified(installed: Path) -> None:
    code = (
        "from shardwise.pipeline import build, verify\n"
        "for name in ('eager', 'thrice'):\n"
        "    for ranks in (1, 2, 3, 5):\n"
        "        for rounds in (1, 2, 4):\n"
        "            verify(build(name, ranks, rounds * ranks))"
    )
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=120)


def test_they_are_priced(installed: Path) -> None:
    """By what only its order tells: a microbatch more in flight; and as the same order under its own name."""
    plain, eager = (answer(installed, f"analyze {job(name)}") for name in ("1f1b", "eager"))
    in_flight = [one["memory"]["activations_bytes"] for one in (plain, eager)]
    assert in_flight[1] == pytest.approx(3 / 2 * in_flight[0])
    chosen, fixed = (answer(installed, f"analyze {job(name)}") for name in ("interleaved --interleave 3", "thrice"))
    assert fixed["time"]["predicted_seconds"] == pytest.approx(chosen["time"]["predicted_seconds"], rel=1e-6)
    assert fixed["memory"] == chosen["memory"]


@pytest.mark.slow
def test_they_are_searched(installed: Path) -> None:
    fixed = answer(installed, f"plan {job('eager')}")
    assert {one["strategy"]["schedule"] for one in fixed["candidates"]} == {"eager"}
    either = answer(installed, f"plan {job('eager,thrice')} --microbatch 1")
    assert {one["strategy"]["schedule"] for one in either["candidates"]} == {"eager", "thrice"}


@pytest.mark.slow
def test_a_batch_that_does_not_divide_leaves_one_out(installed: Path) -> None:
    found = answer(installed, f"plan {job('eager,thrice')} --global-batch 7 --microbatch 1")
    assert {one["strategy"]["schedule"] for one in found["candidates"]} == {"eager"}


@pytest.mark.slow
def test_they_are_drawn(installed: Path) -> None:
    result = shardwise(installed, "explain bubble --pp 3 --microbatches 6 --schedule eager")
    assert result.returncode == 0, result.stderr
    assert "eager: 3 ranks, 6 microbatches" in result.stdout and "F0" in result.stdout
    rows = [row["schedule"] for row in answer(installed, "explain bubble --pp 3 --microbatches 7")["tables"][0]["rows"]]
    assert "eager" in rows and "thrice" not in rows  # which takes three at a time


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager", pytest.param("thrice", marks=pytest.mark.slow)])
def test_they_run_as_one_process_does(installed: Path, schedule: str) -> None:
    found = answer(installed, f"verify {job(schedule)} --steps 1")
    assert found["ok"] is True
    assert max(found["worst"].values()) < 1e-5


def test_a_name_that_nobody_registers_is_one_line(installed: Path) -> None:
    result = shardwise(installed, f"analyze {job('eagre')}")
    assert result.returncode == 2
    assert result.stderr.strip().endswith("--schedule: 'eagre' is not a pipeline schedule; did you mean eager?")


def test_a_package_that_does_not_import_is_named(installed: Path) -> None:
    broken = installed.parent / "broken"
    info = broken / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardwise.schedules]\nnone = not_there:SCHEDULES\n")
    result = shardwise(broken, "list schedules")
    assert result.returncode == 2 and "not_there" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
