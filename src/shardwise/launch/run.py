"""A run on this machine: prepares its folder and supervises its processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.launch.elastic import FindsRecuts, HereTarget, RecutTarget
from shardwise.launch.emulate.network import Network, Reach, wired
from shardwise.launch.job_file import write_job
from shardwise.launch.keepers import keepers
from shardwise.launch.local import supervise
from shardwise.launch.observe.prometheus import MetricsServer
from shardwise.launch.outcome import DONE, FAILED, Commit, Event, Failure, Outcome
from shardwise.launch.preflight import Preflight
from shardwise.launch.resume import record_data
from shardwise.launch.targets.registry import StartsRanks
from shardwise.launch.torchrun import WORKER
from shardwise.run.checkpoint.folder import HeldFolders, RunFolder, companions_at
from shardwise.run.metrics.recorder import EventLog, ends_recorded, require_writable
from shardwise.run.storage.place import place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job


def prepare(job: Job, folder: RunFolder, checked: Preflight, model_folder: Path | None = None) -> None:
    """Writes what the processes read; the caller must hold the folder's lock.

    ``model_folder`` is a Hugging Face folder that describes the model: its small files are kept for a later
    conversion, unless those of ``run.start_from`` are.
    """
    folder.checkpoints.clear_unfinished()
    if not folder.checkpoints.present():
        start = job.run.start_from
        came_from = None if start is None else companions_at(place_of(start, job.run.timeouts.checkpoint))
        folder.checkpoints.keep_companions(came_from or model_folder)
    try:
        write_job(job, folder, checked.price)
        record_data(job, folder)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise SpecError(str(folder.path), problem, "make room, or choose another folder") from None
    require_writable(job, folder.path)


@dataclass(frozen=True)
class Launch:
    """A run that is ready to start in its folder, which is locked."""

    job: Job
    folder: RunFolder
    grace_seconds: float = 30
    debug: bool = False
    target: StartsRanks | None = None  # on other hosts
    metrics: MetricsServer | None = None
    network: Network | None = None  # of virtual nodes, if it is there already
    recuts: FindsRecuts | None = None  # if the pipeline may be cut anew

    def supervised(self, on_event: Callable[[Event], None] = lambda event: None) -> Outcome:
        """Trains until the run is done, was stopped, or has failed too often."""
        log = EventLog(self.folder.events)

        def note(event: Event) -> None:
            log.write(event.kind, event.attempt, event.text, folder=None if event.folder is None else str(event.folder))
            on_event(event)

        served = nullcontext() if self.metrics is None else self.metrics.serving(self.folder)
        with ends_recorded(log, 0), served:
            outcome = self._checked(self._supervised(note))
        failure = outcome.failure
        why = "" if failure is None else failure.reason if failure.mistake else str(failure)
        log.ended(len(outcome.attempts) - 1, outcome.status, stopped=outcome.stopped, why=why)
        return outcome

    def _checked(self, outcome: Outcome) -> Outcome:
        """A run without a checkpoint of its last step has failed, even if its ranks ended well."""
        last = self.job.run.last_step
        with suppress(OSError, SpecError):  # a store that does not answer: the ranks have seen it written
            if outcome.status == DONE and last not in self.folder.checkpoints.committed():
                failure = Failure(None, "exited", f"ended well, and there is no checkpoint of the last step, {last:,}")
                attempts = (*outcome.attempts[:-1], replace(outcome.attempts[-1], failure=failure))
                return Outcome(FAILED, False, attempts)
        return outcome

    def _supervised(self, on_event: Callable[[Event], None]) -> Outcome:
        emulation = self.job.run.emulate
        command = [sys.executable, "-m", WORKER, str(self.folder.path.resolve())]
        with ExitStack() as stack:
            network = self.network
            if network is None and emulation is not None:
                network = stack.enter_context(wired(emulation, self.job.cluster.wiring))
            self.folder.copied.unlink(missing_ok=True)
            keep = None
            if self.job.run.checkpoints.memory is not None and self.target is None:
                keep = stack.enter_context(keepers(self.folder.keepers, network))
            reach = Reach(network) if network is not None and self.job.run.restarts.shrink else None
            here = HereTarget(self.job, self.folder, network, keep, reach)
            stack.callback(here.close)
            held = HeldFolders.of_run(self.folder)
            stack.callback(held.close)
            target: StartsRanks = self.target or here
            if self.recuts is not None:
                target = RecutTarget(target, self.recuts, self.folder)
            return supervise(
                command, self.job.strategy.world, self.folder.attempts,
                timeouts=self.job.run.timeouts, restarts=self.job.run.restarts.most, grace_seconds=self.grace_seconds,
                last_commit=self._last_commit, start=target.start, layouts=target, still_there=held.require,
                debug=self.debug, on_event=on_event,
            )  # fmt: skip

    def _last_commit(self) -> Commit:
        checkpoints = self.folder.checkpoints
        try:
            commits = [Commit(checkpoints.written_ns(step), step) for step in checkpoints.committed()]
        except OSError:  # a store that does not answer: the ranks will say so
            commits = []
        with suppress(OSError, ValueError):
            copied = self.folder.copied
            commits.append(Commit(copied.stat().st_mtime_ns, int(copied.read_text(encoding="utf-8"))))
        return max(commits, default=Commit())
