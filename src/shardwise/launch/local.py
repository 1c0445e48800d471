"""Runs a command once per device of this machine, watches the processes, and restarts all of them after a failure."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from shardwise.launch.diagnosis import diagnose, overdue, with_collectives
from shardwise.launch.outcome import (
    DONE,
    FAILED,
    MISTAKE,
    STOPPED,
    STOPPED_WITHOUT_CHECKPOINT,
    STOPS,
    Attempt,
    Commit,
    Event,
    EventKind,
    Failure,
    Outcome,
)
from shardwise.launch.owned import require_room
from shardwise.launch.ranks import Gang, RankGroup, RankProcess, RankProcesses
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Timeouts
from shardwise.spec.units import counted, readable_duration

POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.2  # after a first sign of failure, to see who else failed, and when
MOST_SETTLE_SECONDS = 2.0  # while only victims are seen: what brought them down may still be ending
END_SECONDS = 0.5  # between SIGTERM and SIGKILL after a failure: most ranks wait for a peer that is gone
DEBUG = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}  # every collective is compared between ranks before it runs
KEPT = 10  # folders of attempts
ROOM_BYTES = 2**18
LOOK_SECONDS = 3.0  # between checks for a better layout
# Called with a command, a folder, variables, and a function that says whether a stop was requested while it waits.
StartRanks = Callable[[Sequence[str], Path, Mapping[str, str], Callable[[], bool]], RankGroup]
_NAME = re.compile(r"attempt-(\d+)")


class Layouts(Protocol):
    """Decides on which devices the ranks of the next attempt run, and how the job is split over them."""

    def better(self) -> str | None:
        """Why the ranks, all of which are training, should save and restart; None if they should go on."""

    def leave_out(self, failure: Failure) -> str | None:
        """Asked when restarts did not help: what the next attempt runs without; None if nothing can be left out."""


class SameLayout:
    """Always the layout that the run began with."""

    def better(self) -> str | None:
        return None

    def leave_out(self, failure: Failure) -> str | None:
        return None


def supervise(
    command: Sequence[str],
    world: int,
    folder: Path,
    *,
    timeouts: Timeouts | None = None,
    restarts: int = 3,
    grace_seconds: float = 30,
    last_commit: Callable[[], Commit] = Commit,
    environment: Mapping[str, str] | None = None,
    gang: Gang | None = None,
    start: StartRanks | None = None,
    layouts: Layouts | None = None,
    still_there: Callable[[], None] = lambda: None,
    debug: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Runs ``command`` as ``world`` ranks until they are done, with records and logs in ``folder``.

    With a ``gang`` only some of the ranks run here; ``start`` replaces how ranks are started. After a failure all ranks
    are restarted, at most ``restarts`` times in a row without a new ``last_commit``. Then ``layouts`` may leave out a
    device or host; and whenever it knows a better layout, all ranks save and restart. SIGINT, SIGTERM, SIGHUP and
    SIGUSR1 are passed on to the ranks as SIGTERM; after ``grace_seconds``, or at a second signal, they are killed. The
    run ends if ``still_there`` raises SpecError: what it writes to is gone. Call this in the main thread, where signals
    arrive and with which ranks end.
    """
    given = {**(DEBUG if debug else {}), **(environment or {})}
    attempts: list[Attempt] = []
    tries, committed, layouts = 0, last_commit(), layouts or SameLayout()
    with _stop_requests() as stop:
        while True:
            if attempts and (gone := _gone(still_there)):
                attempts[-1] = replace(attempts[-1], failure=gone)
                return Outcome(MISTAKE, False, tuple(attempts))
            own_folder = new_folder(folder)
            if start is not None:
                ranks: RankGroup = start(command, own_folder, given, lambda: stop.requested > 0)
            else:
                ranks = RankProcesses(command, gang or Gang.all_here(world), own_folder, given)
            supervision = _Supervision(ranks, timeouts or Timeouts(), grace_seconds, stop, layouts, still_there)
            here = f"{counted(len(ranks.all), 'process')}, logs in {own_folder}"
            on_event(Event("started", len(attempts), here, own_folder))
            began = time.monotonic()
            status, failure = supervision.run(lambda kind, text: on_event(Event(kind, len(attempts), text)))
            attempts.append(Attempt(own_folder, time.monotonic() - began, failure))
            if supervision.changes and status == STOPPED and not stop.requested:
                continue
            if failure is None or status != FAILED or stop.requested:
                stopped = status in STOPS or (stop.requested > 0 and status != DONE)
                return Outcome(status, stopped, tuple(attempts))
            now = last_commit()
            tries, committed = (1, now) if now > committed else (tries + 1, committed)
            if tries > restarts and (without := layouts.leave_out(failure)):
                tries = 0
                on_event(Event("failed", len(attempts) - 1, f"{failure}; {without}, from step {now.step}"))
                continue
            if tries > restarts:
                on_event(Event("failed", len(attempts) - 1, f"{failure}; gave up after {counted(restarts, 'restart')}"))
                return Outcome(FAILED, False, tuple(attempts))
            next_step = f"restart {tries} of {restarts} from step {now.step}"
            on_event(Event("failed", len(attempts) - 1, f"{failure}; {next_step}"))


@dataclass
class _Supervision:
    """Watches one attempt, from the start of its ranks until the last of them has ended."""

    _ranks: RankGroup
    _timeouts: Timeouts
    _grace_seconds: float
    _stop: _Stop
    _layouts: Layouts
    _still_there: Callable[[], None]
    changes: bool = False  # the ranks were asked to save and end, for a better layout
    _looked: float = field(default_factory=time.monotonic)

    def run(self, report: Callable[[EventKind, str], None]) -> tuple[int, Failure | None]:
        """The exit status, and the failure if there was one."""
        end_seconds = END_SECONDS
        try:
            while True:
                self._ranks.poll()
                while self._ranks.news:
                    report("guard", self._ranks.news.pop(0))
                if gone := _gone(self._still_there):
                    end_seconds = 0
                    return MISTAKE, gone
                if self._stop.requested:
                    end_seconds = 0
                    return self._stopped(report)
                if not self._ranks.running and not any(_failed(rank) for rank in self._ranks.all):
                    return self._ended_well(report), None
                stuck = bool(overdue(self._ranks.running, self._timeouts))
                if stuck or any(_failed(rank) for rank in self._ranks.all):
                    failure = self._settled(stuck)
                    if failure is not None:
                        return self._status(failure), failure
                if not self.changes and (why := self._better()):
                    self.changes = True
                    report("changing", f"{why}: the ranks save a checkpoint and restart")
                    self._ranks.send_signal(signal.SIGTERM)
                time.sleep(POLL_SECONDS)
        except OSError:  # from a file of the attempt
            if gone := _gone(self._still_there):
                end_seconds = 0
                return MISTAKE, gone
            raise
        finally:
            self._ranks.end(end_seconds)

    def _ended_well(self, report: Callable[[EventKind, str], None]) -> int:
        """The status if no rank failed: done, or stopped for a better layout or by a signal to a rank itself."""
        if all(rank.status == DONE for rank in self._ranks.all):
            return DONE
        if not self.changes:
            report("stopping", "a signal asked a rank to stop: all have saved a checkpoint")
        return STOPPED

    def _better(self) -> str | None:
        """Asks for a better layout every few seconds, once all ranks train: before that they have nothing to save."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        train = len(self._ranks.running) == len(self._ranks.all) and all(
            rank.where[0] in ("data", "step") for rank in self._ranks.all
        )
        return self._layouts.better() if train else None

    def _settled(self, stuck: bool) -> Failure | None:
        """Waits for the failures that the first one causes, then names the first; None if all ranks go on after all."""
        began, requested = time.monotonic(), stuck
        if stuck:
            self._ranks.request_stacks()
        while True:
            self._ranks.poll()
            diagnosis = diagnose(self._ranks.all, self._timeouts)
            if diagnosis is None:
                return None
            failure, certain = diagnosis
            enough = SETTLE_SECONDS if certain else MOST_SETTLE_SECONDS
            if not requested and (not certain or (failure.cause == "raised" and not failure.mistake)):
                self._ranks.request_stacks()
                requested = True
                continue
            if stuck or not self._ranks.running or time.monotonic() - began > enough:
                return with_collectives(failure, self._ranks.all)
            time.sleep(POLL_SECONDS)

    def _status(self, failure: Failure) -> int:
        if failure.mistake:
            return MISTAKE
        ended = {rank.status for rank in self._ranks.all}
        return STOPPED_WITHOUT_CHECKPOINT if STOPPED_WITHOUT_CHECKPOINT in ended else FAILED

    def _stopped(self, report: Callable[[EventKind, str], None]) -> tuple[int, Failure | None]:
        """Gives the ranks time for a final checkpoint after the run was asked to stop."""
        grace = readable_duration(self._grace_seconds)
        report("stopping", f"{self._stop.name}: the ranks have {grace} for a checkpoint")
        requests = self._stop.requested
        self._ranks.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_seconds
        while self._ranks.running and time.monotonic() < deadline and self._stop.requested == requests:
            if any(_ended_before_it_began(rank) for rank in self._ranks.all):
                return STOPPED, None  # the others would wait for it
            time.sleep(POLL_SECONDS)
            self._ranks.poll()
        if self._ranks.running:
            names = ", ".join(str(rank.number) for rank in self._ranks.running)
            report("killing", f"still running: rank {names}")
        if all(rank.status == DONE for rank in self._ranks.all):  # the signal came too late
            return DONE, None
        nothing_to_save = any(_is_starting(rank) for rank in self._ranks.running)  # a step takes all ranks
        ended_well = all(rank.status in _WELL or _ended_before_it_began(rank) for rank in self._ranks.all)
        return (STOPPED if ended_well or nothing_to_save else STOPPED_WITHOUT_CHECKPOINT), None


_WELL = (DONE, STOPPED)


def _gone(still_there: Callable[[], None]) -> Failure | None:
    try:
        still_there()
    except SpecError as error:
        return Failure(None, "exited", str(error), mistake=True)
    return None


def _failed(rank: RankProcess) -> bool:
    if rank.ended is not None:
        return rank.status not in _WELL
    progress = rank.progress()
    return progress is not None and progress.phase == "failed"


def _is_starting(rank: RankProcess) -> bool:
    """Whether it has not reached its first step."""
    progress = rank.progress()
    return progress is None or progress.phase == "start"


def _ended_before_it_began(rank: RankProcess) -> bool:
    """Whether SIGTERM killed it before its handler was installed: it was still importing."""
    return rank.status == -signal.SIGTERM and rank.progress() is None


@dataclass
class _Stop:
    """How often the run was asked to stop, and by which signal last."""

    requested: int = 0
    name: str = ""

    def note(self, number: int, frame: FrameType | None) -> None:
        self.requested += 1
        self.name = signal.Signals(number).name


@contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """Counts stop signals instead of dying of them; a signal that was ignored (nohup) stays ignored."""
    stop = _Stop()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop.note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def new_folder(folder: Path) -> Path:
    """An unused folder for the logs of one attempt; the oldest ones are removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            used = sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
            own = folder / _name(used[-1] + 1 if used else 1)
            try:
                own.mkdir()
            except FileExistsError:  # another run in the same folder was quicker
                continue
            for number in used[: -(KEPT - 1)]:
                shutil.rmtree(folder / _name(number), ignore_errors=True)
            require_room(own, ROOM_BYTES)
            return own.resolve()
    except OSError as error:
        raise SpecError("", f"cannot write to {folder}: {error.strerror}", "name another folder") from None


def _name(number: int) -> str:
    return f"attempt-{number:04d}"


FIRST_ATTEMPT = _name(1)
