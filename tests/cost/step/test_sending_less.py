"""What compression and meeting seldom are worth over a slow line."""

from __future__ import annotations

from cost.builders import (
    far_apart,
    traffics,
)
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.verdict import sending_less
from shardwise.spec.job import Job


def test_meeting_seldom_pays_over_the_internet() -> None:
    plain = predict(far_apart()).step_seconds
    seldom = [predict(far_apart(synchronise={"method": "diloco", "inner_steps": n})).step_seconds for n in (8, 64)]
    assert plain > 3 * seldom[0] > 12 * seldom[1]  # fp32 weights, not bf16 gradients
    assert predict(far_apart(synchronise="async")).step_seconds < plain


def test_factors_are_the_fewest_bytes_and_signs_come_next() -> None:
    def bytes_sent(method: str) -> float:
        return sum(one.bytes_sent for one in traffics(far_apart(compression=method), "dp"))

    sizes = [bytes_sent(method) for method in ("powersgd", "1bit", "int8", "bf16", "none")]
    assert sizes == sorted(sizes)


def test_a_step_that_waits_for_gradients_is_told_what_would_pay() -> None:
    found = sending_less(far_apart())
    assert found is not None
    assert "diloco" in [one.strategy.synchronise.method for one in found.speedups]
    assert sending_less(far_apart(synchronise="diloco")) is None
    inside = Job.from_dict({"model": "llama3-8b", "cluster": "dgx-h100:1", "strategy": {"tp": 8},
                            "training": {"global_batch": 256, "seq": 4096}})  # fmt: skip
    assert sending_less(inside) is None
