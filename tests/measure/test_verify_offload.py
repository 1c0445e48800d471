"""`verify` with every kind of state outside of the device's memory: it compares what is there, wherever it is."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from engine.parity import check
from shardwise.spec import Job
from shardwise.spec.support import verdict

KINDS: dict[str, tuple[str, ...]] = {
    "optimizer": ("optimizer",),
    "gradients": ("optimizer", "gradients"),
    "weights": ("optimizer", "weights"),
    "states": ("optimizer", "gradients", "weights"),
    "activations": ("activations",),
    "everything": ("optimizer", "gradients", "weights", "activations"),
}
Case = tuple[str, int, float, str]
ALL: list[Case] = list(product(KINDS, range(4), (0.5, 1.0), ("cpu", "nvme")))
QUICK: list[Case] = [
    ("optimizer", 0, 0.5, "nvme"),
    ("gradients", 2, 1.0, "cpu"),
    ("weights", 3, 1.0, "cpu"),
    ("states", 3, 0.5, "nvme"),
    ("activations", 1, 1.0, "cpu"),
]


def job(kind: str, zero: int, share: float, target: str, **strategy: Any) -> Job:
    offload = {**dict.fromkeys(KINDS[kind], share), "target": target}
    training = {"global_batch": 4, "seq": 16, "precision": "fp32", "optimization": {"clip_norm": 0.2}}
    return Job.from_dict(
        {
            "model": "tiny",
            "cluster": f"laptop:{2 * strategy.get('pp', 1)}",
            "strategy": {"dp": 2, "zero": zero, "offload": offload, **strategy},
            "training": training,
        }
    )


RUNS = [one for one in ALL if verdict(job(*one)).status == "runs"]


def test_all_kinds_and_targets_run_with_some_stage_of_zero() -> None:
    found = {(kind, share, target) for kind, _, share, target in RUNS}
    assert found == set(product(KINDS, (0.5, 1.0), ("cpu", "nvme")))
    assert set(QUICK) <= set(RUNS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_verify_compares_what_is_offloaded(case: Case) -> None:
    check(job(*case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [one for one in RUNS if one not in QUICK], ids=str)
def test_verify_compares_whatever_is_offloaded(case: Case) -> None:
    check(job(*case))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_verify_compares_what_a_pipeline_offloads(schedule: str) -> None:
    check(job("everything", 3, 1.0, "cpu", pp=2, schedule=schedule))
