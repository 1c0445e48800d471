"""Every picture as data: its figures are those of `--json`, and the formula behind a bar is the bar."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest

from cli.golden import JOBS
from cli.running import run_json
from shardwise.api.analysis import AnalysisResult, analyze
from shardwise.api.given import arguments_of
from shardwise.api.inputs import job_from
from shardwise.api.planning import plan
from shardwise.cost.memory.device import memory_terms
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.stage_time import operator_points
from shardwise.layout.views import ranks_to_price
from shardwise.report.charts.chart import BarChart, Chart, readable
from shardwise.report.charts.devices import memory_chart, memory_over_time_chart, mesh_chart
from shardwise.report.charts.job import (
    campaign_chart,
    communication_chart,
    levels_chart,
    roofline_chart,
    scaling_chart,
    step_chart,
    timeline_chart,
)
from shardwise.report.charts.plan import pareto_chart, ranking_chart
from shardwise.report.verdict import DIMENSIONS, MEMORY_PARTS, STEP_WORDS
from shardwise.spec.job import Job
from tables import table

# One of each kind: a pipeline, experts and DualPipe, ZeRO-3 with offload, context parallelism, a torus, bare numbers.
KINDS = ("dense-3d", "mla-experts", "zero3-offload", "context-ring", "tpu-torus", "bare-mesh", "two-datacenters")


def flags(name: str) -> list[str]:
    return [one for one in JOBS[name].split() if one not in ("--ranks", "--scaling")]


def job_of(name: str) -> Job:
    from shardwise.cli.analyze import job_from as parsed_job
    from shardwise.cli.arguments import add_job_arguments
    from shardwise.cli.parser import Parser

    parser = Parser("analyze", "", "")
    add_job_arguments(parser)
    return parsed_job(parser.parse(flags(name)))


def found_of(name: str) -> tuple[AnalysisResult, Any]:
    return analyze(job_of(name)), run_json("analyze", *flags(name))


def column(chart: Chart, name: str) -> dict[str, Any]:
    """A column of the table by the words of its first."""
    place = [one.name for one in chart.table.columns].index(name)
    return {str(row[0]): row[place] for row in chart.table.rows}


@table("name", KINDS)
def test_the_figures_are_those_of_json(name: str) -> None:
    found, told = found_of(name)
    analysis = found.assessment.analysis
    step, memory = step_chart(analysis), memory_chart(analysis)
    for part, seconds in told["time"]["parts"].items():
        if seconds:
            assert column(step, "seconds")[STEP_WORDS[part]] == seconds
    totals = [held["total_bytes"] for held in told["memory"]["by_pipeline_rank"]]
    assert list(column(memory, "in all").values()) == pytest.approx(totals, rel=1e-12)
    for part in ("weights", "activations", "allowance"):
        own = [held[f"{part}_bytes"] for held in told["memory"]["by_pipeline_rank"]]
        assert list(column(memory, MEMORY_PARTS[part]).values()) == own
    assert memory.limits[0].value == told["memory"]["usable_bytes"]
    if told["dimensions"]:
        sent, levels = communication_chart(analysis), levels_chart(analysis)
        for dimension, own in told["dimensions"].items():
            words = DIMENSIONS[dimension]
            assert column(sent, "bytes sent")[words] == own["bytes_sent"]
            assert column(sent, "seconds")[words] == own["seconds"]
            assert column(sent, "adds to the step")[words] == own["exposed_seconds"]
            for level, use in own["levels"].items():
                assert column(levels, level)[words] == use["busy_seconds"]


@table("name", JOBS)
def test_the_formula_behind_a_bar_is_the_bar(name: str) -> None:
    analysis = analyze(job_of(name)).assessment.analysis
    for (view, _), held in zip(ranks_to_price(analysis.job), analysis.memories):
        terms = memory_terms(view, held)
        assert list(terms) == [part for part in held.PARTS if getattr(held, part)]
        for part, own in terms.items():
            assert sum(one.bytes for one in own) == pytest.approx(getattr(held, part), rel=1e-8), part
            assert all(one.factors for one in own)


def test_a_formula_has_the_numbers_of_the_job() -> None:
    """Llama-3 70B, tp 8, pp 4: 2.27 billion parameters on the first rank, of 2 bytes each; ZeRO-1 over 16."""
    found = analyze(job_of("gqa-headline")).assessment.analysis
    chart = memory_chart(found)
    lines = {series.name: series.details[0] for series in chart.series}
    assert lines["weights"] == ("weights = parameters × bytes of each", "= 2.27B × 2 B", "= 4.23 GiB")
    assert lines["optimizer states"][1] == "= 2.27B × 12 B ÷ 16"
    assert lines["activations"][1].startswith("= 4 × 20 × ")  # microbatches in flight, layers of the rank


@pytest.mark.slow
@table("name", KINDS)
def test_every_picture_is_json(name: str) -> None:
    """Without NaN and infinity, with as many texts as figures, and series of the length of their categories."""
    job = job_of(name)
    found = analyze(job, memory_over_time=True, tokens="1T", price="2/h").assessment
    assert found.memory_over_time is not None and found.campaign is not None
    charts: list[Chart | None] = [
        step_chart(found.analysis), memory_chart(found.analysis), communication_chart(found.analysis),
        levels_chart(found.analysis), memory_over_time_chart(found.memory_over_time), mesh_chart(job),
        roofline_chart(job), timeline_chart(job), campaign_chart(found.campaign),
    ]  # fmt: skip
    for chart in filter(None, charts):
        told = json.loads(json.dumps(chart.to_dict(), allow_nan=False))
        assert len(told["table"]["rows"]) == len(told["table"]["texts"]) > 0, chart.name
        assert all(len(row) == len(told["table"]["columns"]) for row in told["table"]["rows"])
        if isinstance(chart, BarChart):
            assert all(len(one.values) == len(chart.categories) for one in chart.series)


@pytest.mark.slow
@table("name", ["dense-3d", "gqa-headline", "bare-hierarchical", "bare-ring", "context-ulysses"])
def test_the_pipeline_is_drawn_to_the_end_of_the_step(name: str) -> None:
    found, told = found_of(name)
    chart = timeline_chart(found.job)
    if chart is None:
        assert 3 * found.job.microbatches * found.job.strategy.stages > 60_000
        return
    assert {one[0] for one in chart.spans} == set(range(len(chart.rows)))
    assert max(one[2] for one in chart.spans) <= chart.end * (1 + 1e-6)
    for row in range(len(chart.rows)):  # one pass at a time
        own = sorted(one for one in chart.spans if one[0] == row)
        assert all(before[2] <= after[1] + 1e-6 * chart.end for before, after in pairwise(own))
    if "are drawn" not in chart.caption:
        assert chart.end == pytest.approx(told["time"]["predicted_seconds"], rel=1e-9)


@table("name", KINDS)
def test_no_operator_is_above_the_roof(name: str) -> None:
    slowest = predict(job_of(name)).slowest
    device, recipe = slowest.job.cluster.device, slowest.job.training.recipe
    points = operator_points(slowest.job, slowest.contents)
    assert points
    for one in points:
        assert one.rate < device.peak_flops(recipe.compute)
        assert one.rate < one.flops_per_byte * device.memory_bandwidth


def test_a_matmul_has_two_flops_for_each_multiplication() -> None:
    """Llama-3 70B with tp 8: an MLP of three matrices of 8192 × 28672/8, for 8192 tokens; by hand."""
    slowest = predict(job_of("gqa-headline")).slowest
    found = {one.words: one for one in operator_points(slowest.job, slowest.contents)}
    tokens, hidden, wide = 8192, 8192, 28672 / 8
    assert found["MLP"].flops == 2 * tokens * hidden * wide * 3
    moved = 2 * (3 * hidden * wide + 2 * tokens * hidden + 3 * tokens * wide)
    assert found["MLP"].moved_bytes == pytest.approx(moved, rel=0.2)  # one matmul or two before the activation
    assert found["attention"].flops == pytest.approx(2 * tokens * tokens / 2 * 2 * hidden / 8, rel=1e-3)  # causal


def test_scaling_and_the_whole_run_are_those_of_json() -> None:
    more = ["--scaling", "--tokens", "15T", "--price", "2.5/h", "--mtbf", "50700h"]
    told = run_json("analyze", *flags("gqa-headline"), *more)
    found = analyze(job_of("gqa-headline"), scaling=True, tokens="15T", price="2.5/h", mtbf="50700h").assessment
    assert found.scaling is not None and found.campaign is not None
    strong, weak = scaling_chart(found.scaling).series
    assert [point[1] for point in strong.points] == [row["efficiency"] for row in told["scaling"]["strong"]]
    assert [point[0] for point in weak.points] == [row["devices"] for row in told["scaling"]["weak"]]
    run = campaign_chart(found.campaign)
    assert sum(one.values[0] for one in run.series) == pytest.approx(told["campaign"]["seconds"], rel=1e-9)
    assert ("days", f"{told['campaign']['days']:,.2f}") in run.table.rows


@pytest.mark.slow
def test_a_plan_is_drawn_as_it_is_told() -> None:
    asked: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100:1", "global_batch": 64, "seq": 4096}
    found = plan(**asked, pareto="memory")
    told = json.loads(json.dumps(found.to_dict()))
    front = found.answer.memory_front
    assert front is not None
    chart = pareto_chart(found.answer.plan, front)
    drawn = next(one for one in chart.series if one.name == "front")
    expected = [(one["memory"]["total_bytes"], one["predicted_seconds"]) for one in told["pareto"]]
    assert list(drawn.points) == expected and len(expected) > 1
    ranking = ranking_chart(found.answer.plan)
    assert next(iter(column(ranking, "in all").values())) == pytest.approx(told["candidates"][0]["predicted_seconds"])


def test_experts_have_their_row_of_the_mesh() -> None:
    """DeepSeek-V3 on nodes of 8: 64 neighbouring ranks of a stage hold different experts."""
    rows = {row[0]: row[1:] for row in mesh_chart(job_of("mla-experts")).table.rows}
    assert rows["expert parallel"] == (64.0, "0, 1, 2, 3, 4, 5, 6, 7, ...", 8.0)


def test_a_cluster_too_large_to_draw_is_drawn_in_part() -> None:
    strategy = {"strategy.tp": 8, "strategy.pp": 16, "strategy.stage_layers": "balanced"}
    more = {**strategy, "training.global_batch": 2048, "training.seq": 8192}
    job, _ = job_from(arguments_of({"model": "llama3-405b", "cluster": "dgx-h100:2048", **more}))
    chart = mesh_chart(job)
    assert len(chart.boxes) == 16 and "16 nodes of 2,048 are drawn" in chart.caption
    assert {one.cells[0].tone for one in chart.boxes} == {one.tone for one in chart.legend}
    assert all(len(box.cells) == 8 for box in chart.boxes)


@table(
    ("value", "unit", "text"),
    [
        (None, "bytes", "–"),
        ("rank 0", "bytes", "rank 0"),
        (2.0**31, "bytes", "2.00 GiB"),
        (0.5, "share", "50.0%"),
        (1e15, "FLOP/s", "1.00 PFLOP/s"),
        (16384, "number", "16,384"),
        (16384.0, "count", "16.4k"),
        (math.pi, "loss", "3.142"),
    ],
)
def test_figures_for_people(value: Any, unit: Any, text: str) -> None:
    assert readable(value, unit) == text
