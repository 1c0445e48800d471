"""The state of a run as its files tell it: the one description that `status` prints and Prometheus scrapes.

Only the run's folder is read, by anybody who may read it, whether the run goes on, has ended, or was killed. What no
file says is None.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

from shardwise.launch.outcome import STOPPED_WITHOUT_CHECKPOINT, STOPS
from shardwise.layout.groups import coordinate
from shardwise.run.attempt import BEAT_SECONDS, RankProgress, rank_file, read_progress
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.lines import Follower, RecentSteps
from shardwise.run.metrics.recorder import ENDED, FAILED, STARTED, RunEvent, read_events, read_prediction
from shardwise.run.records import Lateness, OutOfStep, lateness, out_of_step, read_flights
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job

Word = Literal["not started", "starting", "running", "stalled", "restarting", "stopped", "ended", "failed", "killed"]
ALIVE: tuple[Word, ...] = ("starting", "running", "stalled", "restarting")
FRESH_SECONDS = 20 * BEAT_SECONDS  # a heartbeat through a network disk is seen late
UNHEARD_SECONDS = 300.0  # since the last step, for a run on another host whose ranks have no heartbeat
STALLED_SECONDS, STALLED_STEPS = 30.0, 10  # a run is stalled without a new step for the longer of the two
_PROGRESS = re.compile(r"rank-(\d+)\.progress")


@dataclass(frozen=True)
class RankState:
    rank: int
    phase: str
    step: int
    phase_seconds: float  # in this phase so far
    silent_seconds: float  # since its last heartbeat


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint, or copy in the memory of nodes."""

    step: int
    age_seconds: float
    in_memory: bool = False


@dataclass(frozen=True)
class RunState:
    folder: str
    state: Word
    why: str  # the newest failure, or what is known of it
    job: Job | None
    figures: RecentSteps
    ranks: tuple[RankState, ...]
    late: tuple[Lateness, ...]
    finding: OutOfStep | None
    restarts: int
    saved: Saved | None
    running_seconds: float
    quiet_seconds: float | None  # since the newest step

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def step(self) -> int:
        return self.figures.step

    @property
    def steps(self) -> int | None:
        return None if self.job is None else self.job.run.steps

    @property
    def stragglers(self) -> tuple[Lateness, ...]:
        return tuple(rank for rank in self.late if rank.straggles)

    @property
    def goodput(self) -> float | None:
        """The share of the time the run was up that went into steps that count."""
        if not self.running_seconds or not self.figures.useful_seconds:
            return None
        return min(1.0, self.figures.useful_seconds / self.running_seconds)

    @property
    def left_seconds(self) -> float | None:
        return self.figures.left_seconds(self.steps) if self.alive and self.steps is not None else None


class RunObserver:
    """`state` reads only what is new since the last call, so that a long run is read once."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._follower = Follower.of_all(folder.metrics)
        self._figures = RecentSteps()

    def state(self) -> RunState:
        now = time.time()
        events = read_events(self.folder.events)
        job, figures = self.job(), self._read_figures()
        if job is not None and figures.predicted_seconds is None:  # before the first step
            for name, value in read_prediction(self.folder.path).items():
                setattr(figures, name, value)
        last_start = next((event for event in reversed(events) if event.kind == STARTED), None)
        attempt = _attempt_folder(self.folder, last_start)
        ranks = () if attempt is None else rank_states(attempt, now)
        quiet = _age(self.folder.metrics, now) if figures.step else None
        word, why = self._word(events, ranks, figures, quiet)
        known = () if attempt is None else tuple(range(job.strategy.world if job else len(ranks)))
        flights = read_flights(attempt, known) if attempt is not None else {}
        stages = {rank: 0 if job is None else coordinate(job.strategy, "pp", rank) for rank in flights}
        return RunState(
            folder=str(self.folder.path),
            state=word,
            why=why,
            job=job,
            figures=figures,
            ranks=ranks,
            late=lateness(flights, stages) if word == "running" else (),
            finding=out_of_step(flights) if word in ("stalled", "failed", "killed") else None,
            restarts=sum(event.kind == STARTED and event.attempt > 0 for event in events),
            saved=self._saved(now),
            running_seconds=_running_seconds(events, self._last_sign(ranks, now), now if word in ALIVE else None),
            quiet_seconds=quiet,
        )

    def job(self) -> Job | None:
        with suppress(SpecError):
            return Job.from_dict(read_yaml(self.folder.job, "job file"))
        return None

    def _read_figures(self) -> RecentSteps:
        records = self._follower.new()
        if self._follower.truncated:  # a roll-back: what was added may be gone
            self._figures = RecentSteps()
        for record in records:
            self._figures.add(record)
        return self._figures

    def _word(
        self, events: Sequence[RunEvent], ranks: Sequence[RankState], figures: RecentSteps, quiet: float | None
    ) -> tuple[Word, str]:
        last = events[-1] if events else None
        failed = next((event.text for event in reversed(events) if event.kind == FAILED), "")
        if last is not None and last.kind == ENDED:
            return _end(last, failed)
        if not self._is_up(last, ranks, quiet):
            return ("not started", "") if last is None and not figures.step else ("killed", failed)
        begun = any(rank.phase != "start" for rank in ranks) if ranks else figures.step > 0
        if last is not None and (last.kind == FAILED or (last.attempt and not begun)):
            return "restarting", failed
        if not begun:
            return "starting", ""
        limit = max(STALLED_SECONDS, STALLED_STEPS * (figures.step_seconds or 0.0) * figures.interval)
        busy = any(rank.phase in ("checkpoint", "evaluation", "done") for rank in ranks)
        if quiet is not None and quiet > limit and not busy:
            return "stalled", f"no step for {quiet:.0f} s"
        return "running", ""

    def _is_up(self, last: RunEvent | None, ranks: Sequence[RankState], quiet: float | None) -> bool:
        """On the run's own machine its lock tells; elsewhere what was written lately does."""
        in_use = self.folder.in_use
        if in_use or (in_use is False and (last is None or last.host == gethostname())):
            return bool(in_use)
        if ranks:
            return any(rank.silent_seconds < FRESH_SECONDS for rank in ranks)
        return quiet is not None and quiet < UNHEARD_SECONDS

    def _saved(self, now: float) -> Saved | None:
        saved: list[Saved] = []
        with suppress(OSError, SpecError):
            committed = self.folder.checkpoints.committed()
            if committed:
                written = self.folder.checkpoints.written_ns(committed[0]) / 1e9
                saved.append(Saved(committed[0], max(0.0, now - written)))
        with suppress(OSError, ValueError):
            copied = self.folder.copied
            age = max(0.0, now - copied.stat().st_mtime)
            saved.append(Saved(int(copied.read_text(encoding="utf-8")), age, in_memory=True))
        return min(saved, key=lambda commit: commit.age_seconds, default=None)

    def _last_sign(self, ranks: Sequence[RankState], now: float) -> float:
        """When anything of the run was last written."""
        ages = [rank.silent_seconds for rank in ranks]
        ages += [age for path in (self.folder.metrics, self.folder.events) if (age := _age(path, now)) is not None]
        return now - min(ages, default=0.0)


def _end(last: RunEvent, failed: str) -> tuple[Word, str]:
    if last.stopped and last.status in (0, *STOPS):  # 0 as earlier versions have recorded it
        saved = last.status != STOPPED_WITHOUT_CHECKPOINT
        return "stopped", "" if saved else "before its final checkpoint was complete"
    return ("failed", last.text or failed) if last.status else ("ended", "")


def rank_states(attempt: Path, now: float) -> tuple[RankState, ...]:
    """The ranks as the progress files of an attempt show them; the clocks of other hosts do not matter."""
    states = []
    with suppress(OSError):
        for path in attempt.iterdir():
            if match := _PROGRESS.fullmatch(path.name):
                states.append(_rank_state(attempt, int(match[1]), now))
    return tuple(sorted((state for state in states if state is not None), key=lambda state: state.rank))


def _rank_state(attempt: Path, rank: int, now: float) -> RankState | None:
    try:
        file = os.open(rank_file(attempt, rank, "progress"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        progress: RankProgress | None = read_progress(file)
        silent = max(0.0, now - os.fstat(file).st_mtime)
    finally:
        os.close(file)
    if progress is None:
        return None
    # Both times are of the rank's own clock; how long ago the later one was, the file's modification time tells.
    since = max(0.0, progress.beat - progress.since) + silent
    return RankState(rank, progress.phase, progress.step, since, silent)


def _attempt_folder(folder: RunFolder, start: RunEvent | None) -> Path | None:
    """The attempt folder of the last start; the run's folder may have been moved since."""
    if start is None or start.folder is None:
        return None
    moved = folder.attempts / Path(start.folder).name
    return moved if moved.is_dir() else None


def _running_seconds(events: Sequence[RunEvent], last_sign: float, now: float | None) -> float:
    """Sums the time from each start of the run to its end; for a command that was killed, to its last event."""
    total, begun = 0.0, None
    for number, event in enumerate(events):
        if event.kind == STARTED and event.attempt == 0:
            if begun is not None:  # the command before was killed: count up to its last event
                total += max(0.0, events[number - 1].at - begun)
            begun = event.at
        elif event.kind == STARTED and begun is None:
            begun = event.at
        elif event.kind == ENDED and begun is not None:
            total, begun = total + event.at - begun, None
    if begun is not None:
        total += max(0.0, (last_sign if now is None else now) - begun)
    return total


def _age(path: Path, now: float) -> float | None:
    with suppress(OSError):
        return max(0.0, now - path.stat().st_mtime)
    return None


def as_data(state: RunState) -> dict[str, Any]:
    """Plain data, seconds and bytes: what ``--json`` prints."""
    late = {rank.rank: rank.share for rank in state.late}
    measured = ("loss", "validation_loss", "tokens_per_second", "step_seconds", "predicted_seconds", "mfu")
    memory = ("memory_bytes", "memory_bytes_of_ranks", "predicted_memory_bytes")
    times = ("restarts", "goodput", "running_seconds", "left_seconds", "quiet_seconds")
    return {
        "run": state.folder,
        "state": state.state,
        "why": state.why,
        "finding": None if state.finding is None else asdict(state.finding),
        "step": state.step,
        "steps": state.steps,
        **{name: getattr(state.figures, name) for name in (*measured, *memory)},
        "memory_bytes_of_ranks": list(state.figures.memory_bytes_of_ranks),
        **{name: getattr(state, name) for name in times},
        "saved": None if state.saved is None else asdict(state.saved),
        "stragglers": [rank.rank for rank in state.stragglers],
        "ranks": [{**asdict(rank), "late_share": late.get(rank.rank)} for rank in state.ranks],
    }
