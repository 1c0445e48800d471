"""The order of strategies: what noise does not tell apart by how simple it is, the rest by time, nothing twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from planner.cases import MODELS, job_of, within
from shardwise.planner.advice.explanation import difference_words, explain
from shardwise.planner.candidate import candidate, complexity, strategy_words
from shardwise.planner.plan import GROUPS, Plan, plan, ranked, said_by_a_framework
from shardwise.planner.request import Request
from shardwise.report.plan import _ranking
from shardwise.report.plan_data import ranked_data
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression, Synchronise
from shardwise.spec.strategy import Offload, Overlap, Strategy
from shardwise.uncertainty.residuals import error_bar, noise_of


@cache
def planned() -> Plan:
    """8B at 8,192 tokens on one node, where many layouts take about as long; devices are filled to the last byte."""
    job = job_of("llama3-8b", "dgx-h100:1", 128, seq=8192)
    job = replace(job, cluster=replace(job.cluster, device=replace(job.cluster.device, driver_memory=0.0)))
    whole = job.cluster.device.memory
    found = plan(Request(job, within(tp="1,2", schedule="1f1b,zbv"), memory_bytes=whole))
    assert isinstance(found, Plan)
    return found


@pytest.mark.quick(8)
@pytest.mark.parametrize("seed", range(30))
def test_noise_and_the_column_of_times_have_one_base(seed: int) -> None:
    """By what is printed: rows under the noise are slower than the fastest by more, the others by no more."""
    draw = Random(seed)
    some = draw.sample(planned().candidates, min(len(planned().candidates), 12))
    quickest = min(one.step_seconds for one in some)
    # Many as near to the limit as rounding matters.
    near = [draw.choice((0.0, 0.0004, 0.01, noise_of(some[0].job).share + draw.gauss(0, 0.0006))) for _ in some]
    found = planned().of(
        replace(one, pipeline_seconds=quickest * (1 + loss) - one.prediction.tail_seconds)
        for one, loss in zip(some, near)
    )
    for group in GROUPS:
        table = _ranking(found, found.rows, group)
        limit = float(re.findall(r"\((.*)%\)", table.title)[0])
        time = [column.name for column in table.columns].index("time")
        for row in table.rows:
            words = str(row[time])
            loss = 0.0 if words in ("fastest", "ties") else float(words.removesuffix("%"))
            assert (loss > limit) == (group == "slower"), (table.title, words)
    data = [ranked_data(found, one) for one in found.candidates]
    assert min(one["loss"] for one in data) == 0
    assert all((one["loss"] > found.noise.share) == (one["group"] == "slower") for one in data)


def test_those_within_noise_come_first_and_the_simplest_of_them_is_the_first() -> None:
    found = planned()
    limit = found.fastest.seconds_per_token * (1 + found.noise.share + 0.0005)
    near = [one for one in found.layouts if one.seconds_per_token <= limit]
    assert len(near) > 3
    assert list(found.layouts[: len(near)]) == near
    keys = [(len(one.dimensions), not said_by_a_framework(one), complexity(one.job.strategy)) for one in near]
    assert keys == sorted(keys)
    rest = [one.seconds_per_token for one in found.layouts[len(near) :]]
    assert rest == sorted(rest) and min(rest) > limit
    assert {found.group_of(one) for one in near} == {"within noise"}


def test_what_only_adds_dimensions_to_a_row_is_folded_into_it() -> None:
    """cp 2 with two sequences at a time, cp 4 with four: data parallelism again."""
    found = planned()
    first = found.rows[0]
    assert first.best is found.best and first.best.dimensions == ()
    assert {one.dimensions for one in first.like} == {("cp",)} and len(first.like) > 1
    shown = [row.best for row in found.rows]
    folded = [one for row in found.rows for one in row.like]
    assert sorted(map(id, [*shown, *folded])) == sorted(map(id, found.layouts))
    assert found.fastest.degrees in [one.degrees for one in shown]
    for row in found.rows:
        for one in row.like:
            assert set(row.best.dimensions) <= set(one.dimensions)
            assert one.memory.total > 0.8 * row.best.memory.total


def test_more_memory_left_is_worth_a_row() -> None:
    found = planned()
    second = found.rows[1]
    assert second.group == "within noise" and second.best.dimensions == ("pp",)
    assert second.best.margin_bytes > 10 * 2**30 > found.best.margin_bytes
    sentence = explain(found).sentence()
    assert "simplest of" in sentence and "within noise" in sentence
    assert "has more dimensions; it leaves" in sentence


def test_why_it_wins_contradicts_no_time_of_the_table() -> None:
    """Of two layouts the slower is beyond noise of the fastest, but not of a simpler form of the fastest layout."""
    simple = candidate(job_of("llama3.2-1b", "dgx-h100:1", 64, seq=2048).with_strategy(dp=8, zero=1))
    fastest = candidate(simple.job.with_strategy(recompute="selective"))
    other = candidate(simple.job.with_strategy(dp=4, tp=2))
    noise = noise_of(simple.job).share
    far = round(1.5 * noise, 2)  # whole per cent, which no rounding moves
    assert simple.degrees == fastest.degrees != other.degrees

    def explained(simple_takes: float, other_takes: float) -> str:
        losses = ((simple, simple_takes), (fastest, 0.0), (other, other_takes))
        times = (replace(row, pipeline_seconds=4 * (1 + loss) - row.prediction.tail_seconds) for row, loss in losses)
        return explain(planned().of(times)).sentence()

    sentence, words = explained(0.8 * noise, far), strategy_words(fastest.job.strategy)
    assert f"within noise ({noise:.1%}) of its fastest ({words}) and takes {0.8 * noise:+.1%}; every other" in sentence
    assert f"{far:+.1%} against the fastest" in sentence
    assert f"every other layout takes over {noise:.1%} longer" in explained(2 * noise, far)
    assert f"and takes {0.8 * noise:+.1%}. The next" in explained(0.8 * noise, 0.9 * noise)


def test_of_equals_the_one_that_leaves_room_is_first() -> None:
    """Two layouts as simple and as fast: the memory decides."""
    one = candidate(job_of("llama3.2-1b", "dgx-h100:1", 64, seq=2048).with_strategy(tp=2, dp=4, zero=1))
    other = candidate(job_of("llama3.2-1b", "dgx-h100:1", 64, seq=2048).with_strategy(tp=4, dp=2, zero=1))
    same_time = replace(other, pipeline_seconds=one.step_seconds - other.prediction.tail_seconds)
    assert ranked([one, same_time]).candidates[0] is same_time
    assert ranked([same_time, one]).candidates[0] is same_time


def test_noise_is_that_of_pairs_of_published_runs() -> None:
    """Narrower than the widest error bar of a step: what a device's constants miss is missed by both of a pair."""
    jobs = [job_of(MODELS[name], "dgx-h100:1", 8, seq=2048) for name in ("dense", "experts")]
    for one in jobs:
        noise = noise_of(one)
        assert 0.01 < noise.share < error_bar(one).time_high
        assert "pairs of published runs" in noise.basis


@pytest.mark.parametrize(("loss", "words"), [(0.0, "ties"), (0.0004, "ties"), (0.0006, "+0.1%"), (-0.02, "-2.0%")])
def test_what_would_print_as_nothing_ties(loss: float, words: str) -> None:
    assert difference_words(loss) == words


# -- words -------------------------------------------------------------------------------------------

FULL = Strategy(tp=2, cp=2, dp=2, pp=2, ep=2, expert_tp=2, zero=3, microbatch=2, recompute="selective")
OTHERS: dict[str, tuple[Any, ...]] = {
    "tp": (4,),
    "cp": (4,),
    "dp": (4,),
    "pp": (4,),
    "ep": (4,),
    "expert_tp": (1,),
    "sequence_parallel": (False,),
    "zero": (0, 1, 2),
    "shard_group": (2,),
    "keep_parameters": (True,),
    "accumulate": ("local",),
    "order": (("tp", "cp", "pp", "dp"), ("cp", "tp", "dp", "pp")),
    "microbatch": (1,),
    "schedule": ("zbv", "gpipe"),
    "interleave": (),  # with its schedule
    "dp_shares": ((3, 1), (1, 3)),
    "stage_tp": ((2, 1), (1, 2)),
    "stage_dp": ((2, 4), (4, 2)),
    "stage_layers": ((9, 7), (7, 9), (8, 8)),
    "recompute": ("none", "full"),
    "recompute_operators": (("norm", "activation"), ("norm",)),
    "recompute_layers": (3, 4),
    "context_method": ("ulysses", "all-gather"),
    "dispatch": ("deduplicated",),
    "overlap": tuple(replace(Overlap(), **{one.name: not getattr(Overlap(), one.name)}) for one in fields(Overlap)),
    "offload": (
        Offload(optimizer=1.0),
        Offload(optimizer=0.5),
        Offload(optimizer=0.5, activations=0.25),
        Offload(optimizer=1.0, target="nvme"),
    ),
    "collective": ("ring",),
    "bucket": (1e6, 2e6),
    "compression": (Compression(method="powersgd"), Compression(method="powersgd", rank=8), Compression(method="int8")),
    "synchronise": (Synchronise(method="diloco"), Synchronise(method="diloco", inner_steps=64),
                    Synchronise(method="diloco", outer_momentum=0.5), Synchronise(method="async", staleness=2)),
}  # fmt: skip


def different() -> Iterator[Strategy]:
    """Strategies of which any two do something else."""
    yield FULL
    for name, values in OTHERS.items():
        for value in values:
            yield FULL.unchecked(**{name: value})
    for chunks in (2, 4):
        yield FULL.unchecked(schedule="interleaved", interleave=chunks)
    for layers in ((4, 4, 4, 4), (5, 4, 4, 3), (3, 4, 4, 5)):
        yield FULL.unchecked(schedule="zbv", stage_layers=layers)


def test_words_tell_any_two_strategies_apart() -> None:
    assert set(OTHERS) == {one.name for one in fields(Strategy)}
    told: dict[str, Strategy] = {}
    for one in different():
        idle = one.overlap.offload != Overlap().offload and not one.offload.any  # nothing to overlap
        words = strategy_words(one)
        assert idle or words not in told, (words, one, told[words])
        told.setdefault(words, one)


def test_words_leave_out_what_makes_no_difference() -> None:
    plain = Strategy(dp=8, zero=1)
    for idle in (
        {"keep_parameters": True},
        {"accumulate": "local"},
        {"sequence_parallel": False},
        {"order": ("tp", "cp", "pp", "dp")},
        {"stage_layers": "balanced"},
        {"overlap": Overlap(tp=True, ep=True)},
        {"dispatch": "deduplicated"},
    ):
        assert strategy_words(plain.unchecked(**idle)) == strategy_words(plain) == "dp 8 · ZeRO-1 · microbatch 1"


def test_one_device_has_one_layout_of_which_other_forms_fit() -> None:
    found = plan(
        Request(Job.from_dict({"model": "gpt2", "cluster": "laptop:1", "training": {"seq": 512, "global_batch": 4}}))
    )
    assert len(found.rows) == 1 and found.search.fitting > 1
    assert explain(found).sentence().endswith("One device has no other layout.")
