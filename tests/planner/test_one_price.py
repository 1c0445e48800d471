"""One strategy has one price: in the ranking, the families, the answers to questions, the file that is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import run_json

GRID = {
    "8B, uneven stages": "--model llama3-8b --cluster dgx-h100:1 --global-batch 64 --seq 8192 --tp 1,2 --cp 1 "
    "--schedule zbv,1f1b --microbatch 1 --why-not pp=2 --why-not tp=2",
    "8B, updates that copy gradients": "--model llama3-8b --cluster dgx-h100:1 --global-batch 64 --seq 512 --cp 1 "
    "--stack deepspeed --tp 1,2 --pp 1 --microbatch 1 --why-not zero=3 --why-not tp=2",
}
MORE = {
    "experts": "--model qwen3-30b-a3b --cluster dgx-h100:2 --global-batch 64 --seq 4096 --cp 1 "
    "--schedule 1f1b,interleaved --microbatch 1,2 --why-not ep=4 --why-not pp=2",
    "8B, as asked": "--model llama3-8b --cluster dgx-h100:1 --global-batch 128 --seq 8192 "
    "--why-not pp=2 --why-not pp=4 --why-not cp=2 --what-if nvlink=900GB/s",
    "layers that do not divide": "--model llama3.2-3b --cluster dgx-a100:1 --global-batch 48 --seq 4096 --cp 1 "
    "--why-not pp=8 --why-not zero=3 --pareto memory",
    "offload": "--model llama3-8b --cluster dgx-h100:1 --global-batch 64 --seq 8192 --cp 1 --offload --max-memory 40% "
    "--schedule 1f1b --why-not offload=optimizer --pareto memory",
    "70B": "--model llama3-70b --cluster dgx-h100:8 --global-batch 256 --seq 8192 --why-not tp=8 --why-not pp=4",
}


def priced(data: Any) -> Iterator[dict[str, Any]]:
    """Every strategy with a price, wherever it stands."""
    if isinstance(data, dict):
        if "words" in data and "predicted_seconds" in data:
            yield data
        for name, one in data.items():
            if name != "what_if":  # another machine
                yield from priced(one)
    elif isinstance(data, list):
        for one in data:
            yield from priced(one)


def check(command: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    data = run_json("plan", *command.split(), "--out", str(path))
    prices: dict[str, tuple[Any, ...]] = {}
    for one in priced(data):
        price = (one["strategy"], one["predicted_seconds"], one["memory"]["total_bytes"], one["mfu"])
        assert prices.setdefault(one["words"], price) == price
    layouts = {one["words"]: one for one in data["layouts"]}
    order = [one["words"] for one in data["candidates"]]
    for family in data["families"]:
        same = [one["words"] for one in data["candidates"] if dimensions(one) == family["dimensions"]]
        assert same[:1] == ([family["best"]["words"]] if family["best"] else [])
    for answer in data["why_not"]:
        name, _, value = answer["wanted"].partition(" ")
        if name in ("tp", "pp", "ep") and answer["best"] is not None:
            same = [one for one in order if f"{name} {value} " in one.replace("(", " ")]
            assert answer["best"]["words"] == same[0]
            assert same[0] in layouts
    first = data["layouts"][0]
    analysis = run_json("analyze", str(path))
    assert analysis["job"]["strategy"] == first["strategy"]
    assert analysis["time"]["predicted_seconds"] == pytest.approx(first["predicted_seconds"], rel=1e-12)
    assert analysis["memory"]["total_bytes"] == pytest.approx(first["memory"]["total_bytes"], rel=1e-12)


def dimensions(one: dict[str, Any]) -> list[str]:
    return [name for name in ("tp", "cp", "pp", "ep") if one["strategy"].get(name, 1) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_every_table_has_the_same_price_of_a_strategy(name: str, tmp_path: Path) -> None:
    check(GRID[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_table_has_the_same_price_of_a_strategy_of_more_jobs(name: str, tmp_path: Path) -> None:
    check(MORE[name], tmp_path)
