"""Ranks on other hosts, over ssh: an agent on each host starts its ranks, and ends them when the connection is lost.

What agents report (logs, progress, failures, stacks) is written into the attempt's folder as local ranks would write
it, in this machine's time. So these ranks are supervised, and their failures diagnosed, like local ones.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from shardwise.launch.ranks import FLIGHT_SECONDS, RankProcess, await_flights
from shardwise.launch.targets.agent import BEAT_SECONDS, LOST_SECONDS, MARK, installed, require_same
from shardwise.run.attempt import FailureRecord, rank_file, write_beat, write_failure, write_progress
from shardwise.run.environment import HOST
from shardwise.run.records import write_flight
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import counted

SSH = "SHARDWISE_SSH"  # the program, and options for all hosts, as in GIT_SSH_COMMAND
CONNECT_SECONDS, ANSWER_SECONDS = 15, 60.0
_END_SECONDS = 10.0  # for an agent to say how its ranks ended
_STACKS_SECONDS = 1.0
AGENT = "shardwise.launch.targets.agent"
# What ranks on other hosts inherit from this environment; not what describes this process's own place.
_PASSED = ("NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_", "CUDA_", "HF_", "WANDB_", "PYTHON", "SHARDWISE_", "FI_", "UCX_")
_OWN = (
    "SHARDWISE_LAUNCHER", "SHARDWISE_ATTEMPT_FOLDER", "SHARDWISE_RENDEZVOUS", HOST, "TORCHELASTIC",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def agent_on(host: Host, ranks: range, log: Path) -> Agent:
    """Starts an agent over ssh, for these ranks."""
    remedy = f"`{shlex.join(_ssh(host.name))} {sys.executable} -m shardwise --version` must work"
    return Agent(host, ranks, log, ssh_process(host.name, log), remedy)


def compared(agents: list[Agent], run_folder: Path | None) -> list[Agent]:
    """The agents, if their hosts have the same software as this one; otherwise closes all and raises SpecError.

    Raises HostLost for an agent that does not answer.
    """
    job_file = None if run_folder is None else (run_folder / "job.yaml").resolve()
    try:
        for agent in agents:
            job = None if job_file is None else str(job_file)
            agent.say(check={"working_folder": str(Path.cwd()), "job_file": job})
        here = installed(Path.cwd(), job_file)
        for agent in agents:
            require_same(here, agent.answer("installed"), agent.host.name, run_folder)
    except BaseException:
        for agent in agents:
            agent.close()
        raise
    return agents


class HostLost(SpecError):
    """A host that does not answer; ``field`` is its name."""


class AgentProcess(Protocol):
    """A process that connects to an agent, like a subprocess.Popen; its log says why it ended."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Agent:
    """The connection to one host: a process, a thread that listens to it, and one that sends heartbeats."""

    def __init__(self, host: Host, ranks: range, log: Path, process: AgentProcess, remedy: str) -> None:
        self.host, self.ranks, self._log, self.process, self._remedy = host, ranks, log, process, remedy
        self.messages: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.heard, self._changed = time.monotonic(), threading.Condition()
        self._closed = threading.Event()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"{work.__name__} {host.name}", daemon=True).start()

    def say(self, **message: Any) -> None:
        with suppress(OSError, ValueError):  # it is gone, which `lost` finds
            assert self.process.stdin is not None
            self.process.stdin.write(f"{json.dumps(message)}\n".encode())
            self.process.stdin.flush()

    def answer(self, name: str) -> Any:
        """Waits for the agent's answer of this name; raises HostLost if there is none."""
        deadline = time.monotonic() + ANSWER_SECONDS
        with self._changed:
            while name not in self.facts and time.monotonic() < deadline and self.process.poll() is None:
                self._changed.wait(0.1)
            if name in self.facts:
                return self.facts[name]
        time.sleep(0.1)  # ssh's last words
        reason = self.lost() or f"no answer within {ANSWER_SECONDS:g} s"
        raise HostLost(self.host.name, reason, self._remedy)

    def lost(self) -> str | None:
        """Why the connection is lost; None if it is not."""
        status = self.process.poll()
        if status is not None:
            words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = next((line for line in reversed(words) if line.strip()), "it printed nothing")
            return f"the connection ended (status {status}): {said}"
        silent = time.monotonic() - self.heard
        return f"no word from its agent for {silent:.0f} s" if silent > LOST_SECONDS else None

    def take(self) -> list[dict[str, Any]]:
        with self._changed:
            taken, self.messages = self.messages, []
        return taken

    def close(self, seconds: float = 0.0) -> None:
        """Ends the connection; an agent whose input ends leaves no rank running."""
        self._closed.set()
        with suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(seconds + _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode("utf-8", "replace")
            if not text.startswith(MARK):
                continue
            message = json.loads(text.removeprefix(MARK))
            with self._changed:
                self.heard = time.monotonic()
                if message.keys() & {"rank", "refused", "news"}:
                    self.messages.append(message)
                else:
                    self.facts |= message
                self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS) and self.process.poll() is None:
            self.say(beat=True)


def _ssh(host: str) -> list[str]:
    options = {
        "BatchMode": "yes", "ConnectTimeout": CONNECT_SECONDS, "ServerAliveInterval": 5, "ServerAliveCountMax": 3,
    }  # fmt: skip
    given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    return [*shlex.split(os.environ.get(SSH, "ssh")), "-T", *given, "--", host]


def ssh_process(host: str, log: Path, module: str = AGENT) -> subprocess.Popen[bytes]:
    """Runs a module of ours on a host; its standard error goes to the log."""
    with log.open("wb") as errors:
        return subprocess.Popen(
            ssh_command(host, module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,  # Ctrl-C is for the launcher
        )  # fmt: skip


def ssh_command(host: str, module: str = AGENT) -> list[str]:
    """Runs a module under the same Python and PYTHONPATH as here."""
    path = os.environ.get("PYTHONPATH")
    variables = [f"PYTHONPATH={path}"] if path else []
    command = shlex.join(["env", *variables, "PYTHONUNBUFFERED=1", sys.executable, "-m", module])
    return [*_ssh(host), f"exec {command}"]


@dataclass
class RemoteProcess:
    """A rank's process on another host, as its agent reports it."""

    returncode: int | None = None
    pid: int = 0

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        return -1 if self.returncode is None else self.returncode

    def send_signal(self, number: int, /) -> None:
        raise AssertionError("signals go to whole hosts: `HostRanks.send_signal`")


class HostRanks:
    """All ranks of one attempt on the hosts of ``agents``."""

    def __init__(
        self, agents: Sequence[Agent], command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.folder, self._agents = folder, list(agents)
        self.news: list[str] = []
        self._lost: set[Agent] = set()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        paths = {rank: rank_file(folder, rank, "progress") for agent in agents for rank in agent.ranks}
        self._files = {rank: os.open(path, flags, 0o644) for rank, path in paths.items()}
        self._counts = dict.fromkeys(self._files, 0)
        now = time.monotonic()
        self.all = [RankProcess(rank, RemoteProcess(), folder, now) for agent in agents for rank in agent.ranks]
        self._by_number = {rank.number: rank for rank in self.all}
        for rank in self.all:
            rank_file(folder, rank.number, "log").touch()
        if not agents:
            return
        first = agents[0].facts
        start = {
            "command": list(command), "world": len(self.all), "attempt": folder.name,
            "address": first.get("address") or agents[0].host.address, "port": first["port"],
            "working_folder": str(Path.cwd()),
        }  # fmt: skip
        inherited = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED)}
        given = {name: value for name, value in inherited.items() if not name.startswith(_OWN)} | dict(environment)
        for agent in agents:
            own = {**given, HOST: agent.host.address}
            agent.say(start={**start, "ranks": [agent.ranks.start, agent.ranks.stop], "environment": own})

    @classmethod
    def lost(cls, places: Sequence[tuple[Host, range]], folder: Path, why: str) -> HostRanks:
        """An attempt whose hosts could not be reached: all of its ranks have failed."""
        attempt = cls.never_begun(places, folder)
        for rank in attempt.all:
            attempt._fail(rank, why)
        return attempt

    @classmethod
    def never_begun(cls, places: Sequence[tuple[Host, range]], folder: Path) -> HostRanks:
        """An attempt that was stopped before any of its ranks was started."""
        attempt = cls([], [], folder, {})
        attempt.all = [
            RankProcess(rank, RemoteProcess(), folder, time.monotonic()) for _, ranks in places for rank in ranks
        ]
        attempt._by_number = {rank.number: rank for rank in attempt.all}
        for rank in attempt.all:
            rank_file(folder, rank.number, "log").touch()
            rank.process.returncode = -signal.SIGTERM
        return attempt

    @property
    def running(self) -> list[RankProcess]:
        return [rank for rank in self.all if rank.ended is None]

    def poll(self) -> None:
        for agent in self._agents:
            for message in agent.take():
                self._note(agent, message)
            if agent not in self._lost and (why := agent.lost()):
                for message in agent.take():
                    self._note(agent, message)
                self._lose(agent, why)
        for rank in self.all:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended = time.monotonic()

    def send_signal(self, number: signal.Signals) -> None:
        for agent in self._agents:
            agent.say(signal=int(number))

    def request_stacks(self) -> None:
        for agent in self._agents:
            agent.say(stacks=True)
        asked_at = time.time()
        time.sleep(_STACKS_SECONDS)
        self.poll()
        # An agent answers once its own ranks have.
        await_flights(self.running, asked_at, _STACKS_SECONDS + 2 * FLIGHT_SECONDS, self.poll)

    def end(self, seconds: float) -> None:
        """Lets every agent end its ranks; one that does not answer is cut off, which has the same effect."""
        for agent in self._agents:
            agent.say(end=seconds)
        for agent in self._agents:
            agent.close(seconds)
        for agent in self._agents:
            for message in agent.take():
                self._note(agent, message)
        for rank in self.all:
            if rank.process.returncode is None:
                rank.process.returncode = -signal.SIGKILL
            rank.close()
        self.poll()
        for file in self._files.values():
            os.close(file)
        self._files = {}

    # -- what agents tell ------------------------------------------------------------------------------------

    def _note(self, agent: Agent, message: Mapping[str, Any]) -> None:
        if "refused" in message:
            self._lose(agent, message["refused"])
            return
        if "news" in message:
            self.news.append(f"{agent.host.name}: {message['news']}")
            return
        number, now = message["rank"], time.monotonic()
        if "log" in message:
            with rank_file(self.folder, number, "log").open("ab") as log:
                log.write(message["log"].encode("latin-1"))
        elif "progress" in message and number in self._files:
            progress, file = message["progress"], self._files[number]
            self._counts[number] += 1
            write_progress(
                file,
                self._counts[number],
                progress["phase"],
                progress["step"],
                now - progress["since"],
                progress["limit_seconds"],
            )
            write_beat(file, now - progress["beat"])
        elif "failed" in message:
            write_failure(self.folder, FailureRecord(**{**message["failed"], "at": now - message["failed"]["at"]}))
        elif "stacks" in message:
            rank_file(self.folder, number, "stacks").write_text(message["stacks"], encoding="utf-8")
        elif "flight" in message:
            with suppress(OSError):  # a full disk
                write_flight(self.folder, number, message["flight"])
        elif "ended" in message:
            self._by_number[number].process.returncode = message["ended"]

    def _lose(self, agent: Agent, why: str) -> None:
        self._lost.add(agent)
        for number in agent.ranks:
            if self._by_number[number].process.returncode is None:
                self._fail(self._by_number[number], f"{agent.host.name}: {why}")

    def _fail(self, rank: RankProcess, why: str) -> None:
        phase, step = rank.where
        record = FailureRecord(rank.number, time.monotonic(), phase or "start", step or 0, "host lost", why, "", False)
        write_failure(self.folder, record)
        rank.process.returncode = 1


# -- host files as DeepSpeed, Open MPI and MPICH write them, and the ranks of each host --------------


_LINE = re.compile(r"(?P<name>[^\s:=]+|\[[0-9a-fA-F:]+\])(?::(?P<short>\d+))?(?P<rest>(?:\s.*)?)")
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)")
_IGNORED = ("max_slots", "max-slots")  # Open MPI's: how far a host may be oversubscribed, which we never do
MOST_SLOTS = 4096


@dataclass(frozen=True)
class Host:
    """A line of a host file."""

    name: str
    slots: int | None = None  # how many ranks it may have; None: as many as a node of the cluster has devices

    @property
    def address(self) -> str:
        """Its name without a user (USER@)."""
        return self.name.rpartition("@")[2]


def read_hosts(text: str, field: str = "--on") -> list[Host]:
    """The hosts in their order; what follows a # is a comment."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        host = _host(line, f"{field}, line {number}")
        if host.name in hosts:
            raise SpecError(f"{field}, line {number}", f"{host.name} is there twice", "add its slots up in one line")
        hosts[host.name] = host
    if not hosts:
        raise SpecError(field, "names no host", "write one in a line: `host slots=8`")
    return list(hosts.values())


def _host(line: str, field: str) -> Host:
    match = _LINE.fullmatch(line)
    if match is None or match["name"].startswith("-"):  # ssh would take it for an option
        raise SpecError(field, f"{shown(line)} is not a host", "write it like `host slots=8`")
    settings = dict(_SETTING.findall(match["rest"]))
    if " ".join(_SETTING.sub("", match["rest"]).split()):
        raise SpecError(field, f"{shown(line)} is not a host and its slots", "write it like `host slots=8`")
    for name in settings:
        if name != "slots" and name not in _IGNORED:
            raise SpecError(field, f"{shown(name)} is not a setting of a host", "use slots")
    slots = settings.get("slots", match["short"])
    if slots is not None and not (slots.isdecimal() and len(slots) < 10 and 0 < int(slots) <= MOST_SLOTS):
        raise SpecError(field, f"{shown(slots)} slots", f"use 1 to {MOST_SLOTS:,}")
    return Host(match["name"], None if slots is None else int(slots))


def placed(hosts: Sequence[Host], world: int, node_devices: int) -> list[tuple[Host, range]]:
    """The ranks of each host that is needed: the first hosts, all with equally many ranks.

    That number is a node's devices, or the smallest number of slots if that is less; it must divide the world.
    """
    wanted = min(node_devices, world)
    room = min((wanted if host.slots is None else host.slots) for host in hosts)
    here = wanted if room >= wanted else room
    if world % here:
        problem = f"{counted(world, 'rank')} on hosts of {here} slots"
        raise SpecError("⟨on⟩", problem, f"give every host {wanted} slots, or another number that divides {world}")
    needed = world // here
    if needed > len(hosts):
        there = f"{counted(len(hosts), 'host')} with room for {here} ranks each"
        raise SpecError("⟨on⟩", f"{there}, {counted(world, 'rank')} need {needed}", "name more hosts or slots")
    return [(host, range(number * here, (number + 1) * here)) for number, host in enumerate(hosts[:needed])]
