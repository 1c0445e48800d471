"""What a run leaves where its ranks have met: nothing that grows with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.workers import on_ranks
from shardwise.spec import Job
from training.runs import job_of


def rendezvous_bytes_after_saves(job: Job, folder: str) -> list[int]:
    """The size of the file in which the ranks have met, before and after some checkpoints."""
    import torch.distributed as dist

    from shardwise.engine.engine import Engine
    from shardwise.run.checkpoint.folder import CheckpointFolder
    from shardwise.training.checkpointing import CheckpointManager

    engine = Engine(job)
    keeper = CheckpointManager(engine, job.run, CheckpointFolder(Path(folder)))
    store: Any = dist.distributed_c10d._get_default_store()
    while not hasattr(store, "path"):
        store = store.underlying_store
    sizes = []
    for step in range(1, 9):
        keeper.save(step, {})
        keeper.settle()
        dist.barrier()
        sizes.append(Path(store.path).stat().st_size)
    assert keeper.folder.committed() == [8, 7]
    return sizes


def test_the_file_in_which_ranks_meet_does_not_grow_with_checkpoints(tmp_path: Path) -> None:
    for sizes in on_ranks(2, rendezvous_bytes_after_saves, job_of("unused", 2, dp=2), str(tmp_path)):
        assert sizes[0] > 0
        assert len(set(sizes)) == 1
