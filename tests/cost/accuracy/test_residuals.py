"""Error bars: the table is what the rows give, and a bar says on what it stands."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.cost.accuracy.residuals import COVERAGE, FILE, error_bar, residuals
from shardwise.spec.job import Job

ROOT = Path(__file__).parents[3]
WIDEST = {what: max(one.band for one in residuals().values() if one.what == what) for what in ("time", "memory")}


def job(model: str = "llama3-8b", cluster: str = "dgx-h100", stack: Any = "shardwise") -> Job:
    return Job.from_dict({"model": model, "cluster": cluster, "stack": stack})


def test_the_table_is_what_the_published_rows_give() -> None:
    run = subprocess.run(
        [sys.executable, "bench/residuals.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nrun `python bench/residuals.py` and look at what changed"


def test_the_table_is_shipped() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    shipped = packages["package-data"]["shardwise"]
    assert FILE in {path for pattern in shipped for path in (ROOT / "src" / "shardwise").glob(pattern)}


def test_bands_of_unseen_models_are_no_narrower_than_the_fit_says() -> None:
    fitted = [one for one in residuals().values() if one.what == "time" and one.left_out_mape is not None]
    assert {one.of for one in fitted} == {"a100-80gb", "h100-sxm", "h100-sxm-96gb-hbm2e", "b200", "gb200"}
    rows = sum(one.rows for one in fitted)
    left_out = sum(one.rows * (one.left_out_mape or 0) for one in fitted) / rows
    assert left_out > sum(one.rows * one.mape for one in fitted) / rows
    assert all(one.band > one.mape for one in fitted)


@pytest.mark.parametrize(("model", "kind"), [("llama3-8b", "dense"), ("mixtral-8x7b", "moe")])
def test_a_known_device_has_the_bar_of_its_rows(model: str, kind: str) -> None:
    bar, known = error_bar(job(model)), residuals()["time", "h100-sxm", kind]
    # The truth at either end of the bar is off by the band, as a share of the truth.
    assert 1 / (1 + bar.time_low) - 1 == pytest.approx(known.band)
    assert 1 / (1 + bar.time_high) - 1 == pytest.approx(-known.band)
    assert bar.time_low < 0 < bar.time_high
    assert f"{COVERAGE:.0%} of {known.rows} published runs" in bar.basis
    assert "on h100-sxm" in bar.basis


@pytest.mark.parametrize(
    ("model", "cluster", "words"),
    [
        ("llama3-8b", "tpu-v5p:2x2x2", "no published runs of dense models on tpu-v5p: the widest of those known"),
        (
            "mixtral-8x7b",
            "dgx-a100",
            "no published runs of mixtures of experts on a100-80gb: the widest of those known",
        ),
    ],
)
def test_an_unknown_device_has_the_widest_bar_and_says_so(model: str, cluster: str, words: str) -> None:
    bar = error_bar(job(model, cluster))
    assert words in bar.basis
    assert bar.time_high == pytest.approx(1 / (1 - WIDEST["time"]) - 1)


def test_memory_goes_by_the_software_not_by_the_device() -> None:
    on_a_gpu, on_a_tpu = (
        error_bar(job(cluster=cluster, stack="torchtitan")) for cluster in ("dgx-h100", "tpu-v4:2x2x2")
    )
    assert (on_a_gpu.memory_low, on_a_gpu.memory_high) == (on_a_tpu.memory_low, on_a_tpu.memory_high)
    known = residuals()["memory", "torchtitan", "dense"]
    assert f"memory: {COVERAGE:.0%} of {known.rows} published runs" in on_a_gpu.basis
    own = error_bar(job(stack={"name": "my own"}))
    assert own.memory_high == pytest.approx(1 / (1 - WIDEST["memory"]) - 1)
    assert "no published runs of dense models with my own" in own.basis
