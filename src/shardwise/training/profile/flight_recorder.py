"""PyTorch's flight recorder in this process: which collectives each group has begun and ended.

gloo records collectives, NCCL messages too. Reading it involves no other rank: a thread can write it while the rank is
blocked.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch.distributed as dist

from shardwise.engine.labels import backend_operation
from shardwise.engine.torch_private import flight_entries, process_groups
from shardwise.run.attempt import STACKS_SIGNAL
from shardwise.run.flight.record import Collective, FlightRecord, GroupRecord

_BUFFER = "TORCH_FR_BUFFER_SIZE"
USUAL, PROFILED = 512, 20_000  # entries in the buffer; a profile needs those of all its steps
KEPT = 64  # collectives of a group in a record
PERIOD_SECONDS = 30.0  # between two records, aligned on all ranks; one costs a few milliseconds
_SECOND_SECONDS = 5.0  # until the second record, for short runs
_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}  # others take 1
_UNNAMED = {"undefined": "", "default_pg": "all ranks"}  # descriptions that PyTorch gives


def record_collectives(entries: int = USUAL) -> None:
    """Makes backends record; called before the process group is created. The user's own setting stays."""
    os.environ.setdefault(_BUFFER, str(entries))


@dataclass(frozen=True)
class BackendEntry:
    """An entry of a backend's log."""

    backend: str
    group: str
    meaning: str
    members: tuple[int, ...]
    """Ranks of its group."""
    is_message: bool
    """Between two of the members."""
    collective: Collective


def backend_log() -> Iterator[BackendEntry]:
    """What the backends' logs still hold of existing groups, oldest first for each backend."""
    members = {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in process_groups()}
    for entry in flight_entries():
        name, meaning = entry["process_group"]
        if name not in members:
            continue
        sizes = zip(entry["input_sizes"], entry["input_dtypes"])
        yield BackendEntry(
            entry["profiling_name"].partition(":")[0],
            name,
            _UNNAMED.get(meaning, meaning),
            members[name],
            entry["is_p2p"],
            Collective(
                number=entry["collective_seq_id"],
                operation=backend_operation(entry["profiling_name"]),
                bytes=sum(prod(size) * _BYTES.get(kind, 1) for size, kind in sizes),
                done=entry["retired"],
                at_ns=entry["time_created_ns"],
            ),
        )


def take_record(rank: int) -> FlightRecord:
    """The last collectives of every group of this process."""
    now = time.time()
    kept: dict[tuple[str, str, tuple[int, ...]], deque[Collective]] = defaultdict(lambda: deque(maxlen=KEPT))
    for entry in backend_log():
        if len(entry.members) > 1 and not entry.is_message:
            # On GPUs a group has two backends, each of which counts its own collectives.
            kept[f"{entry.backend} {entry.group}", entry.meaning, entry.members].append(entry.collective)
    return FlightRecord(rank, now, tuple(GroupRecord(*group, tuple(some)) for group, some in kept.items()))


@contextmanager
def flights_watched(folder: Path, rank: int, requests: int | None) -> Iterator[None]:
    """Writes this rank's record to ``folder`` now and then, when `STACKS_SIGNAL` comes, and when the block fails."""
    watch = _FlightWatch(folder, rank, requests)
    try:
        yield
    except Exception:
        watch.write()
        raise
    finally:
        watch.close()


class _FlightWatch:
    """Writes records in a thread, since the training thread may be blocked in a collective.

    The file ``requests`` gets a byte for every signal.
    """

    def __init__(self, folder: Path, rank: int, requests: int | None) -> None:
        self._folder, self._rank, self._requests = folder, rank, requests
        self._ended = threading.Event()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="flight", daemon=True)
        self._thread.start()

    def write(self) -> None:
        with suppress(OSError, RuntimeError):  # a full disk; a process group that is being destroyed
            take_record(self._rank).write(self._folder)

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        self.write()  # once a rank has a record, the launcher waits for a newer one
        seconds = _SECOND_SECONDS
        while True:
            requested = self._requested_within(seconds)
            if self._ended.is_set():
                return
            if requested is not False:
                self.write()
            seconds = PERIOD_SECONDS - time.time() % PERIOD_SECONDS

    def _requested_within(self, seconds: float) -> bool | None:
        """None if the time has passed; False if another signal came."""
        if self._requests is None:
            self._ended.wait(seconds)
            return None
        if not select.select([self._requests], [], [], seconds)[0]:
            return None
        return int(STACKS_SIGNAL) in os.read(self._requests, 4096)
