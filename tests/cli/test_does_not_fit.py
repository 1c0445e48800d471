"""What does not fit: status 1 for scripts, and advice that holds when it is followed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.running import does_not_fit_line, run, run_json
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Device

SMALL = "--global-batch 64 --seq 2048 --microbatch 1 --schedule 1f1b --recompute full --cp 1 --zero 0,1,3 --out -"


def plan(cluster: str, *more: str, model: str = "llama3-70b") -> Any:
    return run("plan", "--model", model, "--cluster", cluster, *SMALL.split(), *more)


@pytest.mark.slow
def test_the_number_of_devices_that_is_named_is_enough_and_half_of_it_is_not() -> None:
    line = does_not_fit_line(plan("dgx-h100:1", "--no-offload"))
    assert "the smallest strategy" in line and "h100-sxm has 79.1 GiB" in line
    devices = int(re.findall(r"use ([\d,]+) devices", line)[0])
    assert plan(f"dgx-h100:{devices // 8}", "--no-offload").status == 0
    assert plan(f"dgx-h100:{devices // 16}", "--no-offload").status == 1


def test_more_devices_are_no_advice_for_plain_data_parallelism(tmp_path: Path) -> None:
    """Each holds the whole model, however many there are."""
    line = does_not_fit_line(plan("dgx-h100:1", "--for", "ddp"))
    assert not re.search(r"use [\d,]+ devices", line)
    memory = int(re.findall(r"use devices with ([\d,]+) GiB", line)[0].replace(",", ""))
    for size, status in ((memory, 0), (memory - 2, 1)):
        device = {**presets.load("device", Device, "h100-sxm").to_dict(), "memory": size * 2**30}
        own = tmp_path / f"{size}.yaml"
        own.write_text(json.dumps({**cluster_from("dgx-h100:1").to_dict(), "device": device}), encoding="utf-8")
        assert plan(str(own), "--for", "ddp").status == status


def test_a_cap_that_is_too_low_is_what_is_wrong() -> None:
    line = does_not_fit_line(plan("dgx-h100:1", "--max-memory", "1GB", model="llama3-8b"))
    assert "954 MiB as capped" in line and line.endswith("leave out --max-memory")


@pytest.mark.parametrize(
    ("job", "advice"),
    [
        ("--model llama3-8b --cluster dgx-h100:1 --zero 1 --global-batch 8 --seq 13312", "recompute|zero|tp|pp"),
        pytest.param(
            "--model llama3-70b --cluster dgx-h100:1 --zero 0 --global-batch 64", "offload", marks=pytest.mark.slow
        ),
    ],
)
def test_analyze_says_what_would_fit(job: str, advice: str) -> None:
    data = run_json("analyze", *job.split())
    assert data["memory"]["fit"] == "does not fit" and "best_change" not in data
    assert re.search(advice, data["what_would_fit"])
    text = run("analyze", *job.split())
    assert text.status == 1
    assert f"What would fit {data['what_would_fit']}" in " ".join(text.out.split())


def test_what_fits_ends_with_0_be_it_tight() -> None:
    fields = "--model llama3-8b --cluster dgx-h100:1 --zero 3 --global-batch 16 --seq 8192 --microbatch"
    assert run_json("analyze", *fields.split(), "1")["memory"]["fit"] == "fits"
    tight = "--model llama3-8b --cluster dgx-h100:1 --zero 1 --tp 1 --global-batch 8 --seq 10240"
    data = run_json("analyze", *tight.split())
    assert data["memory"]["fit"] == "tight"
    text = run("analyze", *tight.split())
    assert text.status == 0
    likely = f"tight, fits with {data['memory']['fit_probability']:.0%} probability"
    assert likely in text.out and "free, to fit with 95%" in " ".join(text.out.split())


def test_the_risk_that_is_named_is_enough() -> None:
    """A job for which only tight strategies are left; with the risk that the error names one of them is planned."""
    fields = "--zero 1 --tp 1 --pp 1 --cp 1 --global-batch 8 --seq 10240 --recompute none --microbatch 1 --no-offload"
    job = ["--model", "llama3-8b", "--cluster", "dgx-h100:1", *fields.split()]
    line = does_not_fit_line(run("plan", *job))
    (risk,) = re.findall(r"accept --memory-risk (\d+%)", line)
    again = ["--memory-risk", risk, "--out", "-"]
    assert run("plan", *job, *again).status == 0
    assert "--memory-risk" in run("plan", "--model", "llama3-8b", "--max-memory", "70GB", *again).err
