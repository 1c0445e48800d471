"""A run whose ranks another launcher has started: rank 0 prepares the folder, the others wait, then all train."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.launch.outcome import DONE, MISTAKE, STOPPED, Attempt, Failure, Outcome
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.environment import Started, host_name
from shardwise.run.storage.place import RemotePlace, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.engine.torch_private import Store

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
