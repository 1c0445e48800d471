"""Pipelines that are cut anew during the run: the ranks save, end, and restart with the better cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.launch.job_file import write_job
from shardwise.launch.outcome import Failure
from shardwise.launch.ranks import RankGroup
from shardwise.launch.targets.registry import StartsRanks
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.job import Job


class FindsRecuts(Protocol):
    """Finds better cuts of a run from the profiles that its ranks record."""

    def better_cut(self, since_ns: int) -> tuple[Job, str] | None:
        """The run's job with a better cut, from profiles newer than ``since_ns``, and why it is better."""


@dataclass
class RecutTarget:
    """The ranks of ``target``, with the cuts that ``recuts`` finds."""

    target: StartsRanks
    recuts: FindsRecuts
    folder: RunFolder
    _next: Job | None = None
    _since_ns: int = 0

    @property
    def notes(self) -> Sequence[str]:
        return self.target.notes

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stopped: Callable[[], bool]
    ) -> RankGroup:
        if self._next is not None:
            write_job(self._next, self.folder)
        self._next, self._since_ns = None, time.time_ns()
        return self.target.start(command, folder, environment, stopped)

    def better(self) -> str | None:
        why = self.target.better()
        if why is not None:
            return why
        better = self.recuts.better_cut(self._since_ns)
        if better is None:
            return None
        self._next, why = better
        return why

    def leave_out(self, failure: Failure) -> str | None:
        return self.target.leave_out(failure)
