"""The processes of one attempt: starting them, observing each, and ending all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwise.launch import guard
from shardwise.launch.emulate.network import Network
from shardwise.launch.owned import OwnedFolder
from shardwise.layout.groups import local_rank, node_of
from shardwise.run.attempt import STACKS_SIGNAL, Phase, RankProgress, rank_file, read_progress
from shardwise.run.environment import OWN_LAUNCHER, loopback_interface

_TAIL_BYTES = 65536  # native errors come before the stacks of all threads
_SHARED_MEMORY = Path("/dev/shm")
_RENDEZVOUS_BYTES = 2**20  # space for the rendezvous file
_GUARD_SECONDS = 2.0  # for a guard to end; and at least this long between two guards
_STACKS_SECONDS = 0.3  # for a rank to dump its stacks
FLIGHT_SECONDS = 1.0  # for a rank to write its flight record, which a busy interpreter delays


class ProcessLike(Protocol):
    """The process of a rank, here or on another host."""

    returncode: int | None
    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Gang:
    """The ``ranks`` of a ``world`` that start here; they meet in a file or, with other hosts, at address and port."""

    world: int
    ranks: range
    address: str | None = None
    port: int | None = None

    @classmethod
    def all_here(cls, world: int) -> Gang:
        return cls(world, range(world))


@dataclass
class RankProcess:
    """One process, in its own process group together with everything it starts."""

    number: int
    process: ProcessLike
    folder: Path
    started: float
    ended: float | None = None  # when it was seen to be gone
    _progress_file: int | None = None
    _progress: RankProgress | None = None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self.process.returncode

    def progress(self) -> RankProgress | None:
        """Its last report; None if it never made one."""
        if self._progress_file is None:
            path = rank_file(self.folder, self.number, "progress")
            with contextlib.suppress(FileNotFoundError):
                self._progress_file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._progress_file is not None:
            self._progress = read_progress(self._progress_file) or self._progress
        return self._progress

    @property
    def since(self) -> float:
        """When its phase began; before its first report, when it was started."""
        progress = self.progress()
        return self.started if progress is None else progress.since

    @property
    def where(self) -> tuple[Phase | None, int | None]:
        """The phase and the step it was last in."""
        progress = self.progress()
        return (progress.phase, progress.step) if progress else (None, None)

    def log_tail(self) -> str:
        """The end of what it printed."""
        with rank_file(self.folder, self.number, "log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace")

    def stacks(self) -> str:
        """What its threads were doing at `RankProcesses.request_stacks`."""
        path = rank_file(self.folder, self.number, "stacks")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def flight_age(self, now: float) -> float | None:
        """How old the record of its last collectives is; negative if newer than ``now``, None if there is none."""
        with contextlib.suppress(OSError):
            return now - rank_file(self.folder, self.number, "flight.json").stat().st_mtime
        return None

    def close(self) -> None:
        if self._progress_file is not None:
            os.close(self._progress_file)
            self._progress_file = None


class RankGroup(Protocol):
    """All ranks of one attempt, wherever they run; whoever reads ``news``, lines for the user, removes them."""

    all: list[RankProcess]
    news: list[str]

    def poll(self) -> None: ...
    @property
    def running(self) -> list[RankProcess]: ...
    def send_signal(self, number: signal.Signals) -> None: ...
    def request_stacks(self) -> None: ...
    def end(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class NodeSeats:
    """The virtual nodes of the ranks: each of ``nodes`` holds ``each`` consecutive ranks."""

    network: Network
    nodes: tuple[int, ...]
    each: int

    def of(self, rank: int) -> int:
        return self.nodes[node_of(rank, self.each)]


class RankProcesses:
    """The processes of one attempt on this host; `end` kills all of them and their children, however they behave.

    With ``seats`` each process starts on its virtual node.
    """

    def __init__(
        self,
        command: Sequence[str],
        gang: Gang,
        folder: Path,
        environment: Mapping[str, str],
        seats: NodeSeats | None = None,
    ) -> None:
        self.folder, self._gang = folder, gang
        self._seats = seats
        self.all: list[RankProcess] = []
        self.news: list[str] = []
        self._rendezvous = _rendezvous(folder)
        self._guard, self._guarded = self._start_guard(), time.monotonic()
        try:
            for number in gang.ranks:
                self.all.append(self._start(command, number, environment))
        except BaseException:
            self.end(0)
            raise

    def _start(self, command: Sequence[str], number: int, environment: Mapping[str, str]) -> RankProcess:
        own = {**_environment(number, self._gang, self.folder, self._rendezvous.path / "store"), **environment}
        if self._seats is not None:
            network, node = self._seats.network, self._seats.of(number)
            own |= network.environment_on(node, local_rank(number, self._seats.each), self._seats.each)
            command = network.command(node, command)
        with rank_file(self.folder, number, "log").open("wb") as log:
            process = subprocess.Popen(
                list(command), env=own,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._notify_guard(f"+{process.pid}")
        return RankProcess(number, process, self.folder, time.monotonic())

    def poll(self) -> None:
        """Collects ended processes, and kills their children at once: later their process ids may be reused."""
        if self._guard.poll() is not None and time.monotonic() - self._guarded > _GUARD_SECONDS:
            self._replace_guard()
        for rank in self.all:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended = time.monotonic()
                _kill_group(rank)
                self._notify_guard(f"-{rank.process.pid}")

    @property
    def running(self) -> list[RankProcess]:
        return [rank for rank in self.all if rank.ended is None]

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the ranks only: they end their own children."""
        for rank in self.running:
            rank.process.send_signal(number)

    def request_stacks(self) -> None:
        """Asks every rank that has a handler for its stacks and, if it trains, for its flight record."""
        asked_at = time.time()
        asked = [rank for rank in self.running if rank.progress() is not None]  # others would be killed by the signal
        for rank in asked:
            rank.process.send_signal(STACKS_SIGNAL)
        time.sleep(_STACKS_SECONDS)
        await_flights(asked, asked_at, FLIGHT_SECONDS)

    def end(self, seconds: float) -> None:
        """Ends all ranks (SIGTERM, then SIGKILL after ``seconds``) and everything they left behind."""
        self.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            time.sleep(0.02)
            self.poll()
        for rank in self.running:
            _kill_group(rank)
        for rank in self.all:
            rank.process.wait()
            rank.close()
        self.poll()
        _end_guard(self._guard)
        self._rendezvous.close()

    def _start_guard(self) -> subprocess.Popen[bytes]:
        """Its pipe is unbuffered: a line that could not be written would make closing it fail."""
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self._rendezvous.path)],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _replace_guard(self) -> None:
        """Starts another guard after the old one was killed."""
        _end_guard(self._guard)
        self.news.append(f"it ended with status {self._guard.returncode}: another one guards the ranks")
        self._guard, self._guarded = self._start_guard(), time.monotonic()
        for rank in self.running:
            self._notify_guard(f"+{rank.process.pid}")

    def _notify_guard(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed, which `poll` finds
            assert self._guard.stdin is not None
            self._guard.stdin.write(f"{line}\n".encode())


def await_flights(
    ranks: Sequence[RankProcess], asked_at: float, seconds: float, poll: Callable[[], None] = lambda: None
) -> None:
    """Waits until every training rank has written a new flight record; a stopped process never does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any((rank.flight_age(asked_at) or 0) > 0 for rank in ranks):
        time.sleep(0.02)
        poll()


def _end_guard(process: subprocess.Popen[bytes]) -> None:
    """Closes its input, at which a guard ends; kills one that is stopped (SIGSTOP)."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_GUARD_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill_group(rank: RankProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, signal.SIGKILL)


def _rendezvous(folder: Path) -> OwnedFolder:
    """Holds the rendezvous file: in memory if possible, so that ranks can communicate while the disk is full."""
    rendezvous = OwnedFolder("rendezvous", _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else folder)
    try:
        rendezvous.require_room(_RENDEZVOUS_BYTES, "the processes of a run rendezvous there")
    except BaseException:
        rendezvous.close()
        raise
    return rendezvous


def _environment(number: int, gang: Gang, folder: Path, rendezvous: Path) -> dict[str, str]:
    """The environment variables of a rank: its place, and quiet defaults."""
    here = len(gang.ranks)
    own_place = {
        "RANK": str(number),
        "LOCAL_RANK": str(number - gang.ranks[0]),
        "WORLD_SIZE": str(gang.world),
        "LOCAL_WORLD_SIZE": str(here),
        "SHARDWISE_ATTEMPT_FOLDER": str(folder),
        OWN_LAUNCHER: str(os.getpid()),
    }
    if gang.address is None:
        own_place["SHARDWISE_RENDEZVOUS"] = str(rendezvous)
        interface = loopback_interface()
        own_place |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface) if interface else {}
    else:
        own_place |= {"MASTER_ADDR": gang.address, "MASTER_PORT": str(gang.port)}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // here)),
        "PYTHONUNBUFFERED": "1",  # the last output of a killed process is in its log
        "PYTHONFAULTHANDLER": "1",
    }
    return {**defaults, **os.environ, **own_place}
