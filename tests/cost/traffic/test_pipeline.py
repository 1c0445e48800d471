"""What a pipeline sends in a step, which of it is waited for, and its bubble."""

from __future__ import annotations

import pytest

from cost.builders import (
    GPT,
    HIDDEN,
    LLAMA,
    far_apart,
    job,
    sent,
    traffics,
)
from shardwise.cost.analysis import analyze
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import simulated_step
from shardwise.cost.traffic.pipeline import bubble_share, exposed_messages
from shardwise.spec.schedules import job_schedules


def test_a_boundary_carries_one_activation_each_way_per_microbatch() -> None:
    case = job(LLAMA, dp=1, pp=4, training={"global_batch": 6})
    found = traffics(case, "pp", 1)
    assert {(t.size_bytes, t.count) for t in found} == {(HIDDEN, 6)}
    assert sent(found) == 2 * 6 * HIDDEN


def test_sequence_parallelism_divides_the_boundary_by_tp() -> None:
    split, whole = (job(LLAMA, dp=1, pp=2, tp=2, sequence_parallel=sp) for sp in (True, False))
    assert sent(traffics(split, "pp")) == sent(traffics(whole, "pp")) / 2


def test_interleaving_sends_v_times_the_messages() -> None:
    plain = job(LLAMA, dp=1, pp=2, training={"global_batch": 4})
    interleaved = job(LLAMA, dp=1, pp=2, schedule="interleaved", interleave=4, training={"global_batch": 4})
    assert sent(traffics(interleaved, "pp")) == 4 * sent(traffics(plain, "pp"))


def test_both_ends_sum_the_gradients_of_a_tied_embedding() -> None:
    case = job(GPT, dp=1, tp=2, pp=4)
    size = 512 * 64 / 2 * 2
    for rank, expected in ((0, size), (1, 0), (2, 0), (3, size)):
        assert sent(traffics(case, "pp", rank), "embedding") == expected
    assert sent(traffics(job(LLAMA, dp=1, tp=2, pp=4), "pp"), "embedding") == 0
    folded = job(GPT, dp=1, pp=4, schedule="zbv", training={"global_batch": 8})
    assert sent(traffics(folded, "pp"), "embedding") == 0  # one tensor on the first rank


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 64)])
def test_messages_on_the_critical_path_of_1f1b(p: int, m: int) -> None:
    """2(p−1)m/p + 2(p−2), from the event simulation (accuracy notes, section 6); overlapped only fill and drain."""
    case = job(LLAMA, dp=1, pp=p, training={"global_batch": m})
    assert exposed_messages(case) == 2 * (p - 1) * m / p + 2 * (p - 2)
    hidden = job(LLAMA, dp=1, pp=p, training={"global_batch": m}, overlap={"pp": True})
    assert exposed_messages(hidden) == 2 * (p - 1)


def test_a_single_microbatch_waits_for_every_message() -> None:
    assert exposed_messages(job(LLAMA, dp=1, pp=4)) == 2 * 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zbv", "dualpipev"])
def test_no_price_of_a_step_is_below_what_a_slow_link_carries(schedule: str) -> None:
    """Floor, closed form and simulation: every message of a microbatch over the same 200 Mb/s, one after the other."""
    chunks = {"interleave": 2} if schedule == "interleaved" else {}
    case = far_apart(tp=1, cp=4, dp=4, pp=2, schedule=schedule, order=["tp", "cp", "dp", "pp"], **chunks)
    messages = {"interleaved": 3, "zbv": 2, "dualpipev": 2}.get(schedule, 1) * case.microbatches
    prediction = predict(case)
    carried = messages * prediction.slowest.message_seconds
    assert carried > 10 * case.microbatches * prediction.slowest.microbatch_seconds
    assert analyze(case).floor_seconds >= carried
    assert analyze(case).predicted_seconds >= carried
    assert prediction.pipeline_seconds >= carried
    assert simulated_step(prediction).pipeline_seconds >= carried


@pytest.mark.parametrize("schedule", job_schedules())
def test_the_floor_is_below_the_prediction_where_messages_set_the_pace(schedule: str) -> None:
    chunks = {"interleave": 2} if schedule == "interleaved" else {}
    found = analyze(
        far_apart(tp=1, cp=2, dp=4, pp=4, microbatch=16, schedule=schedule, order=["tp", "cp", "dp", "pp"], **chunks)
    )
    assert found.step.message_seconds > 0.5 * found.predicted_seconds
    assert found.floor_seconds < found.predicted_seconds


# Idle time over busy time with F = B = W = 1 (formulas D.4): p = 4, m = 16.
BUBBLES = {
    "gpipe": 3 / 16,
    "1f1b": 3 / 16,
    "interleaved": 3 / 16 / 2,
    "zb-h1": 3 * (1 + 1 - 1) / (3 * 16),
    "zb-h2": 0,
    "zbv": 0,
    # (p/2 − 1)(F + I − W), as its own actions simulate; the README's figure takes F and B as one block.
    "dualpipe": (4 / 2 - 1) * (1 + 1 - 1) / (3 * 16),
    "dualpipev": (4 - 1) * (1 + 1 - 1) / (3 * 2 * 16),  # two half stages on each of 4 ranks
}


@pytest.mark.parametrize("schedule", BUBBLES)
def test_bubbles(schedule: str) -> None:
    assert bubble_share(schedule, 4, 16, 2) == pytest.approx(BUBBLES[schedule])
    assert bubble_share(schedule, 1, 16, 2) == 0
