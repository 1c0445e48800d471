"""Layouts in which a group straddles a level of the network: priced, and searched where nothing else is left."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from cost.builders import LLAMA, MOE, switched
from planner.cases import job_of, within
from shardwise.cost.step.prediction import predict
from shardwise.cost.sweep.price import TablePricer
from shardwise.layout.groups import expert_runs, group_runs
from shardwise.layout.network import spanned
from shardwise.planner.candidate import job_with
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.space import Space
from shardwise.spec.hardware import Cluster
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy


def straddles(cluster: Cluster, strategy: Strategy) -> bool:
    runs = [group_runs(strategy, names) for names in (("tp",), ("cp",), ("pp",), ("cp", "dp"))]
    found = [spanned(cluster, one, "strategy") for one in (*runs, expert_runs(strategy))]
    return any(one is not None and one.straddles for one in found)


@pytest.mark.parametrize("model", [LLAMA, MOE])
def test_the_space_is_divided_by_whether_a_group_straddles(model: Model) -> None:
    """Every layout is in one of the two; on nodes whose size all degrees divide the second is empty."""
    odd, even = switched(6, 4), switched(8, 4)
    job = job_of(model, odd, 48, seq=1024)
    layouts = {value: [group.base for group in Space(job, straddling=value).groups()] for value in (False, True)}
    assert layouts[False] and layouts[True]
    for value, bases in layouts.items():
        assert all(straddles(odd, base) == value for base in bases)
    assert not list(Space(job_of(model, even, 64, seq=1024), straddling=True).groups())


def test_three_nodes_have_plain_data_parallelism() -> None:
    """A shard group of 3 straddles nodes of 8; that of all 24 does not, and keeps the layout in the space."""
    job = job_of(LLAMA, switched(8, 3), 48, seq=1024)
    groups = list(Space(job, within(tp="1", cp="1", pp="1")).groups())
    assert [group.base.dp for group in groups] == [24]
    sizes = {choice.shard_group for choice in groups[0].shards}
    assert None in sizes and 8 in sizes and not sizes & {3, 6, 12}
    asked = Space(job, within(tp="1", cp="1", pp="1", shard_group="3"))
    assert {choice.shard_group for group in asked.groups() for choice in group.shards} == {3}


def test_a_layout_that_straddles_is_planned_if_asked_for() -> None:
    """And only then."""
    cluster = switched(6, 4)
    job = job_of(LLAMA, cluster, 48, seq=1024)
    free, asked = plan(Request(job)), plan(Request(job, within(tp="4", pp="1", cp="1")))
    assert isinstance(free, Plan) and isinstance(asked, Plan)
    assert not any(straddles(cluster, one.job.strategy) for one in free.candidates)
    assert straddles(cluster, asked.best.job.strategy)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [LLAMA, MOE])
def test_tables_price_such_a_layout_like_one_job(model: Model) -> None:
    job = job_of(model, switched(6, 2, 2), 48, seq=1024)
    space = Space(job, within(microbatch="1", recompute="none", schedule="1f1b"), straddling=True, any_priced=True)
    random, checked = Random(0), 0
    for piece in TablePricer(job).pieces(list(space.groups())):
        for _ in range(8):
            column, row = (random.randrange(size) for size in piece.memory_bytes.shape)
            alone = job_with(job, piece.strategy(column, row), int(piece.sequences[row]))
            seconds = piece.step_seconds(np.array([row]))[column, 0]
            assert seconds == pytest.approx(predict(alone).step_seconds, rel=1e-9)
            checked += 1
    assert checked >= 8
