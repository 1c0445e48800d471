"""Regret and rank correlation among published runs of one job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.accuracy.runs import read_runs
from shardwise.accuracy.scores import choice_summary, choices, layouts_of_jobs, rank_correlation, same_job

TABLES = Path(__file__).parents[2] / "validation"
RUNS = list(read_runs(TABLES / "training_runs.csv"))


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [30, 20, 10], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),  # 1 - 6·2/(4·15)
        ([1, 1, 2], [1, 2, 3], 0.75**0.5),  # ties share their mean rank
        ([1, 1], [1, 2], None),
    ],
)
def test_spearman(first: list[float], second: list[float], wanted: float | None) -> None:
    assert rank_correlation(first, second) == (None if wanted is None else pytest.approx(wanted))


def test_layouts_of_one_job_differ_in_the_strategy_alone() -> None:
    groups = layouts_of_jobs(RUNS)
    assert len(groups) >= 15
    for own in groups:
        assert len({same_job(run) for run in own}) == 1
        assert len({run.source.name for run in own}) == 1
        strategies = [run.job.strategy for run in own]
        assert all(one != other for one, other in pairwise(strategies))


def test_another_release_or_another_machine_is_another_job() -> None:
    """Grok-1 of two releases on 512 H100; 1024B on one slice of 2,048 TPU v5p and on two slices of 1,024."""
    second = {run.row_id: run for run in read_runs(TABLES / "training_runs_2.csv")}
    for one, other in (
        ("dgxc_25.02_Grok1-314B_H100_512_BF16", "dgxc_25.05.02_Grok1-314B_H100_512_BF16"),
        ("maxtext_TPU-v5p_1024B_1xv5p-4096", "maxtext_TPU-v5p_1024B_2xv5p-2048"),
    ):
        assert same_job(second[one]) == same_job(second[one]) != same_job(second[other])


def test_regret_is_what_the_wrong_choice_costs() -> None:
    """Predicted exactly, nothing is lost; predicted the wrong way round, the slowest is chosen."""
    right = {run.row_id: run.reported_seconds or 0.0 for run in RUNS}
    assert all(one.regret == 0 and one.rank_correlation in (None, pytest.approx(1.0)) for one in choices(RUNS, right))
    wrong = {name: -seconds for name, seconds in right.items()}
    found = choices(RUNS, wrong)
    for one, own in ((one, [run for run in RUNS if run.row_id in (one.chosen, one.fastest)]) for one in found):
        times = [run.reported_seconds or 0.0 for run in own]
        assert one.regret == pytest.approx(max(times) / min(times) - 1)
    total = choice_summary(found)
    assert total is not None
    assert total.worst_regret == found[0].regret >= total.mean_regret > 0
    assert choice_summary([]) is None
