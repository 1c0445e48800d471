"""The keepers of a run: one process per node with ranks; a keeper that is lost is replaced by an empty one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from shardwise.launch import keeper
from shardwise.launch.emulate import namespace
from shardwise.launch.emulate.network import Network
from shardwise.launch.targets.hosts import AgentProcess
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

KEEPER = keeper.__name__
_POLL_SECONDS = 0.1
_START_SECONDS = 30.0  # over ssh, on a host that has other things to do
_END_SECONDS = 5.0
_RETRY_SECONDS = 5.0  # between attempts to start one on a node that does not answer
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class KeeperPlace:
    name: str
    address: str  # that the keeper listens at
    start: Callable[[], AgentProcess] = field(compare=False)  # starts `keeper.py` there


@dataclass(frozen=True)
class RunningKeeper:
    place: KeeperPlace
    process: AgentProcess
    port: int


class Keepers:
    """Starts, replaces and ends keepers. ``file``, private to its owner, tells ranks their addresses and the secret."""

    nodes = 1  # that this machine counts as, without a network of virtual nodes

    def __init__(self, file: Path) -> None:
        self.file = file
        self._secret = secrets.token_hex(16)
        self.kept: dict[str, RunningKeeper] = {}
        self._used: tuple[KeeperPlace, ...] = ()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._replace_lost, name="keepers", daemon=True)
        self._watch.start()

    def use(self, places: Sequence[KeeperPlace]) -> None:
        """Keeps objects on the nodes that ranks are on now, in the order of the ranks; other keepers end.

        Raises SpecError if a keeper cannot be started.
        """
        with self._lock:
            wanted = {place.name: place for place in places}
            for name in set(self.kept) - set(wanted):
                _end(self.kept.pop(name).process)
            for name, place in wanted.items():
                if name not in self.kept or self.kept[name].process.poll() is not None:
                    self.kept[name] = self._started(place)
            self._used = tuple(places)
            self._write()

    def _started(self, place: KeeperPlace) -> RunningKeeper:
        process = place.start()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"secret": self._secret, "host": place.address}).encode() + b"\n")
            process.stdin.flush()
            return RunningKeeper(place, process, _port_of(process, place))
        except OSError:
            _end(process)
            raise _not_started(place) from None
        except BaseException:
            _end(process)
            raise

    def _write(self) -> None:
        """Writes ``file`` atomically: ranks may read it at any time."""
        part = self.file.with_suffix(".part")
        part.unlink(missing_ok=True)
        addresses = [f"{place.address}:{self.kept[place.name].port}" for place in self._used]
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            json.dump({"secret": self._secret, "keepers": addresses}, file)
        part.replace(self.file)

    def _replace_lost(self) -> None:
        again: dict[str, float] = {}  # when to try a place again that did not answer
        while not self._closed.wait(_POLL_SECONDS):
            lost = [kept for kept in list(self.kept.values()) if kept.process.poll() is not None]
            for kept in lost:
                name, now = kept.place.name, time.monotonic()
                if again.get(name, now) > now:
                    continue
                try:
                    self._replace(kept, self._started(kept.place))
                except (SpecError, OSError):
                    again[name] = time.monotonic() + _RETRY_SECONDS

    def _replace(self, old: RunningKeeper, new: RunningKeeper) -> None:
        with self._lock:
            if self._closed.is_set() or self.kept.get(old.place.name) is not old:
                _end(new.process)
                return
            _end(old.process)
            self.kept[old.place.name] = new
            self._write()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for kept in self.kept.values():
                _end(kept.process)
        self._watch.join()
        self.file.unlink(missing_ok=True)


@contextmanager
def keepers(file: Path, network: Network | None) -> Iterator[Keepers]:
    """A keeper on every virtual node of ``network``, or one on this machine if there is no network."""
    with contextlib.closing(Keepers(file)) as started:
        nodes = started.nodes if network is None else network.emulation.nodes
        started.use([place_here(network, node) for node in range(nodes)])
        yield started


@contextmanager
def keepers_elsewhere(job: Job, folder: Path | None) -> Iterator[Keepers | None]:
    """For ranks on other hosts, whose launcher calls `use`; None if the job keeps no copies in memory."""
    if job.run.checkpoints.memory is None or folder is None:
        yield None
        return
    with contextlib.closing(Keepers(RunFolder(folder).keepers)) as started:
        yield started


def place_here(network: Network | None, node: int) -> KeeperPlace:
    """A virtual node of ``network``, or this machine."""
    command = [sys.executable, "-I", "-S", keeper.__file__]
    command = command if network is None else network.command(node, command)
    address = _LOOPBACK if network is None else namespace.address(node)

    def start() -> AgentProcess:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    return KeeperPlace(f"node {node}", address, start)


def _port_of(process: AgentProcess, place: KeeperPlace) -> int:
    """The port that the keeper prints; a login script may print other lines before."""
    assert process.stdout is not None
    deadline = time.monotonic() + _START_SECONDS
    while wait([process.stdout], max(0.0, deadline - time.monotonic())):  # type: ignore[list-item]
        line = process.stdout.readline()
        if not line:
            break
        if line.startswith(keeper.MARK) and line[len(keeper.MARK) :].strip().isdigit():
            return int(line[len(keeper.MARK) :])
    raise _not_started(place)


def _not_started(place: KeeperPlace) -> SpecError:
    problem = f"a process that keeps copies in memory did not start ({place.name})"
    return SpecError("run.checkpoints.memory", problem, "try again")


def _end(process: AgentProcess) -> None:
    """Closes its input, at which a keeper ends; kills one that does not."""
    with contextlib.suppress(OSError, ValueError):
        assert process.stdin is not None
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
