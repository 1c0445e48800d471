"""What is priced and not built is refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.engine.refuse import require_runs
from shardwise.spec import Job
from shardwise.spec.errors import SpecError

HIDDEN = {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "overlap": {"ep": True}}


def job(model: str, **strategy: Any) -> Job:
    training = {"global_batch": 8, "seq": 32, "precision": "fp32"}
    return Job.from_dict({"model": model, "cluster": "laptop:4", "strategy": strategy, "training": training})


@pytest.mark.parametrize(
    ("model", "strategy", "field"),
    [
        ("tiny", {"tp": 2, "dp": 2, "overlap": {"tp": True}}, "strategy.overlap.tp"),
        (
            "tiny-moe",
            {"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipev", "overlap": {"ep": True}},
            "strategy.overlap.ep",
        ),
    ],
)
def test_what_is_not_built_is_refused(model: str, strategy: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match="this engine") as caught:
        require_runs(job(model, **strategy))
    assert str(caught.value).startswith(field)


def test_what_is_not_used_is_not_asked_for() -> None:
    require_runs(job("tiny", dp=4, overlap={"tp": True}))
