"""A run: its folder prepared, its processes supervised on this machine, or trained as a rank of another launcher."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.launch.elastic import FindsRecuts, HereTarget, RecutTarget
from shardwise.launch.emulate.network import Network, Reach, wired
from shardwise.launch.keepers import keepers
from shardwise.launch.local import supervise
from shardwise.launch.observe.prometheus import MetricsServer
from shardwise.launch.outcome import DONE, FAILED, MISTAKE, STOPPED, Attempt, Commit, Event, Failure, Outcome
from shardwise.launch.preflight import Preflight
from shardwise.launch.resume import record_data, write_job
from shardwise.launch.targets.registry import StartsRanks
from shardwise.run.checkpoint.folder import HeldFolders, RunFolder, companions_at
from shardwise.run.environment import PORT, Started, host_name
from shardwise.run.metrics.recorder import EventLog, ends_recorded, require_writable
from shardwise.run.storage.place import RemotePlace, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store


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


# -- the commands of torchrun that start a job on several hosts --------------------------------------


WORKER = "shardwise.training.worker"


def torchrun_commands(
    job: Job,
    job_path: Path | str,
    arguments: Sequence[str] = (),
    *,
    hosts: Sequence[str] = (),
    port: int = PORT,
) -> list[str]:
    """One command per host; the first host serves the rendezvous. ``arguments`` go to the worker after the job file.

    Without ``hosts`` there are placeholders host-0, host-1, ...; a single one is this machine. torchrun numbers hosts
    in the text order of their addresses, which should match how the cluster is wired.
    """
    world = job.strategy.world
    per_host = min(job.cluster.node_devices, world)
    count = world // per_host
    if world % per_host:
        raise SpecError("strategy", f"{world} ranks are not a whole number of hosts of {per_host} devices")
    digits = len(str(count - 1))
    placeholders = ["localhost"] if count == 1 else [f"host-{number:0{digits}d}" for number in range(count)]
    names = list(hosts) or placeholders
    if len(names) != count:
        raise SpecError("hosts", f"names {len(names)}", f"{world} ranks need {count} of {per_host} devices")
    if not 0 < port < 65536:
        raise SpecError("port", f"{port}", "use 1 to 65535")
    run = Path(job_path).stem
    return [
        shlex.join([
            "torchrun", f"--nnodes={count}", f"--nproc-per-node={per_host}", f"--max-restarts={job.run.restarts.most}",
            f"--rdzv-id={run}", "--rdzv-backend=c10d", f"--rdzv-endpoint={names[0]}:{port}", f"--local-addr={name}",
            "--module", WORKER, str(job_path), *arguments,
        ])
        for name in names
    ]  # fmt: skip


# -- ranks that another launcher has started: rank 0 prepares the folder, then all train -------------


_KEY, _READ, _HOST = "prepared", "read by", "host of"
_READ_SECONDS = 30.0
_WAIT = timedelta(minutes=30)  # for rank 0, which may try microbatches


class FollowsRankZero(SpecError):
    """Raised on the other ranks when rank 0 has refused the job (and printed why)."""


@dataclass(frozen=True)
class Prepared:
    """A run whose folder is ready, as rank 0 announces it to all ranks."""

    folder: str
    job_text: str = ""
    finished_step: int | None = None  # set if nothing is left to do
    store: Any = None  # kept alive: rank 0 serves it

    def train(self, here: Started) -> Outcome:
        """Trains as this rank until the run is done or stopped; the worker logs to standard error."""
        import logging

        from shardwise.run.attempt import WorldPlace
        from shardwise.training.agreement import StopSignal
        from shardwise.training.worker import recorded_part, take_part, train

        logging.basicConfig(format="%(message)s")
        stop, folder, began = StopSignal(), RunFolder(Path(self.folder)), time.monotonic()
        stop.listen()
        place = WorldPlace.of(here)
        # Ranks that our own launcher started on a node rely on that launcher's lock instead.
        with folder.checkpoints.locked() if here.rank == 0 and place.folder is not None else nullcontext():
            status = (take_part if here.rank else recorded_part)(folder, train, place, stop)
        failure = None
        if status not in (DONE, STOPPED):
            failure = Failure(here.rank, "raised", "failed, as printed above", mistake=status == MISTAKE)
        return Outcome(status, status == STOPPED, (Attempt(folder.path, time.monotonic() - began, failure),))


def lead(here: Started, prepare: Callable[[Sequence[str]], Prepared]) -> Prepared:
    """As rank 0: prepares the run, given the hosts of all ranks, and announces the result or the refusal."""
    store = _store(here)
    try:
        prepared = prepare(_hosts(store, here))
    except SpecError as error:
        _announce(store, here, {"status": error.status})
        raise
    _announce(store, here, asdict(prepared))
    return replace(prepared, store=store)


def follow(here: Started) -> Prepared:
    """As any other rank: waits for what rank 0 announces."""
    store = _store(here)
    try:
        store.set(f"{_HOST} {here.rank}", host_name())
        store.wait([_KEY], _WAIT)
        announced = json.loads(store.get(_KEY))
        store.add(_READ, 1)
    except RuntimeError:  # rank 0 ended, and with it the store
        raise FollowsRankZero("", "rank 0 ended", "see what it printed") from None
    if "status" in announced:
        refused = FollowsRankZero("", "rank 0 refused the job", "see what it printed")
        refused.status = announced["status"]
        raise refused
    _require_job(RunFolder(Path(announced["folder"])), announced["job_text"])
    return Prepared(announced["folder"], announced["job_text"], announced["finished_step"], store)


def _require_job(folder: RunFolder, text: str) -> None:
    """Writes the job file on a node that does not share the folder, as is allowed with checkpoints in a store."""
    if folder.job.exists():
        return
    kept = Job.from_yaml(text).run.checkpoints.folder
    if kept is not None and isinstance(place_of(kept), RemotePlace):
        folder.path.mkdir(parents=True, exist_ok=True)
        temporary = folder.job.with_suffix(f".{os.getpid()}.part")  # the ranks of a node each write it
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder.job)


def _hosts(store: Store, here: Started) -> list[str]:
    """The host of every node, in the order of their ranks."""
    ranks = range(here.ranks_per_host, here.world, here.ranks_per_host)
    names = [f"{_HOST} {rank}" for rank in ranks]
    if names:
        store.wait(names, _WAIT)
    return [host_name(), *(store.get(name).decode() for name in names)]


def _announce(store: Store, here: Started, what: dict[str, Any]) -> None:
    """Publishes ``what`` and waits until all ranks have read it: the store ends with rank 0."""
    store.set(_KEY, json.dumps(what))
    deadline = time.monotonic() + _READ_SECONDS
    while store.add(_READ, 0) < here.world - 1 and time.monotonic() < deadline:
        time.sleep(0.01)


def _store(here: Started) -> Store:
    from shardwise.training.agreement import store_of

    return store_of(here)
