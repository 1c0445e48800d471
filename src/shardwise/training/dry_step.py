"""One trial step of a job: `python -m shardwise.training.dry_step FOLDER`, started as the workers of a run.

It is a real step on random tokens, in separate processes: a GPU that ran out of memory is clean for the next try. A
traced step would not show what the allocator needs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.batch import Batch
from shardwise.run.attempt import Reporter, WorldPlace
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.training.agreement import StopSignal
from shardwise.training.memory import peak_during
from shardwise.training.worker import engine_of, leave, main


def step_once(folder: RunFolder, place: WorldPlace, reporter: Reporter, stop: StopSignal) -> int:
    """Writes the highest peak of all ranks, in bytes."""
    job = Job.from_dict(read_yaml(folder.job, "job file"))
    with engine_of(job, place) as engine:
        reporter.phase("step", 0, job.run.timeouts.start)
        rows = len(engine.rows)
        text = torch.randint(job.model.vocab, (rows, job.training.seq + 1), device=engine.device)
        batch = Batch.of(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        _, peak = peak_during(engine.device, lambda: engine.step(batch))
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
    if place.rank == 0:
        folder.peak.write_text(json.dumps({"peak_bytes": max(peaks)}), encoding="utf-8")
    reporter.phase("done", 1)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:], step_once))
