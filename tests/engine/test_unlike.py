"""Replicas of unlike numbers of microbatches and stages of unlike degrees: as in one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from engine.layouts import SEQ, job_of, model_named
from engine.parity import check
from shardwise.layout.groups import coordinate, first_rank, rank_at
from shardwise.layout.views import pieces_received, pieces_sent
from shardwise.measure.reference import cluster_of
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import verdict
from shardwise.spec.training import Optimization, Training


def job(name: str | Model, units: int = 2, **fields: Any) -> Job:
    """Of ``units`` times the smallest batch."""
    strategy = Strategy(**fields)
    model = model_named(name) if isinstance(name, str) else name
    training = Training(
        global_batch=units * strategy.batch_multiple,
        seq=SEQ,
        precision="fp32",
        optimization=Optimization(clip_norm=0.2),
    )
    cluster = cluster_of(cluster_from("laptop"), strategy.world)
    return Job(model=model, cluster=cluster, strategy=strategy, training=training)


def run(one: Job) -> None:
    assert verdict(one).status == "runs", verdict(one)
    check(one)


SHARES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole copies": ("tiny", {"dp": 2, "dp_shares": (1, 3)}),
    "sharded states": ("tiny", {"dp": 3, "dp_shares": (2, 1, 3), "zero": 1}),
    "stages": ("tiny", {"dp": 2, "pp": 2, "dp_shares": (3, 1), "zero": 1, "schedule": "zb-h1"}),
}  # fmt: skip
SLOW_SHARES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tiny", {"dp": 2, "dp_shares": (1, 2), "zero": 2, "accumulate": "local", "microbatch": 2}),
    ("tiny", {"dp": 2, "dp_shares": (1, 2), "zero": 3, "accumulate": "local", "keep_parameters": True}),
    ("tiny", {"dp": 4, "dp_shares": (1, 2, 2, 1), "zero": 1, "shard_group": 2}),
    ("tiny", {"dp": 2, "tp": 2, "dp_shares": (3, 1), "recompute": "full"}),
    ("tiny", {"dp": 2, "cp": 2, "dp_shares": (1, 3), "zero": 1}),
    ("tiny-moe", {"dp": 2, "dp_shares": (1, 3)}),
    ("tiny-moe", {"dp": 2, "tp": 2, "ep": 2, "expert_tp": 1, "dp_shares": (1, 2), "zero": 1}),
    ("tiny-mla", {"dp": 2, "pp": 2, "dp_shares": (1, 2), "schedule": "interleaved", "interleave": 2}),
    ("tied-gpt", {"dp": 2, "pp": 2, "dp_shares": (1, 3), "schedule": "zbv", "zero": 1}),
    ("tied-gpt", {"dp": 2, "pp": 2, "dp_shares": (3, 1), "order": ("tp", "cp", "pp", "dp")}),
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", SHARES.values(), ids=SHARES)
def test_replicas_with_unlike_shares(layout: tuple[str, dict[str, Any]]) -> None:
    run(job(layout[0], **layout[1]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_SHARES, ids=lambda one: f"{one[0]} {one[1]}")
def test_other_shares_too(layout: tuple[str, dict[str, Any]]) -> None:
    run(job(layout[0], **layout[1]))


STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "two devices and one": ("tiny", {"pp": 2, "stage_tp": (2, 1), "stage_layers": (3, 1)}),
    "one device and two": ("tiny", {"pp": 2, "stage_dp": (1, 2), "zero": 1, "stage_layers": (1, 3)}),
    "other ways to use two": ("tiny", {"pp": 2, "stage_tp": (2, 1), "stage_dp": (1, 2), "schedule": "zb-h1"}),
    "without sequence parallelism": ("tiny", {"pp": 2, "stage_tp": (1, 2), "sequence_parallel": False}),
}  # fmt: skip
SLOW_STAGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tiny", {"pp": 2, "stage_tp": (2, 1), "sequence_parallel": False, "stage_dp": (1, 2)}),
    ("tiny", {"pp": 2, "stage_dp": (4, 1), "zero": 3}),
    ("tiny", {"pp": 2, "stage_dp": (1, 2), "zero": 2, "microbatch": 2}),
    ("tiny", {"pp": 2, "stage_tp": (2, 1), "cp": 2, "zero": 1}),
    ("tiny", {"pp": 2, "stage_tp": (1, 2), "cp": 2, "context_method": "ulysses"}),
    ("tiny", {"pp": 3, "stage_tp": (1, 2, 1), "stage_dp": (2, 1, 1), "stage_layers": (1, 2, 1)}),
    ("tiny", {"pp": 2, "stage_tp": (1, 2), "schedule": "interleaved", "interleave": 2, "recompute": "full"}),
    ("tiny", {"pp": 2, "stage_dp": (2, 1), "schedule": "zbv", "zero": 1}),
    ("tiny", {"pp": 2, "stage_dp": (1, 2), "schedule": "dualpipev"}),
    ("tiny-moe", {"pp": 2, "stage_dp": (2, 4), "ep": 2, "zero": 1}),
    ("tiny-moe", {"pp": 2, "stage_tp": (2, 1), "stage_dp": (1, 2)}),
    ("tiny-mla", {"pp": 2, "stage_tp": (1, 2), "recompute": "selective"}),
    ("tied-gpt", {"pp": 3, "stage_tp": (1, 2, 1), "stage_layers": (1, 2, 1)}),
    ("tied-gpt", {"pp": 2, "stage_dp": (1, 2), "schedule": "zbv", "zero": 1}),
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", STAGES.values(), ids=STAGES)
def test_stages_with_unlike_degrees(layout: tuple[str, dict[str, Any]]) -> None:
    run(job(layout[0], 4, **layout[1]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_STAGES, ids=lambda one: f"{one[0]} {one[1]}")
def test_other_stages_too(layout: tuple[str, dict[str, Any]]) -> None:
    run(job(layout[0], 4, **layout[1]))


@pytest.mark.slow
def test_prediction_modules_behind_unlike_stages() -> None:
    model = replace(model_named("tiny-mla"), mtp_layers=1, published_parameters=None)
    run(job(model, 4, pp=3, stage_tp=(2, 1, 2), stage_layers=(1, 2, 1)))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "fields", [{"stage_tp": (2, 4)}, {"stage_dp": (4, 2), "cp": 2}, {"stage_tp": (4, 1), "stage_dp": (1, 2)}], ids=str
)
def test_every_element_arrives_once(fields: dict[str, Any], sequence_parallel: bool) -> None:
    one = job("tiny", 2, pp=2, sequence_parallel=sequence_parallel, **fields)
    for sender, receiver in ((0, 1), (1, 0)):
        for rank in ranks_of(one, receiver):
            own = one.of_stage(receiver).strategy
            tokens = SEQ // own.cp // (own.tp if sequence_parallel else 1)
            cells = [
                cell
                for piece in pieces_received(one, rank, sender)
                for cell in product(range(*piece.rows), range(*piece.tokens))
            ]
            assert sorted(cells) == sorted(product(range(own.microbatch), range(tokens)))
        arriving = {
            (piece.rank, rank) for rank in ranks_of(one, receiver) for piece in pieces_received(one, rank, sender)
        }
        leaving = {(rank, piece.rank) for rank in ranks_of(one, sender) for piece in pieces_sent(one, rank, receiver)}
        assert arriving == leaving


def ranks_of(one: Job, stage: int) -> range:
    return range(first_rank(one.strategy, stage), first_rank(one.strategy, stage + 1))


def test_a_rank_has_one_place() -> None:
    strategy = Strategy(pp=3, stage_tp=(2, 1, 4), stage_dp=(1, 2, 2), cp=2)
    assert strategy.world == 4 + 4 + 16 and (strategy.tp, strategy.dp) == (4, 2)
    places = [{name: coordinate(strategy, name, rank) for name in strategy.order} for rank in range(strategy.world)]
    assert [rank_at(strategy, place) for place in places] == list(range(strategy.world))


def test_shares_cover_the_batch() -> None:
    one = job("tiny", 3, dp=3, dp_shares=(2, 1, 3), microbatch=2)
    rows = [one.rows_of(rank) for rank in range(3)]
    assert [row for part in rows for row in part] == list(range(one.sequences))
    assert [len(part) for part in rows] == [12, 6, 18] and one.microbatches == 9


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"dp": 2, "dp_shares": (1, 3, 2)}, r"dp_shares: names 3 data-parallel ranks; give 2"),
    ({"dp": 2, "dp_shares": (1, 0)}, r"dp_shares\[1\]: 0"),
    ({"pp": 2, "stage_tp": (2, 1, 1)}, r"stage_tp: names 3 pipeline ranks; give 2"),
    ({"pp": 2, "tp": 4, "stage_tp": (2, 1)}, r"tp: 4, but the largest of stage_tp is 2"),
    ({"pp": 2, "stage_dp": (3, 2)}, r"stage_dp: 2 does not divide the largest, 3"),
    ({"pp": 2, "stage_tp": (2, 1), "order": ("pp", "tp", "cp", "dp")}, r"stage_tp: .* put pp last"),
    ({"pp": 2, "stage_dp": (2, 1), "dp_shares": (1, 3)}, r"dp_shares: .* use one"),
    ({"pp": 2, "stage_tp": (3, 1)}, r"strategy\.tp: 3 does not divide"),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_does_not_fit_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job("tiny", **fields)


def test_a_world_of_another_size_is_refused() -> None:
    one = job("tiny", pp=2, stage_tp=(2, 1))
    with pytest.raises(SpecError, match=r"the stages have 3 ranks together, but the cluster has 4 devices"):
        replace(one, cluster=cluster_from("laptop:4"))


NOT_RUN: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("tiny", {"dp": 2, "dp_shares": (1, 3), "zero": 3, "accumulate": "local"}, "needs"),
    ("tiny", {"dp": 2, "dp_shares": (1, 3), "zero": 2}, "needs"),
    ("tiny-moe", {"dp": 2, "dp_shares": (1, 3), "ep": 2}, "refused"),
    ("tiny", {"dp": 2, "pp": 2, "dp_shares": (1, 3), "schedule": "dualpipev"}, "needs"),
    ("tied-gpt", {"pp": 2, "stage_tp": (1, 2)}, "refused"),
)


@pytest.mark.parametrize(("name", "fields", "status"), NOT_RUN, ids=[str(one[1]) for one in NOT_RUN])
def test_what_does_not_run_is_said(name: str, fields: dict[str, Any], status: str) -> None:
    assert verdict(job(name, 4, **fields)).status == status


def test_an_even_job_is_as_it_was() -> None:
    plain = job_of(model_named("tiny"), {"dp": 2})
    assert plain is not None and plain.of_stage(0) is plain and plain.strategy.of_stage(0) is plain.strategy
