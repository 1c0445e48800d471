"""The agent of a host: starts its ranks, reports on them to the launcher, and ends them when the launcher is gone.

It is started by ssh as `python -m shardwise.launch.targets.agent`, and reads and writes JSON lines. When its input ends
or stays silent for too long, the connection is lost, and it ends all ranks. A guard watches it as any launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import shardwise
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.ranks import Gang, RankProcess, RankProcesses
from shardwise.run.attempt import RankProgress, rank_file, read_failure
from shardwise.spec.errors import SpecError

MARK = "shardwise-agent "  # at the start of every line: a login script may print other lines
BEAT_SECONDS = 0.5
LOST_SECONDS = 20.0  # of silence, after which the other side counts as lost
_POLL_SECONDS = 0.05
_LOG_BYTES = 2**16  # of a log in one message


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_listen, args=(inbox,), daemon=True).start()
    say(host=socket.gethostname(), address=own_address(), process=os.getpid())
    agent: _Agent | None = None
    heard = said = time.monotonic()
    try:
        while True:
            message = None
            with contextlib.suppress(queue.Empty):
                message = inbox.get(timeout=_POLL_SECONDS)
            now = time.monotonic()
            if message is not None:
                heard = now
                if "end" in message or "lost" in message:
                    return _leave(agent, float(message.get("end", 0.0)))
                agent = _obey(message, agent)
            if now - heard > LOST_SECONDS:
                return _leave(agent, 0.0)
            if agent is not None:
                agent.relay()
            if now - said > BEAT_SECONDS:
                said = now
                say(beat=True)
    finally:
        if agent is not None:
            agent.close(0.0)


def say(**message: Any) -> None:
    """Sends a line to the launcher; ends this process if the launcher is gone."""
    try:
        sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os._exit(1)  # the guard ends the ranks


def _listen(inbox: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    inbox.put({"lost": True})


def _obey(message: Mapping[str, Any], agent: _Agent | None) -> _Agent | None:
    if "check" in message:
        folder, job = (message["check"][name] for name in ("working_folder", "job_file"))
        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])  # free just now
        say(installed=installed(Path(folder), None if job is None else Path(job)), port=port)
    elif "start" in message:
        return _started(message["start"])
    elif agent is not None and "signal" in message:
        agent.ranks.send_signal(signal.Signals(message["signal"]))
    elif agent is not None and "stacks" in message:
        agent.ranks.request_stacks()
        for rank in agent.ranks.all:
            say(rank=rank.number, stacks=rank.stacks())
        agent.relay_flights()
    return agent


def _flight(rank: RankProcess) -> str | None:
    """The record of its last collectives, if there is one."""
    with contextlib.suppress(OSError):
        return rank_file(rank.folder, rank.number, "flight.json").read_text(encoding="utf-8")
    return None


def _leave(agent: _Agent | None, seconds: float) -> int:
    if agent is not None:
        agent.close(seconds)
    return 0


def _started(given: Mapping[str, Any]) -> _Agent | None:
    gang = Gang(given["world"], range(*given["ranks"]), given["address"], given["port"])
    try:
        os.chdir(given["working_folder"])
        folder = OwnedFolder("agent")
        own = folder.path / given["attempt"]  # ranks of all hosts know the attempt by this name
        own.mkdir()
        return _Agent(RankProcesses(given["command"], gang, own, given["environment"]), folder)
    except (OSError, ValueError) as error:
        say(refused=str(error))
        return None


def own_address() -> str | None:
    """The address by which the launcher reached this host; sshd sets "CLIENT PORT SERVER PORT"."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None


@dataclass
class _Agent:
    """The ranks of this host, and what the launcher has been told of each."""

    ranks: RankProcesses
    folder: OwnedFolder
    _log_at: dict[int, int] = field(default_factory=dict)
    _progress: dict[int, RankProgress] = field(default_factory=dict)
    _flights: dict[int, float] = field(default_factory=dict)
    _failed: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)

    def relay(self) -> None:
        """Sends what is new since the last call; how a rank ended comes after everything else about it."""
        self.ranks.poll()
        while self.ranks.news:
            say(news=self.ranks.news.pop(0))
        for rank in self.ranks.all:
            over = rank.ended is not None
            self._relay_log(rank, whole=over)
            self._relay_progress(rank)
            failure = None if rank.number in self._failed else read_failure(rank.folder, rank.number)
            if failure is not None:
                self._failed.add(rank.number)
                say(rank=rank.number, failed={**asdict(failure), "at": time.monotonic() - failure.at})
            if over and rank.number not in self._ended:
                self._ended.add(rank.number)
                say(rank=rank.number, ended=rank.status)
        self.relay_flights()

    def relay_flights(self) -> None:
        """Sends the flight records that were written since the last call."""
        for rank in self.ranks.all:
            age = rank.flight_age(0.0)
            text = _flight(rank) if age is not None and age != self._flights.get(rank.number) else None
            if text is not None and age is not None:
                self._flights[rank.number] = age
                say(rank=rank.number, flight=text)

    def close(self, seconds: float) -> None:
        """Ends all ranks, and sends the last news of them."""
        self.ranks.end(seconds)
        self.relay()
        self.folder.close()

    def _relay_log(self, rank: RankProcess, *, whole: bool) -> None:
        path = rank_file(rank.folder, rank.number, "log")
        while path.exists():
            with path.open("rb") as log:
                log.seek(self._log_at.get(rank.number, 0))
                new = log.read(_LOG_BYTES)
            if not new:
                return
            self._log_at[rank.number] = self._log_at.get(rank.number, 0) + len(new)
            say(rank=rank.number, log=new.decode("latin-1"))  # it has a letter for every byte
            if not whole:
                return

    def _relay_progress(self, rank: RankProcess) -> None:
        """Sends times as ages: the clocks of hosts differ."""
        progress = rank.progress()
        if progress is None or progress == self._progress.get(rank.number):
            return
        self._progress[rank.number] = progress
        now = time.monotonic()
        ages = {"since": now - progress.since, "beat": now - progress.beat}
        say(rank=rank.number, progress={**asdict(progress), **ages})


# -- what must be the same on all hosts of a run -----------------------------------------------------


PACKAGES = ("torch", "numpy", "safetensors")


def installed(working_folder: Path, job_file: Path | None = None) -> dict[str, str]:
    """Versions and hashes by name, in the order in which differences are reported; "missing" for what is not there."""
    versions = {"Python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    versions |= {
        "shardwise": shardwise.__version__,
        "the code of shardwise": code_hash(Path(shardwise.__file__).parent),
    }
    versions["the working folder"] = str(working_folder) if working_folder.is_dir() else "missing"
    if job_file is not None:
        versions["the job file"] = _hash(job_file)
    return versions


def require_same(here: Mapping[str, str], there: Mapping[str, str], host: str, folder: Path | None = None) -> None:
    for name, value in here.items():
        other = there.get(name, "missing")
        if other == value:
            continue
        if name == "the job file" and other == "missing":
            remedy = "the run's folder must be on storage that all hosts share (⟨run_folder⟩)"
            raise SpecError(host, f"does not see {folder}", remedy)
        raise SpecError(host, f"{name} is {other} there, {value} here", "make it the same on all hosts")


def code_hash(folder: Path) -> str:
    """A hash of all Python files; compiled ones do not count."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()} {_hash(path)}\n".encode())
    return digest.hexdigest()[:12]


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return "missing"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
