"""A whole run against a simulation of failures, published numbers, and what must hold for any run."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost.campaign import (
    LLAMA3_DEVICE_HOURS_PER_INTERRUPTION,
    Campaign,
    best_interval,
    daly_interval,
    slowdown,
    young_interval,
)
from shardwise.spec.errors import SpecError

LLAMA3 = Campaign(
    tokens=15.6e12,
    tokens_per_second=16_384 * 430e12 / (6 * 405e9),  # 430 TFLOP/s per GPU, arXiv 2407.21783 table 4
    devices=16_384,
    price_per_device_hour=2.0,
    device_hours_per_interruption=LLAMA3_DEVICE_HOURS_PER_INTERRUPTION,
    checkpoint_seconds=5,
    restart_seconds=600,
)
seconds = st.floats(0.1, 1e4)
between = st.floats(1e3, 1e8)


def simulated(
    work: float, interval: float, write: float, restart: float, between_: float, seed: int
) -> dict[str, float]:
    """One run, event by event: intervals of work and a checkpoint, thrown away where a failure falls in."""
    random = Random(seed)
    spent = {"training": 0.0, "checkpoints": 0.0, "restarts": 0.0, "lost": 0.0, "interruptions": 0.0}
    failure = random.expovariate(1 / between_)
    for _ in range(round(work / interval)):
        while failure < interval + write:
            spent["lost"] += failure
            spent["interruptions"] += 1
            failure = random.expovariate(1 / between_)
            while failure < restart:
                spent["restarts"] += failure
                spent["interruptions"] += 1
                failure = random.expovariate(1 / between_)
            spent["restarts"] += restart
            failure -= restart
        spent["training"] += interval
        spent["checkpoints"] += write
        failure -= interval + write
    return spent


@pytest.mark.parametrize(
    ("interval", "write", "restart", "between_"),
    [(1800, 60, 600, 10_800), (600, 0, 600, 3600), (3600, 600, 1800, 7200), (900, 30, 0, 86_400)],
)
def test_a_simulation_of_failures_agrees(interval: float, write: float, restart: float, between_: float) -> None:
    work = 1e4 * interval
    spent = simulated(work, interval, write, restart, between_, seed=1)
    run = Campaign(tokens=work, tokens_per_second=1, devices=4, device_hours_per_interruption=between_ / 3600 * 4,
                   checkpoint_seconds=write, restart_seconds=restart, checkpoint_interval=interval)  # fmt: skip
    interruptions = spent.pop("interruptions")
    whole = sum(spent.values())
    assert run.seconds == pytest.approx(whole, rel=0.02)
    assert run.interruptions == pytest.approx(interruptions, rel=0.05)
    for name, share in run.shares.items():
        assert share == pytest.approx(spent[name] / whole, abs=0.01), name


def test_a_simulation_of_checkpoints_in_the_background_agrees() -> None:
    """Copies every 100 s of training, and one second in twenty goes to disks that no failure goes back to."""
    copies, interval, share = 20_000, 100.0, 0.05
    spent = simulated(copies * interval * (1 + share), interval * (1 + share), 2, 300, 3600, seed=2)
    spent.pop("interruptions")
    run = Campaign(tokens=copies * interval, tokens_per_second=1, devices=1, device_hours_per_interruption=1,
                   checkpoint_seconds=2, restart_seconds=300, checkpoint_interval=interval,
                   background_share=share)  # fmt: skip
    assert run.seconds == pytest.approx(sum(spent.values()), rel=0.02)
    assert run.shares["training"] + run.shares["checkpoints"] == pytest.approx(
        (spent["training"] + spent["checkpoints"]) / sum(spent.values()), abs=0.01
    )
    best = replace(run, checkpoint_interval=None)
    for factor in (0.5, 0.9, 1.1, 2):
        assert replace(run, checkpoint_interval=best.interval * factor).seconds > best.seconds


def test_the_interruptions_of_llama_3() -> None:
    assert pytest.approx(50_700, rel=1e-3) == LLAMA3_DEVICE_HOURS_PER_INTERRUPTION
    assert LLAMA3.between_interruptions / 3600 == pytest.approx(3.09, rel=1e-2)  # 54 days / 419
    assert LLAMA3.interruptions == pytest.approx(419 / 54 * LLAMA3.days)
    assert 0.9 < LLAMA3.goodput < 0.95  # "higher than 90% effective training time"
    assert 60 < LLAMA3.days < 75
    assert LLAMA3.cost == pytest.approx(LLAMA3.days * 24 * 16_384 * 2)


def test_intervals_by_hand() -> None:
    assert young_interval(50, 10_000) == 1000
    # √(2·50·10000) (1 + √0.0025/3 + 0.0025/9) − 50
    assert daly_interval(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly_interval(100, 40) == 40
    assert best_interval(0, 1000) == 0
    assert best_interval(10, math.inf) == math.inf


@given(seconds, seconds, between, st.floats(0.05, 20))
def test_no_other_interval_is_better(write: float, restart: float, between_: float, factor: float) -> None:
    best = best_interval(write, between_)
    other = min(best * factor, 50 * between_)
    least = slowdown(best, write, restart, between_)
    assert least <= slowdown(other, write, restart, between_) * (1 + 1e-12)


@given(st.floats(1e-9, 0.3))
def test_the_published_estimates_come_near_the_best(part: float) -> None:
    """Daly's series is off by its next term; Young's interval by its first two."""
    best, daly, young = best_interval(part, 1), daly_interval(part, 1), young_interval(part, 1)
    assert daly == pytest.approx(best, rel=0.005)
    assert young == pytest.approx(best, rel=1.3 * math.sqrt(part) + 1e-9)


@given(between, st.floats(1.01, 10), seconds, seconds)
def test_a_run_is_shorter_with_fewer_failures_and_faster_recovery(
    between_: float, more: float, write: float, restart: float
) -> None:
    run = Campaign(tokens=1e9, tokens_per_second=1e3, devices=1, device_hours_per_interruption=between_ / 3600 * more,
                   checkpoint_seconds=write, restart_seconds=restart)  # fmt: skip
    assert 0 < run.goodput <= 1
    assert run.seconds >= run.useful_seconds
    worse: list[dict[str, Any]] = [
        {"device_hours_per_interruption": between_ / 3600},
        {"checkpoint_seconds": write * more},
        {"restart_seconds": restart * more},
        {"tokens": 1e9 * more},
        {"tokens_per_second": 1e3 / more},
    ]
    for change in worse:
        assert replace(run, **change).seconds > run.seconds * (1 - 1e-12), change
    assert sum(run.shares.values()) == pytest.approx(1)
    assert min(run.shares.values()) >= 0
    given_ = replace(run, checkpoint_interval=run.interval * more)
    assert given_.best_interval == run.interval
    assert given_.goodput <= run.goodput * (1 + 1e-12)


def test_without_failures_nothing_is_saved_and_nothing_lost() -> None:
    run = Campaign(tokens=864e6, tokens_per_second=1e4, devices=8, checkpoint_seconds=60, restart_seconds=600)
    assert (run.goodput, run.interval, run.interruptions, run.days) == (1, math.inf, 0, 1)
    assert (run.device_hours, run.cost) == (192, None)
    assert replace(run, price_per_device_hour=0).cost == 0
    saving = replace(run, checkpoint_interval=540.0)
    assert saving.goodput == pytest.approx(0.9)
    assert saving.shares == pytest.approx({"training": 0.9, "checkpoints": 0.1, "restarts": 0, "lost": 0})


def test_a_checkpoint_that_takes_no_time_is_always_taken() -> None:
    run = Campaign(tokens=1e9, tokens_per_second=1e3, devices=1, device_hours_per_interruption=1, restart_seconds=360)
    assert run.interval == 0
    assert run.goodput == pytest.approx(math.exp(-0.1))
    assert run.shares["lost"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": math.inf}, "tokens"),
        ({"tokens": 1e300, "tokens_per_second": 1e-300}, "tokens"),
        ({"tokens_per_second": -1}, "tokens_per_second"),
        ({"tokens_per_second": math.nan}, "tokens_per_second"),
        ({"devices": 0}, "devices"),
        ({"price_per_device_hour": -1}, "price_per_device_hour"),
        ({"device_hours_per_interruption": 0}, "device_hours_per_interruption"),
        ({"restart_seconds": -1}, "restart_seconds"),
        ({"checkpoint_interval": 0}, "checkpoint_interval"),
        ({"checkpoint_interval": math.inf}, "checkpoint_interval"),  # with failures: never a checkpoint
        ({"device_hours_per_interruption": 0.1}, "checkpoint_interval"),
    ],
)
def test_numbers_that_make_no_run(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        replace(LLAMA3, **change)
    assert caught.value.field == field
    assert caught.value.remedy
