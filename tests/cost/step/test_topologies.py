"""One job on other networks: each row is what `analyze` says of that network by itself."""

from __future__ import annotations

from typing import Any

import pytest

from cli.running import error_line, run, run_json
from shardwise.cost.step.scaling import JOINED
from tables import table

MODEL = "--model llama2-7b --tp 8 --pp 2 --zero 1 --global-batch 128 --seq 4096"
LINK = "--bandwidth 50GB/s --latency 5us"
HIERARCHY = "--topology hierarchical --gpus 64 --bandwidth 450GB/s,50GB/s --latency 2us,5us"

UNEVEN = "--model llama3-8b --cluster dgx-h100:3 --tp 8 --global-batch 48 --seq 4096"  # 24 devices: 4x6


def compared(*flags: str) -> dict[str, Any]:
    found = run_json("analyze", *" ".join(flags).split(), "--compare-topologies")["topologies"]
    assert [one["topology"] for one in found] == list(JOINED)
    return {one["topology"]: one for one in found}


@pytest.fixture(scope="module")
def on_hierarchy() -> dict[str, Any]:
    return compared(MODEL, HIERARCHY)


@table(
    ("name", "network"),
    [
        ("ring", f"--topology ring --gpus 64 {LINK}"),
        ("tree", f"--topology tree --gpus 64 {LINK}"),
        ("hierarchical", HIERARCHY),
        ("switch", f"--topology switch --gpus 64 {LINK}"),
        ("mesh", f"--topology mesh --shape 8x8 {LINK}"),
        ("torus", f"--topology torus --shape 8x8 {LINK}"),
    ],
)
def test_a_row_is_what_analyze_says_of_that_network(on_hierarchy: Any, name: str, network: str) -> None:
    """The flat ones have the outermost link of the hierarchy: 50 GB/s and 5 µs."""
    alone = run_json("analyze", *f"{MODEL} {network}".split())
    row = on_hierarchy[name]
    assert row["predicted_seconds"] == pytest.approx(alone["time"]["predicted_seconds"], rel=1e-9)
    assert set(row["dimensions"]) == set(alone["dimensions"]) == {"tp", "pp", "dp"}
    for dimension, own in row["dimensions"].items():
        told = alone["dimensions"][dimension]
        for figure in ("bytes_sent", "seconds", "exposed_seconds"):
            assert own[figure] == pytest.approx(told[figure], rel=1e-9), (dimension, figure)


def test_memory_is_that_of_the_buffers_and_the_same_everywhere(on_hierarchy: Any) -> None:
    """By hand: sequence parallelism gathers 4096 tokens of 4096 features in bf16; a message is an eighth, both ways."""
    for one in on_hierarchy.values():
        held = {name: own["memory_bytes"] for name, own in one["dimensions"].items()}
        assert held == {"tp": 4096 * 4096 * 2, "pp": 2 * 4096 * 4096 * 2 / 8, "dp": 0.0}
    gathered = compared(MODEL.replace("--zero 1", "--zero 3").replace("--pp 2 ", ""), HIERARCHY)
    assert gathered["ring"]["dimensions"]["dp"]["memory_bytes"] > 0


def test_a_cluster_without_levels_is_cut_into_nodes() -> None:
    found = compared(MODEL, f"--topology switch --gpus 64 {LINK}")
    assert found["hierarchical"]["network"] == "node 8 · network 8"
    assert found["switch"]["network"] == "switch 64"
    assert found["switch"]["predicted_seconds"] <= found["ring"]["predicted_seconds"]


def test_a_torus_keeps_its_shape() -> None:
    found = compared(
        "--model palm-540b --cluster tpu-v4:12x16x16 --tp 12 --global-batch 2048 --seq 2048 --zero 3 --no-sp"
    )
    assert found["torus"]["network"] == "torus 12x16x16" and found["mesh"]["network"] == "mesh 12x16x16"
    assert found["torus"]["predicted_seconds"] < found["mesh"]["predicted_seconds"]


def test_groups_that_straddle_every_network_are_priced() -> None:
    found = compared(UNEVEN)
    assert found["mesh"]["network"] == "mesh 4x6"
    assert min(one["predicted_seconds"] for one in found.values()) == found["hierarchical"]["predicted_seconds"] > 0


def test_it_fits_a_narrow_console() -> None:
    shown = run("analyze", *MODEL.split(), *HIERARCHY.split(), "--compare-topologies", columns=80)
    assert max(map(len, shown.out.splitlines())) <= 80
    assert all(name in shown.out for name in JOINED)


@table("cluster", ["dgx-h100:1 --gpus 1", "dgx-h100:1+dgx-a100:1 --pp 2 --set strategy.stage_layers=balanced"])
def test_one_device_and_several_kinds_are_refused(cluster: str) -> None:
    refused = run("analyze", *f"--model llama3-8b --global-batch 16 --cluster {cluster} --compare-topologies".split())
    assert error_line(refused).startswith("--compare-topologies: is for two or more devices of one kind")
