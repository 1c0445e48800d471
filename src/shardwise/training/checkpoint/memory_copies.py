"""Copies of the training state in the memory of nodes, every few steps, made while training continues.

The idea is Gemini's (Wang et al., SOSP 2023): checkpoints in the CPU memory of the own machine and of a peer. A copy is
an ordinary checkpoint in a special store (`keeper_store.py`). It is written beside the previous copy, which is deleted
once the new one is committed, so that a failure never interrupts the only copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.engine.trainer import Trainer
from shardwise.run.checkpoint.checkpoint_folder import RemoteCheckpointFolder
from shardwise.run.storage.keeper_store import KEEPER, KeeperStore
from shardwise.run.storage.place import RemotePlace
from shardwise.run.storage.stores import register_store
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.save import SaveError, Saver

_logger = logging.getLogger("shardwise.training")


def memory_folder(keepers: Path, node: int) -> RemoteCheckpointFolder:
    """The checkpoints in the memory of nodes, as a rank on ``node`` sees them; the file ``keepers`` lists the nodes."""
    if not keepers.is_file():
        problem = "no process keeps copies in memory here"
        raise SpecError("run.checkpoints.memory", problem, "start the run by `shardwise train`, or leave it out")
    register_store(KEEPER, KeeperStore(keepers, node))
    return RemoteCheckpointFolder(RemotePlace(f"{KEEPER}://nodes/checkpoints"))


class MemoryCopies:
    """Copies the state of all ranks every ``steps`` steps; rank 0 calls ``on_commit(step)`` in a thread."""

    def __init__(
        self,
        trainer: Trainer[Any],
        folder: RemoteCheckpointFolder,
        steps: int,
        timeout_seconds: float,
        on_commit: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.folder, self.steps, self.stall_seconds = folder, steps, 0.0

        def committed(step: int) -> None:
            folder.retain(1, newest_step=step)
            on_commit(step)

        self.saver = Saver(trainer, folder, timeout_seconds=timeout_seconds, on_commit=committed)

    def due_at(self, step: int) -> bool:
        return step % self.steps == 0

    def save(self, step: int, further: dict[str, Any]) -> None:
        """Returns when the tensors are copied; ``stall_seconds`` is how long that took."""
        began = time.perf_counter()
        self.finish()
        self.saver.save(step, further)
        self.stall_seconds = time.perf_counter() - began

    def finish(self) -> None:
        """Waits for the copy in flight; if it failed, the previous copy stays, and the run continues."""
        try:
            self.saver.finish()
        except SaveError as error:
            _logger.warning("a copy in memory was not made: %s", error)
