"""How a run is described: short where nothing is said, and refused in one line where it contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec import Job, SpecError
from shardwise.spec.run import Data, Run


def job(**run: Any) -> Job:
    return Job.from_dict({"model": "tiny", "cluster": "laptop:2", "run": run})


def test_a_run_that_says_nothing_is_not_written() -> None:
    assert "run" not in job().to_dict()
    assert job(steps=7).to_dict()["run"] == {"steps": 7}


def test_a_run_is_read_back_as_it_was_written() -> None:
    one = job(
        steps=50,
        data={"shards": ["a", "b"], "weights": [1, 3], "stage": "memory", "prefetch": 4},
        schedule={"kind": "wsd", "warmup": 5},
        checkpoints={"steps": 10, "seconds": None, "keep_every": 20, "disk_full": "stop"},
        timeouts={"step": "30s"},
        spikes={"factor": 2.5, "policy": "roll-back"},
        start_from="runs/other",
    )
    assert Job.from_yaml(one.to_yaml()) == one
    assert one.run.rolls_back
    assert not Run().rolls_back


def test_ranks_compute_on_what_the_cluster_has() -> None:
    assert job().run_device == "cpu"
    gpus = Job.from_dict({"model": "tiny", "cluster": "dgx-h100:1"})
    assert gpus.run_device == "cuda"
    assert Job.from_dict({**gpus.to_dict(), "run": {"device": "cpu"}}).run_device == "cpu"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"steps": 5, "schedule": {"warmup": 5}}, "run.schedule.warmup: 5 steps in a run of 5"),
        ({"data": {"shards": ["a"], "weights": [1, 2]}}, "run.data.weights: 2 weights for 1 shards"),
        ({"data": {"shards": ["a.bin"]}}, "run.data.shards[0]: 'a.bin' has a suffix; write 'a'"),
        ({"data": {"held_out": 0}}, "run.evaluation: there is no held-out data"),
        ({"data": {"prefetch": 0}}, "run.data.prefetch"),
        ({"non_finite": {"policy": "ignore"}}, "run.non_finite.policy: 'ignore' is not a choice"),
        ({"spikes": {"factor": 0.5}}, "run.spikes.factor: 0.5 is below 1"),
        ({"checkpoints": {"keep": 0}}, "run.checkpoints.keep"),
        ({"timeouts": {"step": 0}}, "run.timeouts.step"),
        ({"step": 3}, "run.step: unknown field; did you mean steps"),
    ],
    ids=str,
)
def test_a_mistake_is_named(run: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(**run)
    assert said in str(caught.value)


def test_the_built_in_corpus_needs_its_vocabulary() -> None:
    Data().check_vocabulary(257)
    Data(shards=("a",)).check_vocabulary(100)
    with pytest.raises(SpecError, match="needs a vocabulary of 257, the model has 100"):
        Data().check_vocabulary(100)
