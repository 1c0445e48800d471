"""`explain --json`: numbers under the names of their units, the same that the text shows."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from cli.running import run, run_json
from shardwise.api.given import job_arguments
from shardwise.api.inputs import job_from
from shardwise.cost.analysis import analyze
from shardwise.report.explain.dimension import explain_dimension
from shardwise.report.explain.explanation import Explanation
from shardwise.report.explain.formula import Formula
from shardwise.report.explain.quantity import Quantity
from shardwise.spec import presets
from shardwise.spec.errors import SpecError

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


def check_formulas(told: Explanation) -> int:
    """Evaluates every printed formula with the numbers printed beside it, and compares it with the printed result."""
    data = told.to_dict()
    values: dict[str, float] = {}
    for one in data["numbers"]:
        (unit,) = set(one) - {"symbol", "meaning"}
        assert one["symbol"] == "" or one["symbol"] not in values, "a symbol has one meaning"
        values[one["symbol"]] = one[unit]
    printed = {what: value.text for what, value in told.result}
    rows = {row["what"]: row for grid in data["tables"] for row in grid["rows"] if "what" in row}
    units = {what: value.unit for what, value in told.result}
    for line in told.formula:
        name, text = line.split(" = ")
        value = Formula(name, text).value(values)
        if name in printed:
            if re.fullmatch(r"V\d .*", name):
                values[name.split()[0]] = value
                assert printed[name] == f"{value:.4g}"
            elif units[name] == "number":
                assert float(printed[name]) == pytest.approx(value, abs=0.005)
            else:
                assert printed[name] == Quantity(value, units[name]).text, line
        else:
            row = rows[name.removesuffix(": bytes")]
            assert row["bytes"] == pytest.approx(value, rel=1e-9), (told.title, line)
    return len(told.formula)


LAYOUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "tp": ({"tp": 2}, {"tp": 4, "sequence_parallel": False}, {"tp": 8, "cp": 2}),
    "cp": tuple(
        {"cp": 2, "context_method": how, "tp": tp} for how in ("ring", "all-gather", "ulysses") for tp in (1, 2)
    ),
    "dp": ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"tp": 2, "zero": 1}, {"pp": 2, "zero": 0}),
    "pp": ({"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 4, "cp": 2}),
    "ep": tuple({"ep": ep, "dispatch": how} for ep in (8, 16, 64) for how in ("all-to-all", "deduplicated")),
}


def check_model(model: str, draw: Random) -> int:
    formulas = 0
    stacks = ("shardwise", "megatron-core", "torchtitan")
    for dimension, layouts in LAYOUTS.items():
        given = {"model": model, "cluster": "dgx-h100:8", "seq": draw.choice((2048, 4096)), "global_batch": 256,
                 "stack": draw.choice(stacks), "precision": draw.choice(("bf16", "fp8"))}  # fmt: skip
        try:
            job, _ = job_from(job_arguments(None, {**given, **draw.choice(layouts)}))
        except SpecError:  # does not divide
            continue
        told = explain_dimension(dimension, analyze(job))
        assert bool(told.formula) == bool(told.tables)
        formulas += check_formulas(told)
    return formulas


def test_formulas_of_dimensions_give_the_figures_beside_them() -> None:
    draw = Random(34)
    assert sum(check_model(model, draw) for model in presets.names("model")) > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_formulas_of_random_layouts_give_the_figures_beside_them(seed: int) -> None:
    draw = Random(seed)
    assert sum(check_model(model, draw) for model in presets.names("model")) > 200


@pytest.mark.parametrize("arguments", ["p2p", "p2p --size 3KiB --link ethernet-100g", "mfu --recompute full", "scaling",
                                       "activations", "activations --model deepseek-v3 --tp 2"])  # fmt: skip
def test_formulas_give_the_results_beside_them(arguments: str) -> None:
    data = run_json("explain", *arguments.split())
    told = Explanation(
        data["title"], tuple(data["formula"]), (),
        tuple((one["symbol"], "", _quantity(one)) for one in data["numbers"]),
        tuple((one["what"], _quantity(one)) for one in data["result"]),
    )  # fmt: skip
    assert check_formulas(told)


def _quantity(one: dict[str, Any]) -> Quantity:
    (unit,) = set(one) - TEXTS
    return Quantity(one[unit], unit)


@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32-grads", "fp32", "fp8"])
def test_formulas_of_zero_give_the_bytes_beside_them(precision: str) -> None:
    data = run_json("explain", "zero", "--precision", precision, "--params", "3e9", "--dp", "24")
    values = {one["symbol"]: one["number"] for one in data["numbers"]}
    for row in data["tables"][0]["rows"]:
        assert Formula("", row["formula"]).value(values) == pytest.approx(row["total_bytes"])


@pytest.mark.parametrize("algorithm", ["auto", "textbook"])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all", "broadcast"])
def test_levels_of_a_collective_add_up_as_its_formula_says(kind: str, algorithm: str) -> None:
    asked = ("--topology", "ring", "--n", "16", "--size", "1GiB", "--bandwidth", "50GB/s", "--algorithm", algorithm)
    data = run_json("explain", kind, *asked)
    values = {one["symbol"]: one.get("seconds", one.get("bytes_per_second")) for one in data["numbers"]}
    (level,) = data["tables"][0]["rows"]
    assert "hops·a + V·b" in data["formula"][1]
    result = {one["what"]: one for one in data["result"]}
    total = level["hops"] * values["a"] + level["bytes"] / values["1/b"]
    assert total == pytest.approx(result["total"]["seconds"])
