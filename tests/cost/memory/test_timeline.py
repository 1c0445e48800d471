"""Memory over time: its peak against the formula's, each part only while it exists, and the picture of it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from cost.builders import GPT, LLAMA, MLA_MOE, job
from cost.jobs import valid_jobs
from effort import examples
from shardwise.cost.memory.activations import head_activation_bytes
from shardwise.cost.memory.device import memory_of_rank, peak_memory
from shardwise.cost.memory.timeline import AFTER, BETWEEN, MemoryOverTime, RankMemory, memory_over_time
from shardwise.cost.memory.transient import logits_temporary_bytes
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import simulated_step
from shardwise.report.memory_timeline import memory_over_time_data, memory_picture, sampled, sparkline
from shardwise.spec.job import Job
from shardwise.spec.stack import stack_from

FULL_BACKWARD = ("gpipe", "1f1b", "interleaved", "dualpipe")
# The loss comes when other chunks are gone already: the parts that the formula adds never meet.
LOSS_BESIDE_THE_PEAK = ("v-min", "dualpipe")


def pipelined(schedule: str, pp: int = 4, microbatches: int = 8, model: Any = GPT, **strategy: Any) -> Job:
    interleave = 2 if schedule == "interleaved" else 1
    fields = {"pp": pp, "dp": 2, "schedule": schedule, "interleave": interleave, **strategy}
    return job(model, training={"global_batch": 2 * microbatches}, **fields)


def parts_meet(case: Job) -> bool:
    """Whether all parts that the formula adds exist at one time: a split backward makes its gradients later."""
    strategy = case.strategy
    one_pass = strategy.pp == 1 or strategy.schedule in FULL_BACKWARD
    passing = strategy.gradients_sharded or strategy.offload.gradients or strategy.offload.weights
    return (one_pass or not passing) and (strategy.pp == 1 or strategy.schedule not in LOSS_BESIDE_THE_PEAK)


@settings(max_examples=examples(200), deadline=None)
@given(case=valid_jobs())
def test_the_peak_is_the_formulas_and_never_more(case: Job) -> None:
    over = memory_over_time(case)
    for rank in over.ranks:
        held, formula = rank.peak.held.total, memory_of_rank(case, rank.pipeline_rank).total
        assert held <= formula * (1 + 1e-9)
        if parts_meet(case):
            assert held == pytest.approx(formula, rel=1e-9)
    assert over.fullest.peak.held.total <= peak_memory(case).total * (1 + 1e-9)
    if parts_meet(case):
        assert over.fullest.peak.held.total == pytest.approx(peak_memory(case).total, rel=1e-9)


def test_an_update_that_copies_gradients_is_the_peak_after_the_passes() -> None:
    case = replace(job(GPT, dp=2, zero=3, training={"global_batch": 2, "seq": 16}), stack=stack_from("deepspeed"))
    over = memory_over_time(case)
    assert over.fullest.peak.during == AFTER
    assert over.fullest.peak.held == peak_memory(case)


@settings(max_examples=examples(100), deadline=None)
@given(case=valid_jobs())
def test_spans_follow_each_other_to_the_end_of_the_step(case: Job) -> None:
    over = memory_over_time(case)
    step = simulated_step(predict(case), whole=True)
    assert over.step_seconds == pytest.approx(step.step_seconds)
    for rank in over.ranks:
        assert rank.spans[0].start_seconds == 0.0
        for one, following in zip(rank.spans, rank.spans[1:]):
            assert one.end_seconds == following.start_seconds
            assert one.end_seconds >= one.start_seconds
        last = rank.spans[-1]
        assert last.during == AFTER
        assert last.held.activations == last.held.recomputed == last.held.gathered == last.held.temporary == 0.0
        # Gradients that are made as they come are not all there at the loss.
        assert len({(span.held.weights, span.held.optimizer) for span in rank.spans}) == 1


def of_kind(rank: RankMemory, word: str) -> list[Any]:
    return [span.held for span in rank.spans if span.during.startswith(word)]


def test_1f1b_holds_one_microbatch_more_on_every_earlier_rank() -> None:
    case = pipelined("1f1b", model=LLAMA)
    ranks = memory_over_time(case).ranks
    one = ranks[2].peak.held.activations / 2
    assert [rank.peak.held.activations / one for rank in ranks[:3]] == pytest.approx([4, 3, 2])
    levels = {round(held.activations / one) for held in of_kind(ranks[0], "")}
    assert levels == {0, 1, 2, 3, 4}
    assert ranks[0].peak.during == "forward of microbatch 3"
    assert ranks[3].peak.held.activations == pytest.approx(one + head_activation_bytes(case))


def test_logits_live_only_on_the_last_stage_and_not_between_passes() -> None:
    case = pipelined("interleaved", 2, 4)
    first, last = memory_over_time(case).ranks
    logits = logits_temporary_bytes(case)
    assert all(held.temporary == 0 for held in of_kind(first, ""))
    assert {held.temporary for held in of_kind(last, "forward")} == {0.0, logits}
    assert {held.temporary for held in of_kind(last, BETWEEN)} <= {0.0}


def test_a_recomputed_layer_is_there_only_on_the_way_back() -> None:
    for schedule in ("1f1b", "zb-h1"):
        rank = memory_over_time(pipelined(schedule, recompute="full")).ranks[0]
        back = of_kind(rank, "backward") + of_kind(rank, "input gradient")
        assert all(held.recomputed > 0 for held in back)
        others = of_kind(rank, "forward") + of_kind(rank, "weight gradient") + of_kind(rank, BETWEEN)
        assert others
        assert all(held.recomputed == 0 for held in others)


def test_what_zero_gathers_is_there_while_it_is_used() -> None:
    """ZeRO-3 has parameters in every pass, and the whole gradient of a layer where it makes one."""
    rank = memory_over_time(pipelined("zb-h1", zero=3)).ranks[0]
    (parameters,) = {held.gathered for held in of_kind(rank, "forward") + of_kind(rank, "input gradient")}
    (both,) = {held.gathered for held in of_kind(rank, "weight gradient")}
    assert 0 < parameters < both
    kept = memory_over_time(pipelined("1f1b", zero=3, keep_parameters=True)).ranks[0]
    assert all(held.gathered > 0 for held in of_kind(kept, BETWEEN) if held.activations)


def test_without_a_pipeline_microbatches_come_one_by_one() -> None:
    case = job(LLAMA, training={"global_batch": 6}, dp=2)
    (rank,) = memory_over_time(case).ranks
    assert [span.during.split()[0] for span in rank.spans[:-1]] == ["forward", "backward"] * 3
    assert rank.peak.held.total == pytest.approx(peak_memory(case).total)


def test_a_shared_stage_of_dualpipe_and_a_prediction_module() -> None:
    for schedule in ("dualpipe", "zbv"):
        case = pipelined(schedule, model=MLA_MOE, ep=2, microbatches=9)
        over = memory_over_time(case)
        assert over.fullest.peak.held.total == pytest.approx(peak_memory(case).total, rel=1e-9)


def over(schedule: str = "1f1b", **fields: Any) -> MemoryOverTime:
    return memory_over_time(pipelined(schedule, **fields))


def test_samples_keep_every_peak() -> None:
    memory = over(microbatches=40)
    for rank in memory.ranks:
        for columns in (1, 7, 300):
            seen = sampled(rank, memory.step_seconds, columns)
            assert len(seen) == columns
            assert max(span.held.total for span in seen) == rank.peak.held.total
        line = sparkline(rank, memory.step_seconds, 0.0, rank.peak.held.total)
        assert line[0] != " "
        assert "█" in line


def test_a_level_line_is_drawn_where_nothing_changes() -> None:
    (rank,) = memory_over_time(job(GPT, training={"global_batch": 1}, dp=1)).ranks
    assert set(sparkline(rank, 1.0, 5.0, 5.0)) == {"▁"}


def test_data_for_a_machine_has_the_peak_and_every_change() -> None:
    memory = over()
    data = memory_over_time_data(memory)
    first = data["ranks"][0]
    assert first["peak"]["total_bytes"] == max(span["total_bytes"] for span in first["spans"])
    assert first["peak"]["during"] == "forward of microbatch 3"
    assert len(first["spans"]) == len(memory.ranks[0].spans)


@pytest.mark.parametrize("fields", [{}, {"pp": 8, "microbatches": 64}, {"schedule": "zbv", "recompute": "full"}])
def test_the_picture_is_well_formed_and_says_its_units(fields: dict[str, Any]) -> None:
    memory = over(**fields)
    picture = ET.fromstring(memory_picture(memory))
    texts = ["".join(element.itertext()) for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(text.startswith("rank ") for text in texts) == len(memory.ranks)
    assert any(text.endswith("seconds into the step") for text in texts)
    assert {"B", "KiB", "MiB", "GiB"} & set(texts)
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    panels = list(picture.iter("{http://www.w3.org/2000/svg}polygon"))
    corners = [tuple(map(float, p.split(","))) for panel in panels for p in panel.attrib["points"].split()]
    assert corners
    assert all(-0.05 <= x <= width and -0.05 <= y <= height for x, y in corners)


def test_a_picture_of_many_ranks_shows_a_few_and_the_fullest() -> None:
    counts = [1] * 20
    deep = {"layers": 20, **{k: v for k, v in GPT.to_dict().items() if k != "layers"}}
    case = pipelined("1f1b", 20, model=type(GPT).from_dict(deep), stage_layers=[2, *counts[1:-1], 0])
    memory = memory_over_time(case)
    picture = memory_picture(memory)
    assert picture.count("<circle") <= 8 < len(memory.ranks)
    assert f"rank {memory.fullest.pipeline_rank}:" in picture
    assert "pipeline ranks" in picture
