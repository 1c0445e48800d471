"""A `Trainer` of two processes under DeepSpeed itself, on a CPU (`make test-frameworks`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integrations.ranks import launched
from shardwise.interop.jobs import read_job

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_trainer_under_deepspeed_is_read_as_it_runs(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launched("deepspeed_worker.py", tmp_path, str(stage))
    job = read_job(tmp_path / "shardwise" / "job.yaml")
    assert (job.strategy.zero, job.strategy.data_parallel, job.stack.name) == (stage, 2, "deepspeed")
    assert (job.strategy.microbatch, job.microbatches, job.sequences) == (2, 2, 8)
    assert (job.training.precision, job.training.optimizer) == ("fp32", "adamw")
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert first == second and first["job"] == job.to_dict() and first["engine"] == "DeepSpeedEngine"
    record = json.loads((tmp_path / "shardwise" / "shardwise.json").read_text(encoding="utf-8"))
    assert record["measured"]["tokens_per_step"] == record["predicted"]["tokens_per_step"] == 8 * 16
    assert record["measured"]["memory_bytes"] == pytest.approx(record["predicted"]["tensor_bytes"], rel=0.4)
    assert any("(reduce_bucket_size): 39.1 KiB that are not priced" in one for one in record["notes"])
