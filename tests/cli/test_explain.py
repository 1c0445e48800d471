"""`explain --json`: numbers under the names of their units, the same that the text shows."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from cli.printed_formulas import check_formulas
from cli.running import run, run_json
from shardwise.api.given import job_arguments
from shardwise.api.inputs import job_from
from shardwise.cli.explain import TOPICS, explained
from shardwise.collectives import CollectiveKind
from shardwise.cost.analysis import analyze
from shardwise.report.explain.dimension import explain_dimension
from shardwise.report.explain.explanation import Quantity
from shardwise.spec import presets
from shardwise.spec.bare import TOPOLOGIES
from shardwise.spec.errors import SpecError

UNITS = ("number", "seconds", "bytes", "bytes_per_second", "flops", "flops_per_second", "share")
TEXTS = {"symbol", "meaning", "what", "level", "algorithm", "formula", "convention", "schedule", "source", "collective",
         "network", "stage", "tensor", "recomputed_by"}  # fmt: skip


@pytest.mark.parametrize("topic", ("allreduce", *TOPICS))
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
    arguments = ("explain", "allreduce", "--topology", "torus", "--gpus", "64", "--size", "1GiB", "--latency", "2us")
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
    "ulysses": ("llama3-8b", "cp", ("--cp", "8", "--context-method", "ulysses", "--global-batch", "8")),
    "experts": ("tiny-moe", "ep", ("--ep", "8", "--global-batch", "8")),
    "tensors": ("llama3-8b", "tp", ("--tp", "8", "--global-batch", "8")),
    "zero": ("llama3-8b", "dp", ("--dp", "8", "--zero", "3", "--global-batch", "8")),
}


@pytest.mark.parametrize("name", ON_ONE_SWITCH)
def test_analyze_prints_what_explain_says_of_the_same_collective(name: str) -> None:
    """On bare numbers: the same bytes, ranks and algorithm take the same seconds."""
    model, dimension, flags = ON_ONE_SWITCH[name]
    found = run_json("analyze", "--model", model, *SWITCH, "--gpus", "8", "--seq", "4096", *flags)
    lines = found["dimensions"][dimension]["collectives"]
    assert lines
    for line in lines:
        asked = ("--gpus", "8", "--size", repr(line["size_bytes"]), "--algorithm", line["algorithm"])
        told = run_json("explain", line["kind"], *SWITCH, *asked)
        values = {one["what"]: one for one in told["result"]}
        assert line["seconds"] == pytest.approx(line["count"] * values["total"]["seconds"])
        assert line["bytes_sent"] == pytest.approx(line["count"] * values["bytes the busiest rank sends"]["bytes"])


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


EVERYTHING = (*TOPICS, *(kind.value.replace("_", "-") for kind in CollectiveKind))


@pytest.mark.parametrize("topic", EVERYTHING)
def test_every_formula_gives_the_figure_beside_it(topic: str) -> None:
    """Of every topic there is, as it is without options and in its own example."""
    asked = [[topic]]
    if topic in TOPICS:
        asked.append(TOPICS[topic].example.split()[2:])
    for arguments in asked:
        _, told = explained(arguments)
        assert check_formulas(told) or not told.tables


MORE = (
    *(f"flops --model {model} --seq {seq}" for model in presets.names("model") for seq in (2048, 32768)),
    *(f"zero --precision {precision} --params 3e9 --dp 24" for precision in ("bf16-fp32-grads", "fp32", "fp8")),
    *(f"bubble --pp {p} --microbatches {m} --interleave {v}"
      for p in (1, 2, 3, 4, 6, 8, 9) for m in (1, 2, 3, p, 2 * p, 27, 36) for v in (1, 2, 3)),
    *(f"parameter-server --cluster {cluster}" for cluster in ("dgx-h100:1", "dgx-a100:4", "mi300x-node:2")),
    "p2p --size 3KiB --link ethernet-100g", "mfu --recompute full", "activations --model deepseek-v3 --tp 2",
)  # fmt: skip


def test_formulas_with_other_numbers() -> None:
    assert sum(check_formulas(explained(arguments.split())[1]) for arguments in MORE) > 1500


def networks(draw: Random) -> tuple[str, ...]:
    """Arguments for a network of any topology, of any size that fits it; or of the catalogue."""
    kind = draw.choice((*TOPOLOGIES, "hierarchical", "cluster"))
    if kind == "cluster":
        return ("--cluster", draw.choice(("dgx-h100:4", "dgx-h100:1", "dgx-a100:3", "mi300x-node:2", "tpu-v5p:64")))
    sizes = [draw.randint(2, 9 if kind != "hierarchical" else 5) for _ in range(draw.randint(2, 3))]
    shaped = kind in ("mesh", "torus", "hierarchical")
    links = len(sizes) if kind == "hierarchical" else 1
    speeds = ",".join(f"{draw.randint(10, 500)}GB/s" for _ in range(links))
    waits = ",".join(f"{draw.randint(1, 20)}us" for _ in range(links))
    size = ("--shape", "x".join(map(str, sizes))) if shaped else ("--gpus", str(draw.randint(1, 33)))
    return ("--topology", kind, *size, "--bandwidth", speeds, "--latency", waits)


def check_collectives(draw: Random, pairs: int) -> int:
    """Every algorithm that a drawn collective has on a drawn network, the cheapest and the textbook's explained."""
    formulas = 0
    for _ in range(pairs):
        kind = draw.choice(list(CollectiveKind)).value
        where = (*networks(draw), "--size", draw.choice(("0", "3", "100KB", "8MiB", "2GiB")))
        for algorithm in ("auto", "textbook"):
            formulas += check_formulas(explained([kind, *where, "--algorithm", algorithm])[1])
    return formulas


def test_formulas_of_collectives_on_any_network() -> None:
    assert check_collectives(Random(23), 25) > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_formulas_of_many_collectives_on_any_network(seed: int) -> None:
    assert check_collectives(Random(seed), 50) > 400
