"""`--on ray`: the ranks of a job in a placement group, supervised and restarted as ranks on hosts are.

Ray decides where ranks run and says which nodes are left. A restart goes on from the last checkpoint committed in the
run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.launch.elastic import SmallerSplits
from shardwise.launch.keepers import KEEPER, KeeperPlace, Keepers, keepers_elsewhere
from shardwise.launch.outcome import Failure
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.preflight import require_cores
from shardwise.launch.ray.cluster import (
    ADDRESS,
    Bundle,
    PlacedGang,
    RayCluster,
    RayNode,
    outliving,
    ray_cluster,
    variables,
)
from shardwise.launch.ray.pipe import ANSWER_SECONDS, RayPipe, answer
from shardwise.launch.resume import write_job
from shardwise.launch.targets.hosts import AGENT, Agent, Host, HostRanks, compared
from shardwise.launch.targets.registry import TargetOption, TargetRequest
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.installation import require_packages
from shardwise.spec.job import Job
from shardwise.spec.units import counted

OPTIONS = {"address": TargetOption("the address of a cluster (default RAY_ADDRESS; without it one is started here)")}
_SHORT_SECONDS = 15.0  # for a group of which Ray says that there is room
_REMEDY = "`python -m shardwise --version` must work on all nodes, by the Python of Ray"


@contextmanager
def start_on(request: TargetRequest) -> Iterator[RayTarget]:
    """Waits for a place for all ranks and compares what its nodes have installed, before any rank starts."""
    require_packages("⟨on=ray⟩", "ray")
    job, address = request.job, request.target.option("address") or os.environ.get(ADDRESS)
    cores = len(os.sched_getaffinity(0))
    if not address and job.run_device == "cpu":
        require_cores("cluster", job.strategy.world, "join a cluster (⟨on=ray,address=...⟩), or plan for fewer devices")
    splits = SmallerSplits(job, job.run.restarts.least_devices) if job.run.restarts.shrink else None
    with ExitStack() as stack:
        stack.enter_context(variables(outliving()))
        cluster = stack.enter_context(ray_cluster(address, max(cores, job.strategy.world)))
        folder = stack.enter_context(OwnedFolder("gang"))
        keep = stack.enter_context(keepers_elsewhere(job, request.folder))
        target = RayTarget(request, cluster, splits, job, job, folder, keep)
        try:
            target.connect(folder)
            yield target
        finally:
            target.close()


@dataclass
class RayTarget:
    """Places a gang for each attempt; the gang that is placed and checked on entry serves the first one."""

    request: TargetRequest
    cluster: RayCluster
    splits: SmallerSplits | None
    job: Job  # as it runs now
    written: Job  # as it is in the run's folder, up to the cut of its stages
    folder: Path
    keepers: Keepers | None = None
    gang: PlacedGang | None = None
    growing: bool = False  # the ranks were asked to end because there is room for more
    connected: list[Agent] = field(default_factory=list)

    @property
    def notes(self) -> Sequence[str]:
        assert self.gang is not None
        planned = min(self.request.job.cluster.node_devices, self.request.job.strategy.world)
        size = len(self.gang.bundles[0].ranks)
        if self.job is not self.request.job:
            return [f"starts with {self.job.strategy.world} of {counted(self.request.job.strategy.world, 'device')}"]
        if size == planned:
            return []
        return [f"the prediction is for nodes of {planned} devices: these have {counted(size, 'rank')} each"]

    def start(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stopped: Callable[[], bool]
    ) -> HostRanks:
        """Starts one attempt; after the first, waits for a new place among the nodes that are left."""
        if not self.connected:
            try:
                if not self.connect(folder, stopped):
                    return HostRanks.never_begun(self._places(), folder)
            except SpecError as error:  # there was a place before
                if stopped():
                    return HostRanks.never_begun(self._places(), folder)
                return HostRanks.lost(self._places(), folder, str(error))
        agents, self.connected = self.connected, []
        try:
            if self.keepers is not None and self.gang is not None:
                self.keepers.use([self._keeper_on(bundle.node) for bundle in self.gang.bundles])
        except SpecError as error:
            for agent in agents:
                agent.close()
            return HostRanks.lost(self._places(), folder, str(error))
        threads = {} if self.request.job.run_device == "cuda" else {"OMP_NUM_THREADS": "1"}  # a CPU for every rank
        return HostRanks(agents, command, folder, {**threads, **environment})

    def better(self) -> str | None:
        """Why to restart: a run with fewer ranks than planned has room for more; None if not."""
        with suppress(SpecError):  # the ranks may go on without the cluster's head
            if self.job is not self.request.job and self._more():
                self.growing = True
                return "there is room for more ranks"
        return None

    def leave_out(self, failure: Failure) -> str | None:
        """Nothing: Ray itself decides which nodes are used."""
        return None

    def connect(self, folder: Path, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Starts an agent in every bundle of a new placement group; False if ``stopped`` before there is one."""
        self.close()
        self.gang = self._placed(stopped)
        if self.gang is None:
            return False
        gang = self.gang
        if self.job != self.written and self.request.folder is not None:
            write_job(self.job, RunFolder(self.request.folder))
        self.written = self.job
        actors = answer(lambda: [gang.actor(bundle, AGENT, _variables()) for bundle in gang.bundles])
        agents = []
        for number, (bundle, actor) in enumerate(zip(gang.bundles, actors)):
            log = folder / f"agent-{number}.log"
            pipe = RayPipe(actor, log)
            agents.append(Agent(Host(self._name(bundle)), bundle.ranks, log, pipe, _REMEDY))
        self.connected = compared(agents, self.request.folder)
        self.connected[0].facts["address"] = gang.bundles[0].node.address  # of rank 0, wherever it was put
        return True

    def _keeper_on(self, node: RayNode) -> KeeperPlace:
        """A keeper in an actor of its own: it outlives the gang, and ends with this process or its node."""

        def start() -> RayPipe:
            actor = answer(lambda: self.cluster.actor_on(node, KEEPER, _variables()))
            return RayPipe(actor, self.folder / f"keeper-{node.number}.log")

        return KeeperPlace(node.number, node.address, start)

    def _placed(self, stopped: Callable[[], bool]) -> PlacedGang | None:
        """A place for all ranks or, after waiting, for as many as have room; a run that grows hardly waits."""
        growing, self.growing, self.job = self.growing, False, self.request.job
        wait_seconds = self.job.run.restarts.wait
        if growing:
            wait_seconds = _SHORT_SECONDS if sum(self._rooms()) >= self.job.strategy.world else 0.0
        try:
            return self._placed_within(wait_seconds, stopped)
        except DoesNotFit:
            if self.splits is None:
                raise
            for split in self.splits.on(self._rooms()):
                self.job = split
                with suppress(DoesNotFit):  # in use by others, or on a node that is lost without Ray knowing yet
                    return self._placed_within(_SHORT_SECONDS, stopped)
            raise

    def _placed_within(self, seconds: float, stopped: Callable[[], bool]) -> PlacedGang | None:
        job = self.job
        return answer(lambda: self.cluster.placed(job, seconds, stopped), seconds + ANSWER_SECONDS, stopped)

    def _rooms(self) -> list[int]:
        return [node.room for node in answer(lambda: self.cluster.nodes_for(self.job))]

    def _more(self) -> bool:
        """Whether a larger split fits into the idle devices and those that this run has."""
        assert self.splits is not None
        free, now = answer(lambda: self.cluster.free(self.job)), self.job.strategy.world
        larger = self.splits.on(self._rooms(), more_than=now)
        return any(split.strategy.world - now <= free for split in larger)

    def close(self) -> None:
        agents, self.connected = self.connected, []
        for agent in agents:
            agent.close()
        gang, self.gang = self.gang, None
        if gang is not None:
            gang.close()

    def _name(self, bundle: Bundle) -> str:
        """The address of its node, with Ray's node number if several nodes share that address."""
        assert self.gang is not None
        same = {other.node.number for other in self.gang.bundles if other.node.address == bundle.node.address}
        return bundle.node.address if len(same) == 1 else f"{bundle.node.address} (node {bundle.node.number[:8]})"

    def _places(self) -> list[tuple[Host, range]]:
        return [(Host("ray"), range(self.request.job.strategy.world))]


def _variables() -> dict[str, str]:
    """The variables by which nodes find our code."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": path} if path else {}
