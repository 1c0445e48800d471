"""Offload that follows measured memory: out when it is short, back when there is ample room, and still in between."""

from __future__ import annotations

from engine.workers import on_ranks
from shardwise.engine.engine import Engine
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job
from shardwise.training.agreement import AMPLE, SHORT, STEP, MemoryPressure


def job(offload: object) -> Job:
    training = {"global_batch": 2, "seq": 16, "precision": "fp32"}
    strategy = {"dp": 1, "offload": offload}
    return Job.from_dict({"model": "tiny", "cluster": "laptop:1", "strategy": strategy, "training": training})


def moved() -> tuple[list[float | None], list[float]]:
    engine = Engine(job("auto"))
    pressure = MemoryPressure(engine)
    limit = pressure.limit_bytes
    peaks = [0.5 * limit, 0.99 * limit, 1.1 * limit, 0.5 * (SHORT + AMPLE) * limit, 0.5 * limit]
    found, stored = [], []
    for step, peak in enumerate(peaks):
        engine.step(sample_batch(engine.job, step, 0))
        found.append(pressure.after(round(peak)))
        stored.append(engine.optimizer.stored.elements / sum(row.size for row in engine.optimizer.stored.rows))
    return found, stored


def test_it_goes_out_and_comes_back() -> None:
    ((found, stored),) = on_ranks(1, moved)
    assert found == [None, STEP, 2 * STEP, None, STEP]
    assert [round(share, 3) for share in stored] == [0, STEP, 2 * STEP, 2 * STEP, STEP]
