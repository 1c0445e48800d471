"""`--on hosts.txt`: which hosts a job's ranks run on, which of them answer, and how to go on without a lost one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.launch.elastic import SmallerSplits
from shardwise.launch.keepers import KEEPER, KeeperPlace, Keepers, keepers_elsewhere
from shardwise.launch.outcome import Failure
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.resume import write_job
from shardwise.launch.targets.hosts import Agent, Host, HostLost, HostRanks, agent_on, compared, placed, ssh_process
from shardwise.launch.targets.registry import TargetOption, TargetRequest
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import counted

OPTIONS: Mapping[str, TargetOption] = {}
_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 5.0  # between two tries to reach a host that was lost

Places = Sequence[tuple[Host, range]]


@contextmanager
def start_on(request: TargetRequest) -> Iterator[HostTarget]:
    """Connects to all hosts that are needed and compares what they have installed, before any rank starts."""
    hosts = in_order(request.target.hosts() or [], request.job)
    placed(hosts, request.job.strategy.world, request.job.cluster.node_devices)
    with OwnedFolder("hosts") as folder, keepers_elsewhere(request.job, request.folder) as keep:
        target = HostTarget(request, hosts, request.job, folder, keep)
        try:
            target.connect(folder, strict=not request.job.run.restarts.shrink)
            yield target
        finally:
            target.close()


def in_order(hosts: list[Host], job: Job) -> list[Host]:
    """Hosts in the order of the job's wiring, which is that of its ranks; hosts outside it come last."""
    wanted = () if job.cluster.wiring is None else job.cluster.wiring.hosts
    places = {name: place for place, name in enumerate(wanted)}
    return sorted(hosts, key=lambda host: places.get(host.address, len(places)))


@dataclass
class HostTarget:
    """Connects to hosts for each attempt; the agents that answered on entry serve the first one.

    A host that does not answer is waited for, unless an idle one of the file can take its place.
    """

    request: TargetRequest
    hosts: Sequence[Host]
    job: Job  # as it runs now
    folder: Path
    keepers: Keepers | None = None
    places: Places = ()
    connected: list[Agent] = field(default_factory=list)
    _left_out: dict[str, float] = field(default_factory=dict)  # by host name: when it is tried again
    _returned: ReturningHosts | None = None
    _begun: bool = False  # the last attempt had its hosts

    def __post_init__(self) -> None:
        self._written = self.job
        restarts = self.request.job.run.restarts
        self.splits = SmallerSplits(self.request.job, restarts.least_devices) if restarts.shrink else None

    @property
    def notes(self) -> Sequence[str]:
        whole, here = self.request.job, len(self.places[0][1])
        if self.job is not whole:
            return [f"starts with {self.job.strategy.world} of {counted(whole.strategy.world, 'device')}"]
        notes = []
        if here != min(whole.cluster.node_devices, whole.strategy.world):
            nodes = whole.cluster.node_devices
            notes.append(
                f"the prediction is for nodes of {nodes} devices: these hosts have {counted(here, 'rank')} each"
            )
        if len(self.places) < len(self.hosts):
            notes.append(f"{len(self.places)} of {len(self.hosts)} hosts are needed: the others stay idle")
        return notes

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stopped: Callable[[], bool]
    ) -> HostRanks:
        """Starts one attempt; after the first, connects to the hosts again."""
        if not self.connected:
            try:
                if not self.connect(folder, stopped):
                    return HostRanks.never_begun(self.places, folder)
            except SpecError as error:  # a host that was there before
                return HostRanks.lost(self.places, folder, str(error))
        agents, self.connected = self.connected, []
        try:
            if self.keepers is not None:
                self.keepers.use([_keeper_beside(agent, self.folder) for agent in agents])
        except SpecError as error:
            for agent in agents:
                agent.close()
            return HostRanks.lost(self.places, folder, str(error))
        again = time.monotonic() + self.request.job.run.restarts.retry
        self._left_out = {name: min(until, again) for name, until in self._left_out.items()}
        return HostRanks(agents, command, folder, environment)

    def better(self) -> str | None:
        """Why to restart: hosts answer again that make room for more ranks; None if not."""
        now = self.job.strategy.world
        if self.splits is None or now == self.request.job.strategy.world:
            return None
        used = {host.name for host, _ in self.places}
        if self._returned is None:
            self._returned = ReturningHosts([host for host in self.hosts if host.name not in used], self.folder)
        again = time.monotonic()
        left_out = {name: until for name, until in self._left_out.items() if until > again}
        there = (used | self._returned.names) - left_out.keys()
        layout = self._layout([host for host in self.hosts if host.name in there])
        if layout is None or layout[0].strategy.world <= now:
            return None
        self._left_out = left_out
        return f"{counted(layout[0].strategy.world, 'rank')} have room again instead of {now}"

    def leave_out(self, failure: Failure) -> str | None:
        """Leaves out the host of the rank that failed, if a single rank is to blame."""
        if failure.rank is None or not self._begun:
            return None
        name = next(host.name for host, ranks in self.places if failure.rank in ranks)
        self._left_out[name] = math.inf  # at least until an attempt has run without it
        if self._layout(self._usable()) is None:
            del self._left_out[name]
            return None
        return f"goes on without {name}"

    def connect(self, folder: Path, stopped: Callable[[], bool] = lambda: False, *, strict: bool = False) -> bool:
        """Starts an agent on every host of a layout; False if ``stopped`` before there is one.

        Raises SpecError if hosts do not answer in time and there is no layout without them; if ``strict``, for the
        first that does not answer.
        """
        self.close()
        self._begun, first = False, not self.places
        deadline = time.monotonic() + (0.0 if first else self.request.job.run.restarts.wait)
        lost: dict[str, HostLost] = {}
        while not stopped():
            late = time.monotonic() >= deadline
            layout = self._layout([host for host in self._usable() if host.name not in lost], whole_only=not late)
            if layout is None:
                if late:
                    raise next(iter(lost.values()), None) or SpecError("⟨on⟩", "no host is left", "check the hosts")
                time.sleep(_RETRY_SECONDS)
                lost.clear()
                continue
            try:
                self._connect(*layout, folder)
                return True
            except HostLost as error:
                if strict:
                    raise
                lost[error.field] = error
        return False

    def _connect(self, job: Job, places: Places, folder: Path) -> None:
        if job != self._written and self.request.folder is not None:
            write_job(job, RunFolder(self.request.folder))
        self._written = job
        agents = [agent_on(host, ranks, folder / f"agent-{number}.log") for number, (host, ranks) in enumerate(places)]
        self.connected = compared(agents, self.request.folder)
        self.job, self.places, self._begun = job, places, True

    def _usable(self) -> list[Host]:
        """The hosts not left out. Only `better` brings those back, to let a training run grow."""
        return [host for host in self.hosts if host.name not in self._left_out]

    def _layout(self, hosts: Sequence[Host], *, whole_only: bool = False) -> tuple[Job, Places] | None:
        """The job as planned, or the largest split of it that fits these hosts; None if none does."""
        rooms = [self.request.job.cluster.node_devices if host.slots is None else host.slots for host in hosts]
        smaller = self.splits.on(rooms) if self.splits is not None and not whole_only else iter(())
        for job in [self.request.job, *smaller] if hosts else []:
            try:
                return job, placed(hosts, job.strategy.world, job.cluster.node_devices)
            except SpecError:
                continue
        return None

    def close(self) -> None:
        """Ends the agents that no attempt uses, and the search for lost hosts."""
        agents, self.connected = self.connected, []
        for agent in agents:
            agent.close()
        returned, self._returned = self._returned, None
        if returned is not None:
            returned.close()


def _keeper_beside(agent: Agent, folder: Path) -> KeeperPlace:
    """A keeper with a connection of its own: it outlives the agent and the ranks."""
    host, log = agent.host, folder / f"keeper-{agent.host.address}.log"
    address = agent.facts.get("address") or host.address
    return KeeperPlace(host.name, address, lambda: ssh_process(host.name, log, KEEPER))


class ReturningHosts:
    """Keeps trying to reach lost hosts, in a thread; ``names`` are those that answered last."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self.names: frozenset[str] = frozenset()
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="lost hosts", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.is_set():
            numbers = [number for number in range(len(self._hosts)) if self._answers(number)]
            self.names = frozenset(self._hosts[number].name for number in numbers)
            self._closed.wait(_LOOK_SECONDS)

    def _answers(self, number: int) -> bool:
        try:
            agent = agent_on(self._hosts[number], range(0), self._folder / f"returning-{number}.log")
        except OSError:  # the run is over, and its folder gone
            return False
        try:
            agent.answer("host")
        except SpecError:
            return False
        finally:
            agent.close()
        return True
