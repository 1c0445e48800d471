"""Checks before a run starts: whether its stores can be reached, and written to where checkpoints go."""

from __future__ import annotations

import secrets

from shardwise.run.storage.fsspec_store import FsspecStore
from shardwise.run.storage.place import Place, RemotePlace, place_of
from shardwise.run.storage.stores import refused
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Run

_PROBE_RETRIES = 1
PROBE_SECONDS = 60.0  # for a small object, while somebody waits for the run to start
_IN_ONE_PROCESS = ("memory",)


def require_stores(run: Run) -> None:
    """Raises SpecError if a run cannot read from, or keep checkpoints in, a store that it names."""
    limit_seconds = min(PROBE_SECONDS, run.timeouts.checkpoint)
    for field, names in (("shards", run.data.shards), ("validation", run.data.validation)):
        for number, name in enumerate(names):
            _require_readable(f"run.data.{field}[{number}]", place_of(name, limit_seconds))
    if run.start_from is not None:
        _require_readable("run.start_from", place_of(run.start_from, limit_seconds))
    if run.checkpoints.folder is not None:
        place = place_of(run.checkpoints.folder, limit_seconds)
        if isinstance(place, RemotePlace):
            require_writable_store(place, "run.checkpoints.folder")


def _require_readable(field: str, place: Place) -> None:
    if isinstance(place, RemotePlace):
        require_shared(place, field)
        try:
            FsspecStore(place.uri, _PROBE_RETRIES, place.limit).listed(place.uri)
        except OSError as error:
            raise refused(field, place.uri, "cannot be read", error) from None


def require_writable_store(place: RemotePlace, field: str) -> None:
    """Writes, reads and deletes a small object below ``place``; raises SpecError with what does not work."""
    require_shared(place, field)
    probe, content = str(place / f".probe-{secrets.token_hex(4)}"), secrets.token_bytes(32)
    store = FsspecStore(str(place), _PROBE_RETRIES, place.limit)
    doing = "written to"
    try:
        store.put(probe, content)
        doing = "read"
        returned = store.read(probe, 0, len(content))
        doing = "deleted from"
        store.delete([probe])
    except OSError as error:
        raise refused(field, str(place), f"cannot be {doing}", error) from None
    if returned != content:
        problem = f"{place} gives back other bytes than were written"
        raise SpecError(field, problem, "this store cannot keep checkpoints: choose another")


def require_shared(place: RemotePlace, field: str) -> None:
    """Raises SpecError for a store that only one process sees."""
    scheme = str(place).partition("://")[0]
    if scheme in _IN_ONE_PROCESS:
        problem = f"{place} is in the memory of one process, and every rank is one of its own"
        raise SpecError(field, problem, "name a path, or a store that all ranks reach")
