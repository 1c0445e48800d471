"""The Ray cluster (an existing one, or one of this machine alone), its nodes, and the place for a gang on them.

A gang is placed in bundles of ranks, none of which is split over nodes (`launch/elastic.py` knows their sizes); Ray
spreads the bundles over its nodes.
"""

from __future__ import annotations

import atexit
import importlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.launch.elastic import bundle_size, bundle_sizes
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.ray.pipe import END_SECONDS, GROUPS, AgentActor, answer, within
from shardwise.planner.placement import place_nodes
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import counted


@dataclass(frozen=True)
class RayNode:
    """A node as Ray reports it; ``room`` is how many ranks its resources allow, busy or not."""

    number: str
    address: str
    room: int


def ranks_of_bundles(
    nodes_of_bundles: Sequence[str], size: int, addresses: Mapping[str, str], wanted: Sequence[str] = ()
) -> list[range]:
    """The ranks of every bundle, given the node that Ray put it on: bundles of one node get neighbouring ranks.

    The ``wanted`` addresses come first, in that order; then nodes by address, so that a restart on the same nodes puts
    the same ranks there.
    """
    first = {address: place for place, address in enumerate(wanted)}

    def key(bundle: int) -> tuple[object, ...]:
        node = nodes_of_bundles[bundle]
        return first.get(addresses[node], len(first)), _address_order(addresses[node]), node, bundle

    order = sorted(range(len(nodes_of_bundles)), key=key)
    places = {bundle: place for place, bundle in enumerate(order)}
    return [range(places[bundle] * size, (places[bundle] + 1) * size) for bundle in range(len(order))]


def wanted_order(job: Job, addresses: Sequence[str]) -> Sequence[str]:
    """The best order of the nodes that Ray chose, if the job's wiring knows their addresses."""
    placement = place_nodes(job, sorted(set(addresses), key=_address_order)) if job.run.reorder else None
    return () if placement is None else placement.hosts


def _address_order(address: str) -> tuple[tuple[int, str], ...]:
    """10.0.0.9 before 10.0.0.10."""
    return tuple((int(part), "") if part.isdecimal() else (0, part) for part in address.split("."))


def missing_words(world: int, device: str, sizes: Sequence[int], nodes: Sequence[RayNode], free: float) -> str:
    asked = f"asked for {counted(world, device)}"
    if sizes[-1] > 1:
        asked += f", {sizes[-1]} or more of them on one node (whole tensor-parallel groups)"
    total = sum(node.room for node in nodes)
    there = ", ".join(f"{node.room} on {node.address}" for node in nodes) or "no node"
    return f"{asked}; present: {total} on {counted(len(nodes), 'node')} ({there}), of which {free:g} are free"


ADDRESS = "RAY_ADDRESS"
_LOOPBACK, _LOCAL = "127.0.0.1", "local"
_STORE_BYTES = 128 * 2**20  # of the object store: only lines of text go through Ray
_LOOK_SECONDS = 0.5
_CONNECT_SECONDS, _JOIN_SECONDS = 15.0, 60.0
_PRINTS = "print_to_stdstream"
_RESOURCES = {"cpu": "CPU", "cuda": "GPU"}


def outliving() -> dict[str, str]:
    """Variables that keep Ray from ending this process with a lost cluster; calls must then be limited by `within`.

    Otherwise Ray calls _Exit(1) 60 s after the head was lost and, if the parent of this process has ended or is process
    1, as soon as the raylet is lost (ray_config_def.h, raylet_ipc_client.cc of Ray 2.60).
    """
    return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6), "RAY_RAYLET_PID": str(os.getpid())}


@contextmanager
def ray_cluster(address: str | None, processors: int) -> Iterator[RayCluster]:
    """Joins the cluster at ``address``, or starts one with ``processors`` CPUs on this machine's loopback."""
    given = {"RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0")}
    if address:
        _require_listener(address)
        with variables(given), _connected(address=address):
            yield RayCluster()
        return
    # Its token stays in the environment of its processes, instead of a file in the home directory.
    given |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with OwnedFolder("ray", Path("/tmp")) as folder, variables(given):  # its sockets need short names
        own = {"num_cpus": processors, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        with _connected(address=_LOCAL, _node_ip_address=_LOOPBACK, _temp_dir=str(folder), **own):
            yield RayCluster()


@contextmanager
def _connected(**given: Any) -> Iterator[None]:
    import ray  # it reads the variables

    if ray.is_initialized():
        raise SpecError("⟨on=ray⟩", "this process has joined a Ray cluster already", "call ray.shutdown() first")
    try:
        with _silent():
            try:
                init = partial(ray.init, **given, log_to_driver=False, logging_level="CRITICAL")  # errors are raised
                with _stoppable():
                    # What Ray starts ends with the thread that has started it: this one.
                    init() if given["address"] == _LOCAL else answer(init, _JOIN_SECONDS)
            except Exception as error:  # none there, other versions, a wrong token, too slow: Ray has a type for few
                raise _not_joined(given["address"], error) from None
            yield
    finally:
        if not within(END_SECONDS, ray.shutdown):
            atexit.unregister(ray.shutdown)  # it would wait for the lost cluster again


def _require_listener(address: str) -> None:
    """Fails early, where Ray would try for a minute or more; only for host:port, not for other forms (auto, ray://...)."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise _not_joined(address, error) from None


def _not_joined(address: str, error: Exception) -> SpecError:
    why = error.problem if isinstance(error, SpecError) else " ".join(str(error).split()) or type(error).__name__
    if address == _LOCAL:
        problem = f"no cluster can be started on this machine: {why}"
        return SpecError("⟨on=ray⟩", problem, "try again, or join one that is there (⟨on=ray,address=...⟩)")
    problem = f"no cluster can be joined at {address}: {why}"
    return SpecError("⟨on=ray⟩", problem, "`ray status --address ...` must work here")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Lets signals end this process at once while Ray starts, as they would without Ray.

    Ray waits for up to a minute in a call that no Python handler can interrupt, after installing such a handler; here
    it is installed afterwards. What Ray has started on this machine ends with this process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    utils, name = importlib.import_module("ray._private.utils"), "set_sigterm_handler"
    theirs: list[Any] = []
    install, before = getattr(utils, name), {}
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # not a caller's own
            before[number] = signal.signal(number, signal.SIG_DFL)
    setattr(utils, name, theirs.append)
    try:
        yield
    finally:
        setattr(utils, name, install)
        for number, handler in before.items():
            signal.signal(number, handler)
        if theirs and signal.SIGTERM in before:
            install(theirs[-1])


@contextmanager
def variables(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps Ray from printing its daemons' reports to standard output, which may have to be JSON; no option does."""
    worker = importlib.import_module("ray._private.worker")
    before = getattr(worker, _PRINTS, None)
    setattr(worker, _PRINTS, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(worker, _PRINTS, before)


@dataclass(frozen=True)
class Bundle:
    index: int
    node: RayNode
    ranks: range


@dataclass(frozen=True)
class PlacedGang:
    """The placement group of one attempt; `close` ends all that runs in it."""

    group: Any
    bundles: Sequence[Bundle]
    device: str

    def actor(self, bundle: Bundle, module: str, environment: dict[str, str]) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        count = len(bundle.ranks)
        there = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle.index)
        options = {"num_cpus": count, "scheduling_strategy": there, "max_restarts": 0}
        if self.device == "GPU":
            options["num_gpus"] = count
        return ray.remote(concurrency_groups=GROUPS)(AgentActor).options(**options).remote(module, environment)

    def close(self) -> None:
        within(END_SECONDS, lambda: _remove(self.group))


@dataclass(frozen=True)
class RayCluster:
    def nodes(self, device: str) -> list[RayNode]:
        """The living nodes that have such devices."""
        import ray

        alive = [
            RayNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get(device, 0)))
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted((node for node in alive if node.room), key=lambda node: (node.address, node.number))

    def nodes_for(self, job: Job) -> list[RayNode]:
        return self.nodes(_RESOURCES[job.run_device])

    def actor_on(self, node: RayNode, module: str, environment: dict[str, str]) -> Any:
        """Runs a module of ours on a node, outside any gang and without claiming resources."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.number, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": there, "max_restarts": 0}
        return ray.remote(concurrency_groups=GROUPS)(AgentActor).options(**options).remote(module, environment)

    def free(self, job: Job) -> float:
        import ray

        return float(ray.available_resources().get(_RESOURCES[job.run_device], 0.0))

    def placed(self, job: Job, seconds: float, stopped: Callable[[], bool] = lambda: False) -> PlacedGang | None:
        """Waits for a place for all ranks; None if ``stopped`` before. Raises DoesNotFit after ``seconds``.

        The size of bundles is chosen anew while waiting: nodes may join, or smaller ones than planned become free.
        """
        device, deadline = _RESOURCES[job.run_device], time.monotonic() + seconds
        world, sizes = job.strategy.world, bundle_sizes(job.strategy, job.cluster.node_devices)
        group, size = None, 0
        try:
            while True:
                best = bundle_size(sizes, world, [node.room for node in self.nodes(device)]) or sizes[0]
                if group is None or best != size:
                    _remove(group)
                    size, group = best, _group(device, best, world // best)
                if group.wait(timeout_seconds=_LOOK_SECONDS) and (bundles := self._bundles(group, size, job)):
                    given, group = group, None
                    return PlacedGang(given, bundles, device)
                if stopped():
                    return None
                if time.monotonic() >= deadline:
                    raise self._does_not_fit(job, sizes, seconds)
        finally:
            _remove(group)

    def _bundles(self, group: Any, size: int, job: Job) -> list[Bundle]:
        """The bundles of a group in the order of their ranks; none if a node was lost since."""
        from ray.util.placement_group import placement_group_table

        nodes = {node.number: node for node in self.nodes_for(job)}
        places = placement_group_table(group)["bundles_to_node_id"]
        where = [places[index] for index in sorted(places)]
        if not set(where) <= set(nodes):
            return []
        addresses = {name: node.address for name, node in nodes.items()}
        ranks = ranks_of_bundles(where, size, addresses, wanted_order(job, [addresses[name] for name in where]))
        bundles = [Bundle(index, nodes[where[index]], ranks[index]) for index in range(len(where))]
        return sorted(bundles, key=lambda bundle: bundle.ranks.start)

    def _does_not_fit(self, job: Job, sizes: Sequence[int], seconds: float) -> DoesNotFit:
        device = _RESOURCES[job.run_device]
        words = missing_words(job.strategy.world, device, sizes, self.nodes(device), self.free(job))
        remedy = "wait longer (⟨wait_for_resources⟩), add nodes, or plan for fewer devices"
        return DoesNotFit("⟨on=ray⟩", f"no place for the ranks within {seconds:g} s: {words}", remedy)


def _group(device: str, size: int, count: int) -> Any:
    from ray.util.placement_group import placement_group

    each = {"CPU": size} if device == "CPU" else {"CPU": size, device: size}
    return placement_group([each] * count, strategy="SPREAD")


def _remove(group: Any) -> None:
    if group is not None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)
