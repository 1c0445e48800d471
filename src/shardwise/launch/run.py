"""A run: its folder prepared, its processes supervised, a few steps rehearsed, or trained under another launcher."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from shardwise.layout.groups import coordinate
from shardwise.run.attempt import WORKER
from shardwise.run.checkpoint.folder import HeldFolders, RunFolder, companions_at
from shardwise.run.environment import PORT, Started, host_name
from shardwise.run.metrics.lines import RunSummary, read_lines, summarise
from shardwise.run.metrics.recorder import EventLog, ends_recorded, require_writable
from shardwise.run.storage.place import RemotePlace, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes, readable_change, readable_seconds, readable_share
from shardwise.uncertainty.residuals import ErrorBar, error_bar

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


def torchrun_commands(job: Job, job_path: Path | str) -> list[str]:
    """One command per host, named host-0, host-1, ...; the first serves the rendezvous. A single host is this machine.

    torchrun numbers hosts in the text order of their addresses, which should match how the cluster is wired.
    """
    world = job.strategy.world
    per_host = min(job.cluster.node_devices, world)
    count = world // per_host
    if world % per_host:
        raise SpecError("strategy", f"{world} ranks are not a whole number of hosts of {per_host} devices")
    digits = len(str(count - 1))
    names = ["localhost"] if count == 1 else [f"host-{number:0{digits}d}" for number in range(count)]
    run = Path(job_path).stem
    return [
        shlex.join([
            "torchrun", f"--nnodes={count}", f"--nproc-per-node={per_host}", f"--max-restarts={job.run.restarts.most}",
            f"--rdzv-id={run}", "--rdzv-backend=c10d", f"--rdzv-endpoint={names[0]}:{PORT}", f"--local-addr={name}",
            "--module", WORKER, str(job_path),
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
    from shardwise.engine.mesh import store_of

    return store_of(here)


# -- a few steps of the real job before the long run, and checks of what they show -------------------


LEAST_STEPS = 12
SETTLED_STEP = 5  # from here on memory must not grow
MOST_GROWTH, MOST_SPREAD, MOST_WAIT = 0.01, 0.03, 0.02
Record = dict[str, Any]


@dataclass(frozen=True)
class RehearsalCheck:
    name: str
    figure: str
    passed: bool


def rehearse(
    job: Job,
    folder: RunFolder,
    checked: Preflight,
    steps: int,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    debug: bool = False,
) -> tuple[Outcome, list[RehearsalCheck]]:
    """Runs ``steps`` steps of the job in a separate folder, stops, restores the checkpoint and runs one more.

    Returns no checks if the run itself failed.
    """
    if not LEAST_STEPS <= steps < job.run.steps:
        problem = f"{steps} steps of a run of {job.run.steps:,}"
        raise SpecError("⟨rehearse⟩", problem, f"use {LEAST_STEPS} to {job.run.steps - 1:,}")
    elsewhere = job.run.checkpoints.folder
    checkpoints = replace(job.run.checkpoints, folder=None if elsewhere is None else f"{elsewhere}/rehearsal")
    here = RunFolder(folder.path / "rehearsal", replace(job.run, checkpoints=checkpoints))
    shutil.rmtree(here.path, ignore_errors=True)
    here.checkpoints.remove_all()
    logging = replace(job.run.logging, interval=1, memory=max(1, (steps - 3) // 3))
    with here.checkpoints.locked():
        for stop_at in (steps, steps + 1):
            run = replace(job.run, stop_at=stop_at, folder=str(here.path), logging=logging, checkpoints=checkpoints)
            shorter = replace(job, run=run)
            prepare(shorter, here, checked)
            outcome = Launch(shorter, here, debug=debug).supervised(on_event)
            if outcome.status or outcome.stopped:
                return outcome, []
    records = list(read_lines(here.metrics))
    return outcome, list(
        points(job, [record for record in records if record["step"] <= steps], records[-1]["step"] - steps)
    )


def points(job: Job, records: Sequence[Record], steps_after_restoring: int) -> Iterator[RehearsalCheck]:
    summary, bar = summarise(records), error_bar(job)
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    third = max(1, len(losses) // 3)
    first, last = (sum(some) / len(some) for some in (losses[:third], losses[-third:]))
    yield RehearsalCheck("the loss falls", f"{first:.3f} → {last:.3f}", last < first)
    yield _growth(records)
    yield from _spread(job.strategy, records)
    yield from _beside_the_plan(summary, bar)
    figure = f"{steps_after_restoring} step after it"
    yield RehearsalCheck("a checkpoint is saved and restored", figure, steps_after_restoring == 1)
    waited = summary.data_wait_share or 0.0
    figure = f"{readable_share(waited)} of the time waited (at most {MOST_WAIT:.0%})"
    yield RehearsalCheck("data arrives in time", figure, waited <= MOST_WAIT)


def _growth(records: Sequence[Record]) -> RehearsalCheck:
    name = f"memory does not grow after step {SETTLED_STEP}"
    later = [record["memory_bytes"] for record in records if record["step"] > SETTLED_STEP and "memory_bytes" in record]
    if len(later) < 2:
        return RehearsalCheck(name, "not measured often enough", False)
    growth = later[-1] / later[0] - 1
    return RehearsalCheck(name, f"{readable_change(growth, 2)} (at most {MOST_GROWTH:.0%})", growth <= MOST_GROWTH)


def _spread(strategy: Strategy, records: Sequence[Record]) -> Iterator[RehearsalCheck]:
    measured = [record["memory_bytes_of_ranks"] for record in records if "memory_bytes_of_ranks" in record]
    stages: dict[int, list[int]] = {}
    for rank, peak in enumerate(measured[-1] if measured else ()):
        stages.setdefault(coordinate(strategy, "pp", rank), []).append(peak)
    widest = max((max(peaks) / min(peaks) - 1 for peaks in stages.values()), default=math.inf)
    figure = f"{readable_share(widest, 2)} apart (at most {MOST_SPREAD:.0%})"
    yield RehearsalCheck("ranks of a stage are equal in memory", figure, widest <= MOST_SPREAD)


def _beside_the_plan(summary: RunSummary, bar: ErrorBar) -> Iterator[RehearsalCheck]:
    time = ("step time as planned", summary.predicted_seconds, summary.step_seconds, bar.time_low, bar.time_high)
    memory = (
        "memory as planned",
        summary.predicted_memory_bytes,
        summary.memory_bytes,
        bar.memory_low,
        bar.memory_high,
    )
    for (name, predicted, measured, low, high), show in ((time, readable_seconds), (memory, readable_bytes)):
        if not predicted or measured is None:
            yield RehearsalCheck(name, "not measured", False)
            continue
        off = measured / predicted - 1
        allowed = f"between {low:+.0%} and {high:+.0%}"
        figure = f"{show(measured)}, planned {show(predicted)}: {readable_change(off, 0)} ({allowed})"
        yield RehearsalCheck(name, figure, low <= off <= high)
