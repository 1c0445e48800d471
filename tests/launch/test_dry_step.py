"""A microbatch that is `auto` is tried for one step in processes of its own; what does not fit is followed by less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.warm import warm_ranks
from shardwise.cost.memory.device import peak_memory
from shardwise.launch import preflight
from shardwise.planner.automatic import ways_to_fit
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec import Job
from shardwise.spec.errors import SpecError


def job(global_batch: int = 8) -> Job:
    training = {"global_batch": global_batch, "seq": 128, "precision": "fp32"}
    strategy = {"dp": 1, "microbatch": "auto"}
    return Job.from_dict({"model": "tiny", "cluster": "laptop:1", "strategy": strategy, "training": training})


def with_memory(one: Job, tensors_bytes: float) -> Job:
    device = replace(one.cluster.device, memory=round(tensors_bytes) + one.cluster.device.framework_memory)
    return replace(one, cluster=replace(one.cluster, device=device))


def test_the_next_smaller_is_taken_where_a_step_does_not_fit(tmp_path: Path) -> None:
    """The plan is made for more memory than the device turns out to have."""
    smallest = ways_to_fit(job())[-1]
    memory = peak_memory(smallest)
    room = 1.2 * (memory.total - memory.allowance)
    said: list[str] = []
    ways = [with_memory(one, room) for one in (ways_to_fit(job())[0], smallest)]
    with warm_ranks():
        found = preflight._first_that_fits(ways, RunFolder(tmp_path / "dry"), said.append)
    assert found == ways[1]
    assert "a step takes" in said[0] and said[1] == "microbatch 1: a dry step fits"


def test_a_job_without_auto_is_not_tried(tmp_path: Path) -> None:
    one = replace(job(), run=replace(job().run, automatic=()))
    assert preflight.with_fitting_microbatch(one, RunFolder(tmp_path), print) is one


def test_what_fails_for_another_reason_is_said(tmp_path: Path) -> None:
    wrong = replace(job(), run=replace(job().run, device="cuda"))
    with warm_ranks(), pytest.raises(SpecError, match=r"the dry step failed.*no GPU"):
        preflight._first_that_fits([wrong], RunFolder(tmp_path / "dry"), print)
