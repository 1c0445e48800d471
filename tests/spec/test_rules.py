"""The rules between the parts of a job: each broken once, and every remedy tried."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.spec import Cluster, Job, Model, SpecError
from shardwise.spec.rules import divisors, stage_layer_counts
from tables import table

DENSE = {"layers": 12, "hidden": 768, "heads": 24, "kv_heads": 6, "ffn": 3072, "vocab": 1000}
EXPERTS = {**DENSE, "moe": {"experts": 8, "top_k": 2, "ffn": 1024, "shared_ffn": 512}}
BATCH = {"global_batch": 4800, "seq": 6144}


def flat_cluster(devices: int) -> Cluster:
    level = {"size": devices, "bandwidth": "50GB/s", "latency": "2us"}
    return Cluster.from_dict({"device": "h100-sxm", "levels": [level]})


def job(model: Any = DENSE, devices: int = 48, training: Any = BATCH, **strategy: Any) -> Job:
    cluster = flat_cluster(devices)
    return Job.from_dict({"model": model, "cluster": cluster, "strategy": strategy, "training": training})


def test_the_job_that_the_cases_break_is_sound() -> None:
    assert job().strategy.dp == 48
    assert job(EXPERTS, tp=2, ep=8).strategy.dp == 24


@table(
    ("broken", "field", "problem", "remedy"),
    [
        ({"tp": 5}, "strategy.tp", "5 does not divide 24 query heads", "use 3 or 6"),
        ({"tp": 4}, "strategy.tp", "4 does not divide 6 key-value heads", "use 3 or 6"),
        ({"tp": 3, "model": {**DENSE, "ffn": 100}}, "strategy.tp", "3 does not divide ffn 100", "use 2"),
        (
            {"tp": 3, "model": {**EXPERTS, "moe": {**EXPERTS["moe"], "shared_ffn": 100}}},  # type: ignore[dict-item]
            "strategy.tp", "3 does not divide shared expert ffn 100", "use 2",
        ),
        ({"tp": 3, "training": {**BATCH, "seq": 2048}}, "strategy.tp",
         "3 does not divide 2048 tokens of a sequence (sequence parallel)", "use 2"),
        ({"cp": 5}, "strategy.cp", "5 does not divide sequence length 6144", "use 4 or 6"),
        ({"tp": 6, "cp": 16, "context_method": "ulysses", "training": {**BATCH, "seq": 6144}}, "strategy.cp",
         "16 does not divide 4 query heads per rank (ulysses)", "use 4"),
        ({"pp": 24}, "strategy.pp", "24 does not divide 12 layers", "use 12"),
        ({"pp": 24, "stage_layers": "balanced"}, "strategy.pp", "24 for 12 layers", "use at most 12"),
        ({"pp": 8}, "strategy.pp", "8 does not divide 12 layers", "use 6 or 12, or stage_layers: balanced"),
        ({"pp": 4, "schedule": "interleaved", "interleave": 2}, "strategy.pp",
         "4 × 2 chunks does not divide 12 layers", "use 3 or 6, or stage_layers: balanced"),
        ({"schedule": "interleaved", "interleave": 5}, "strategy.pp",
         "1 × 5 chunks does not divide 12 layers", "use stage_layers: balanced"),
        ({"schedule": "interleaved", "interleave": 5, "pp": 3}, "strategy.pp",
         "3 × 5 chunks does not divide 12 layers", "use at most 2"),
        ({"schedule": "zbv", "pp": 2, "model": {**DENSE, "layers": 1}}, "strategy.schedule",
         "2 chunks for 1 layers", "use 1f1b"),
        ({"schedule": "interleaved", "interleave": 13, "pp": 2}, "strategy.interleave",
         "13 chunks for 12 layers", "use at most 12"),
        ({"pp": 2, "stage_layers": [5, 6]}, "strategy.stage_layers", "add up to 11", "custom has 12"),
        ({"pp": 3, "stage_layers": [6, 0, 6]}, "strategy.stage_layers", "has a stage without layers", "at least 1"),
        ({"tp": 3, "dp": 5, "sequence_parallel": False}, "strategy", "tp 3 × cp 1 × dp 5 × pp 1 = 15 ranks, but "
         "the cluster has 48 devices", "use dp 16, or 15 devices"),
        ({"tp": 2, "pp": 3, "dp": 5, "devices": 47}, "strategy", "30 ranks", "use 30 devices, or other degrees"),
        ({"pp": 6, "devices": 47}, "strategy", "= 6 does not divide the cluster's 47 devices", "use 42 or 48 devices"),
        ({"pp": 6, "devices": 4}, "strategy", "= 6 does not divide", "use 6 devices or smaller degrees"),
        ({"ep": 2}, "strategy.ep", "2, but custom has no experts", "use ep 1"),
        ({"expert_tp": 2}, "strategy.expert_tp", "2, but custom has no experts", "use expert_tp 1"),
        ({"model": EXPERTS, "ep": 3}, "strategy.ep", "3 does not divide 8 experts", "use 2 or 4"),
        ({"model": EXPERTS, "ep": 8, "devices": 4}, "strategy.ep", "8 does not divide the 4 ranks of a stage", "use 4"),
        ({"model": EXPERTS, "expert_tp": 3}, "strategy.expert_tp", "3 does not divide expert ffn 1024", "use 2 or 4"),
        ({"model": EXPERTS, "expert_tp": 4, "devices": 2}, "strategy.expert_tp",
         "4 does not divide the 2 ranks of a stage", "use 2"),
        ({"shard_group": 4}, "strategy.shard_group", "4 needs ZeRO", "set zero to 1, 2 or 3"),
        ({"zero": 3, "shard_group": 5}, "strategy.shard_group",
         "5 does not divide the 48 ranks of cp·dp", "use 4 or 6"),
        ({"training": {"global_batch": 100}}, "training.global_batch",
         "100 sequences do not divide over dp 48 × microbatch 1", "use 96 or 144"),
        ({"training": {"global_batch": 7}}, "training.global_batch", "7 sequences do not divide", "use 48"),
        ({"pp": 2, "schedule": "interleaved", "interleave": 2, "training": {"global_batch": 72}},
         "training.global_batch", "3 microbatches are not a multiple of pp 2", "use 96 sequences"),
    ],
)  # fmt: skip
def test_a_broken_rule_names_field_value_and_remedy(
    broken: dict[str, Any], field: str, problem: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as caught:
        job(**broken)
    error = caught.value
    assert error.field == field
    assert problem in error.problem
    assert remedy in error.remedy


@st.composite
def broken_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Small models and strategies drawn without regard to the rules."""
    heads = draw(st.integers(1, 24))
    model: dict[str, Any] = {
        "layers": draw(st.integers(2, 24)),
        "hidden": heads * 8,
        "heads": heads,
        "kv_heads": draw(st.sampled_from(divisors(heads))),
        "ffn": draw(st.integers(1, 200)),
        "vocab": 100,
    }
    degree = st.integers(1, 12)
    strategy: dict[str, Any] = {"tp": draw(degree), "cp": draw(degree), "pp": draw(degree)}
    strategy["context_method"] = draw(st.sampled_from(["ring", "ulysses"]))
    strategy["stage_layers"] = draw(st.sampled_from(["even", "balanced"]))
    if draw(st.booleans()):
        strategy |= {"schedule": "interleaved", "interleave": draw(st.integers(2, 4))}
    if draw(st.booleans()):
        model["moe"] = {"experts": draw(st.integers(1, 12)), "top_k": 1, "ffn": draw(st.integers(1, 60))}
        strategy |= {"ep": draw(degree), "expert_tp": draw(st.one_of(st.none(), degree))}
    if draw(st.booleans()):
        strategy |= {"zero": 1, "shard_group": draw(degree)}
    return {
        "model": model,
        "training": {"global_batch": draw(st.integers(1, 500)), "seq": draw(st.integers(1, 200))},
        "dp": draw(st.integers(1, 6)),
        **strategy,
    }


FIELDS = ("tp", "cp", "pp", "ep", "expert_tp", "shard_group", "interleave")


@settings(max_examples=examples(400), deadline=None)
@given(broken_jobs(), st.data())
def test_following_the_remedies_leads_to_a_job_that_builds(fields: dict[str, Any], data: st.DataObject) -> None:
    """Each remedy ends the complaint it answers, and no field is complained about twice in the same words."""
    complaints: list[str] = []
    for _ in range(30):
        devices = fields["tp"] * fields["cp"] * fields["pp"] * fields["dp"]
        try:
            job(devices=devices, **fields)
            break
        except SpecError as error:
            assert str(error) not in complaints
            complaints.append(str(error))
            fields = follow(fields, error, data)
    else:
        raise AssertionError(complaints)
    assume(complaints)


def follow(fields: dict[str, Any], error: SpecError, data: st.DataObject) -> dict[str, Any]:
    """The job with one of the values that the error recommends."""
    name = error.field.rpartition(".")[2]
    values = [int(value) for value in re.findall(r"\b\d+\b", error.remedy)]
    if "stage_layers: balanced" in error.remedy and (not values or data.draw(st.booleans())):
        return {**fields, "stage_layers": "balanced"}
    assert values, str(error)
    value = data.draw(st.sampled_from(values))
    if name == "global_batch":
        return {**fields, "training": {**fields["training"], "global_batch": value}}
    assert name in FIELDS, str(error)
    assert value != fields.get(name), str(error)
    return {**fields, name: value}


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 60), st.integers(1, 100), st.integers(2, 30))
def test_a_tensor_degree_that_is_recommended_builds_at_once(
    groups: int, per_group: int, ffn: int, seq: int, tp: int
) -> None:
    heads = groups * per_group
    model = Model(layers=1, hidden=heads * 4, heads=heads, kv_heads=groups, ffn=ffn, vocab=10)
    training = {"global_batch": 1, "seq": seq}
    with pytest.raises(SpecError) as caught:
        job(model, tp, training, tp=tp)
        assume(False)
    assert caught.value.field == "strategy.tp"
    for value in map(int, re.findall(r"\d+", caught.value.remedy)):
        assert job(model, value, training, tp=value).strategy.tp == value


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert all(10**18 % d == 0 for d in divisors(10**18))


@table(
    ("layers", "pp", "expected"), [(12, 4, (3, 3, 3, 3)), (10, 4, (2, 3, 3, 2)), (11, 4, (3, 3, 3, 2)), (3, 2, (2, 1))]
)
def test_balanced_stages_put_spare_layers_in_the_middle(layers: int, pp: int, expected: tuple[int, ...]) -> None:
    built = job({**DENSE, "layers": layers}, pp=pp, stage_layers="balanced")
    counts = stage_layer_counts(built.model, built.strategy)
    assert sum(counts) == layers
    assert sorted(counts) == sorted(expected)
    assert max(counts) in counts[len(counts) // 2 - 1 : len(counts) // 2 + 1]


@table(
    ("layers", "mtp", "pp", "chunks", "expected"),
    [
        (61, 1, 16, 1, (*[4] * 14, 3, 2)),  # a prediction module is a layer of the last stage
        (8, 1, 4, 1, (2, 3, 2, 1)),
        (2, 3, 2, 1, (2, 0)),
        (6, 0, 4, 2, (0, *[1] * 6, 0)),  # the ends hold embedding and loss alone
        (7, 0, 4, 2, (*[1] * 7, 0)),
        (6, 1, 4, 2, (0, *[1] * 6, 0)),
    ],
)
def test_balanced_stages_weigh_what_is_beside_the_head(
    layers: int, mtp: int, pp: int, chunks: int, expected: tuple[int, ...]
) -> None:
    model = {**DENSE, "layers": layers, "mtp_layers": mtp}
    fields = {"schedule": "interleaved", "interleave": chunks} if chunks > 1 else {}
    built = job(model, devices=pp, training={"global_batch": 4 * pp}, pp=pp, stage_layers="balanced", **fields)
    assert stage_layer_counts(built.model, built.strategy) == expected


@given(st.integers(1, 10**9), st.integers(1, 5000), st.integers(1, 8), st.integers(1, 64))
def test_a_batch_in_tokens_rounds_to_what_this_layout_and_others_divide(
    tokens: int, seq: int, microbatch: int, dp: int
) -> None:
    built = job(devices=dp, training={"global_batch": f"{tokens}-tokens", "seq": seq}, microbatch=microbatch)
    multiple = dp * microbatch
    assert built.sequences % multiple == 0
    assert built.sequences >= multiple
    assert built.microbatches * multiple == built.sequences
    off = abs(built.sequences * seq - tokens)
    assert off <= max(multiple * seq / 2, 0.05 * tokens) or built.sequences == multiple
    if off and tokens >= 20 * multiple * seq:
        assert built.sequences % 2 == 0  # 31 would leave one choice
    note = built.training.batch_note(multiple)
    assert (note == "") == (built.sequences * seq == tokens)
    assert not note or f"rounded to {built.sequences:,} sequences" in note


@table(
    ("batch", "request_"),
    [(1024, (1024, False)), ("1024", (1024, False)), ("1k", (1000, False)), ("16M-tokens", (16_000_000, True)),
     ("16M tokens", (16_000_000, True)), ("2e6 Tokens", (2_000_000, True)), ("1-token", (1, True))],
)  # fmt: skip
def test_batches_as_people_write_them(batch: Any, request_: tuple[int, bool]) -> None:
    assert job(devices=1, training={"global_batch": batch}).training.batch_request() == request_


@table("batch", [0, -1, 1.5, "0.5-tokens", "tokens", "-tokens", "1e16", "", True, [4]])
def test_batches_that_are_none(batch: Any) -> None:
    with pytest.raises(SpecError) as caught:
        job(devices=1, training={"global_batch": batch})
    assert caught.value.field == "training.global_batch"


def test_a_changed_strategy_is_checked_again() -> None:
    sound = job()
    assert sound.with_strategy(tp=2, dp=24).strategy.world == 48
    with pytest.raises(SpecError, match="96 ranks"):
        sound.with_strategy(tp=2)
    assert replace(sound.strategy, dp=None).data_parallel == 1
