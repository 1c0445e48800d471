"""The published runs next to a job."""

from __future__ import annotations

import pytest

from shardwise.accuracy.nearest import nearest_runs
from shardwise.accuracy.runs import read_runs
from shardwise.accuracy.table import table_path

DEGREES = ("tp", "cp", "pp", "ep")
ROWS = {one.row_id: one for one in read_runs(table_path("training_runs"))}


@pytest.mark.parametrize("row_id", ["kor22_t5_22B_seqsel", "nanotron_1.34B_64n"])
def test_a_published_job_is_its_own_nearest_run(row_id: str) -> None:
    run = ROWS[row_id]
    near = nearest_runs(run.job)
    assert near[0].distance == 0 and near[0].run.model_name == run.model_name
    assert near[0].seconds == pytest.approx(run.reported_seconds)
    assert [one.distance for one in near] == sorted(one.distance for one in near)


def test_the_device_counts_more_than_the_layout() -> None:
    job = ROWS["kor22_t5_22B_seqsel"].job
    assert {one.run.job.cluster.device.name for one in nearest_runs(job, 3)} == {job.cluster.device.name}


def test_utilisation_is_ours_whatever_the_source_counts() -> None:
    """Korthikanti et al. print 41.5% with all of attention counted; causal attention counted once is less."""
    near = nearest_runs(ROWS["kor22_t5_22B_seqsel"].job)[0]
    assert 0.38 < near.mfu < 0.415
    assert near.error is not None and abs(near.error) < 0.3


def test_no_run_that_is_set_aside_and_no_two_of_one_layout() -> None:
    near = nearest_runs(ROWS["nanotron_1.34B_64n"].job, 1000)
    assert len(near) > 300 and not any(one.run.set_aside for one in near)
    jobs = [one.run.job for one in near]
    layouts = [
        (*(getattr(job.strategy, name) for name in DEGREES), job.cluster.devices, job.training.seq) for job in jobs
    ]
    names = [(one.run.source.name, one.run.model_name, one.run.device) for one in near]
    assert len(set(zip(names, layouts))) == len(near)
