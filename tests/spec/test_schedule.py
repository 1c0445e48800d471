"""The learning rate rises, stays and falls as its schedule says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.errors import SpecError
from shardwise.spec.run import LearningRateSchedule, Run

KINDS = st.sampled_from(["constant", "cosine", "linear", "wsd"])


@settings(deadline=None)
@given(KINDS, st.integers(0, 40), st.integers(1, 200), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(0.01, 1))
def test_up_once_and_down_once(kind: str, warmup: int, after: int, final: float, decay: float) -> None:
    schedule = LearningRateSchedule(kind=kind, warmup=warmup, final=final, decay=decay)  # type: ignore[arg-type]
    steps = warmup + after
    shares = [schedule.share(step, steps) for step in range(steps)]
    rising, falling = shares[: warmup or 1], shares[max(0, warmup - 1) :]
    assert all(0 <= share <= 1 for share in shares)
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert kind == "constant" or math.isclose(shares[-1], final, abs_tol=1e-12)
    assert warmup == 0 or shares[warmup - 1] == 1.0
    assert schedule.share(steps + 5, steps) == shares[-1]


def test_wsd_stays_until_its_decay() -> None:
    schedule = LearningRateSchedule(kind="wsd", warmup=10, decay=0.2, final=0.0)
    shares = [schedule.share(step, 100) for step in range(100)]
    assert shares[10:80] == [1.0] * 70
    assert shares[89] == pytest.approx(0.5)


def test_the_cosine_is_half_way_in_the_middle() -> None:
    assert LearningRateSchedule(warmup=0, final=0.0).share(49, 100) == pytest.approx(0.5)


def test_a_larger_batch_has_a_larger_rate() -> None:
    schedule = LearningRateSchedule(reference_batch=64)
    assert schedule.batch_factor(256, "adamw") == 2
    assert schedule.batch_factor(256, "sgd-momentum") == 4
    assert LearningRateSchedule().batch_factor(256, "adamw") == 1


def test_a_run_shorter_than_its_warmup_is_refused() -> None:
    with pytest.raises(SpecError, match="warmup: 10 steps in a run of 10"):
        Run(steps=10, schedule=LearningRateSchedule(warmup=10))
