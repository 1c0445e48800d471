"""Error bars: the file is what the rows give, and a bar says on what it stands."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.job import Job
from shardwise.uncertainty.residuals import (
    COVERAGE,
    FILE,
    error_bar,
    known_errors,
    memory_errors,
    memory_quantile,
    noise_of,
    residuals,
    weighed,
)

ROOT = Path(__file__).parents[2]


def job(model: str = "llama3-8b", cluster: str = "dgx-h100", stack: Any = "megatron-core") -> Job:
    return Job.from_dict({"model": model, "cluster": cluster, "stack": stack})


@pytest.mark.slow
def test_the_file_has_the_errors_of_the_published_rows() -> None:
    command = [sys.executable, "bench/residuals.py", "--check", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}\nrun `python bench/residuals.py` and look at what changed"


@pytest.mark.slow
def test_the_file_has_the_errors_with_something_left_out() -> None:
    command = [sys.executable, "bench/residuals.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_bars_hold_on_sources_that_neither_they_nor_the_fit_have_seen() -> None:
    """In every class of 15 rows or more, 75% to 90% of the reports lie in the 80% bar."""
    code = (
        "from coverage import by_class, class_coverage, held_times\n"
        "times = held_times()\n"
        "every = class_coverage('all', times)\n"
        "assert 0.75 <= every.share <= 0.90 and 0.75 <= every.share_of_sources <= 0.90, every\n"
        "for one in by_class(times):\n"
        "    assert one.rows < 15 or one.share >= 0.75, one"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_file_is_shipped() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    shipped = packages["package-data"]["shardwise"]
    assert FILE in {path for pattern in shipped for path in (ROOT / "src" / "shardwise").glob(pattern)}


def test_what_the_fit_has_not_seen_is_further_off() -> None:
    fitted = [one for one in residuals() if one.what == "time" and one.fitted]
    assert len(fitted) > 300
    mean = {
        name: sum(abs(getattr(one, name)) for one in fitted) / len(fitted)
        for name in ("in_sample", "left_out_source", "left_out_device")
    }
    assert mean["in_sample"] < mean["left_out_source"]
    assert mean["in_sample"] < mean["left_out_device"]


def test_a_bar_holds_as_many_rows_as_it_says() -> None:
    """By weight, of the rows that it names; the report then lies in the bar around the prediction."""
    bar = error_bar(job())
    low, high = -math.log1p(bar.time_high), -math.log1p(bar.time_low)  # of predicted / true
    assert bar.time_of == "fitted devices, dense"
    known = known_errors()
    rows = weighed(
        [
            row
            for row in known.errors
            if row.standing.kind == "dense"
            and known.is_fitted(row.standing.device, row.source)
            and known.is_framework_known(row.standing.stack, row.source)
        ]
    )
    everything = sum(weight for _, weight in rows)
    inside = sum(weight for one, weight in rows if low - 1e-9 <= one.error <= high + 1e-9) / everything
    assert COVERAGE <= inside < COVERAGE + 0.1
    beyond = (sum(weight for one, weight in rows if one.error > high + 1e-9) / everything, 1 - inside)
    assert 0 < beyond[0] <= (1 - COVERAGE) / 2 < beyond[1] + 0.1  # as many above as below
    sources = len({one.source for one, _ in rows})
    assert f"{COVERAGE:.0%} of {len(rows)} runs from {sources} sources not used in the fit" in bar.basis


@pytest.mark.parametrize(
    ("model", "cluster", "stack", "words"),
    [
        ("llama3-8b", "laptop", "megatron-core", "devices without a fit, dense"),
        ("mixtral-8x7b", "workstation-4090", "megatron-core", "devices without a fit"),
        ("llama3-8b", "dgx-h100", {"name": "my own"}, "framework not seen"),
    ],
)
def test_what_is_further_from_any_row_has_a_wider_bar_and_says_so(
    model: str, cluster: str, stack: Any, words: str
) -> None:
    bar, closest = error_bar(job(model, cluster, stack)), error_bar(job(model))
    assert words in bar.basis
    assert bar.time_low <= closest.time_low and bar.time_high >= closest.time_high
    if model != "mixtral-8x7b":  # of mixtures on devices without a fit there are few rows, and their class is as wide
        assert (bar.time_low, bar.time_high) != (closest.time_low, closest.time_high)


def test_beyond_the_largest_run_a_bar_is_no_narrower() -> None:
    largest = known_errors().largest("h100-sxm")
    within, beyond = (error_bar(job(cluster=f"dgx-h100:{nodes}")) for nodes in (largest // 8, largest // 8 + 1))
    assert beyond.time_high >= within.time_high


def test_memory_goes_by_the_software_not_by_the_device() -> None:
    gpu, tpu = (error_bar(job(cluster=cluster, stack="torchtitan")) for cluster in ("dgx-h100", "tpu-v4:2x2x2"))
    assert (gpu.memory_low, gpu.memory_high) == (tpu.memory_low, tpu.memory_high)
    assert gpu.memory_of == "torchtitan, dense"
    assert error_bar(job(stack={"name": "my own"})).memory_of == "all frameworks"


@pytest.mark.parametrize("stack", ["megatron-core@2022", "torchtitan", "nanotron", "my own"])
def test_less_risk_asks_for_more_memory(stack: str) -> None:
    own = job(stack=stack if stack != "my own" else {"name": stack})
    factors = [memory_quantile(own, risk) for risk in (0.5, 0.2, 0.1, 0.05, 0.01, 0.0)]
    assert factors == sorted(factors)
    largest = max(math.exp(-one.error) for one in memory_errors())
    assert factors[-1] == pytest.approx(largest)


def test_a_known_framework_needs_its_own_quantile() -> None:
    """Of n rows all but a share of the risk, and one to come, need no more."""
    rows = sorted(-one.error for one in memory_errors() if one.standing.stack == "megatron-core@2022")
    rank = math.ceil(0.9 * (len(rows) + 1))
    assert memory_quantile(job(stack="megatron-core@2022"), 0.1) == pytest.approx(math.exp(rows[rank - 1]))


def test_strategies_of_one_job_are_told_apart_better_than_a_step_is_predicted() -> None:
    noise = noise_of(job())
    assert 0.01 < noise.share < error_bar(job()).time_high
    assert "pairs of published runs (dense)" in noise.basis
