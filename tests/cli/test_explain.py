"""`explain --json`: numbers under the names of their units, the same that the text shows."""

from __future__ import annotations

from typing import Any

import pytest

from cli.running import run, run_json
from shardwise.report.explain.quantity import Quantity

UNITS = ("number", "seconds", "bytes", "bytes_per_second", "flops", "flops_per_second", "share")
TOPICS = ("allreduce", "p2p", "zero", "activations", "flops", "mfu", "bubble", "scaling", "tp", "dp", "pp", "cp", "ep")
TEXTS = {"symbol", "meaning", "what", "level", "algorithm", "formula", "convention", "schedule", "source", "collective",
         "network", "stage", "tensor", "recomputed_by"}  # fmt: skip


@pytest.mark.parametrize("topic", TOPICS)
def test_every_figure_is_a_number_with_its_unit(topic: str) -> None:
    data: dict[str, Any] = run_json("explain", topic)
    for one in [*data["numbers"], *data["result"]]:
        (unit,) = set(one) - TEXTS
        assert unit in UNITS
        assert isinstance(one[unit], (int, float))
    for grid in data["tables"]:
        assert grid["rows"]
        for row in grid["rows"]:
            assert "" not in row
            for key, value in row.items():
                assert isinstance(value, str if key in TEXTS else (int, float)), (key, value)


def test_the_text_shows_the_same_numbers() -> None:
    arguments = ("explain", "allreduce", "--topology", "torus", "--n", "64", "--size", "1GiB", "--latency", "2us")
    data, text = run_json(*arguments), run(*arguments).out
    assert data["numbers"][0] == {"symbol": "n", "meaning": "ranks", "number": 64}
    assert data["numbers"][1]["bytes"] == 2**30
    for one in data["result"]:
        (unit,) = set(one) - TEXTS
        assert Quantity(one[unit], unit).text in text


def test_mfu_says_of_which_peak() -> None:
    job = "--model llama3-8b --cluster dgx-h100:2 --global-batch 64 --seq 4096 --step-seconds 10s"
    for precision, data_type in (("bf16", "bf16"), ("fp8", "fp8")):
        text = run("explain", "mfu", *job.split(), "--precision", precision).out
        assert f"MFU, of the {data_type} peak" in text
        assert f"peak of one device, {data_type}" in text


SWITCH = ("--topology", "switch", "--bandwidth", "50GB/s", "--latency", "5us")
ON_ONE_SWITCH = {
    "ulysses": ("llama3-8b", "cp", ("--cp", "8", "--context-method", "ulysses", "--batch", "8")),
    "experts": ("tiny-moe", "ep", ("--ep", "8", "--batch", "8")),
    "tensors": ("llama3-8b", "tp", ("--tp", "8", "--batch", "8")),
    "zero": ("llama3-8b", "dp", ("--dp", "8", "--zero", "3", "--batch", "8")),
}


@pytest.mark.parametrize("name", ON_ONE_SWITCH)
def test_analyze_prints_what_explain_says_of_the_same_collective(name: str) -> None:
    """On bare numbers: the same bytes, ranks and algorithm take the same seconds."""
    model, dimension, flags = ON_ONE_SWITCH[name]
    found = run_json("analyze", "--model", model, *SWITCH, "--gpus", "8", "--seq", "4096", *flags)
    lines = found["dimensions"][dimension]["collectives"]
    assert lines
    for line in lines:
        asked = ("--n", "8", "--size", repr(line["size_bytes"]), "--algorithm", line["algorithm"])
        told = run_json("explain", line["kind"], *SWITCH, *asked)
        values = {one["what"]: one for one in told["result"]}
        assert line["seconds"] == pytest.approx(line["count"] * values["total"]["seconds"])
        assert line["bytes_sent"] == pytest.approx(line["count"] * values["bytes the busiest rank sends"]["bytes"])
