"""What happened to a run: attempt by attempt, who failed first and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.run.attempt import STOPPED as STOPPED

DONE, FAILED, MISTAKE, STOPPED_WITHOUT_CHECKPOINT = 0, 1, 2, 75
STOPS = (STOPPED_WITHOUT_CHECKPOINT, STOPPED)  # the run is not done: the same command goes on

EventKind = Literal["started", "failed", "changing", "stopping", "killing", "guard"]
Cause = Literal["raised", "killed", "exited", "silent", "stuck"]


@dataclass(frozen=True, order=True)
class Commit:
    """A checkpoint; later ones compare greater whatever their step, since a run may go back to an earlier one."""

    written_ns: int = 0
    step: int = 0


@dataclass(frozen=True)
class Failure:
    """What ended an attempt: the rank that failed first, not its victims."""

    rank: int | None  # None if no single rank is to blame
    cause: Cause
    reason: str
    phase: str | None = None
    step: int | None = None
    log: Path | None = None
    mistake: bool = False  # the user's error: the reason is the one line to show, and a restart would fail the same way

    def __str__(self) -> str:
        who = "the ranks" if self.rank is None else f"rank {self.rank}"
        where = "" if self.phase is None else f" ({self.phase}, step {self.step})"
        return f"{who}{where}: {self.reason}"


@dataclass(frozen=True)
class Attempt:
    folder: Path
    seconds: float
    failure: Failure | None


@dataclass(frozen=True)
class Outcome:
    status: int  # for the shell: 0 done, 1 failed, 2 a mistake, 75 or 76 stopped (`STOPS`)
    stopped: bool  # before its last step, by a signal to the launcher or to a rank
    attempts: tuple[Attempt, ...]

    @property
    def failure(self) -> Failure | None:
        return self.attempts[-1].failure


@dataclass(frozen=True)
class Event:
    kind: EventKind
    attempt: int
    text: str  # one line
    folder: Path | None = None  # of a start: where its ranks report

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"
