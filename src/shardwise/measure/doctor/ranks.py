"""`doctor` on ranks that a launcher has started: the first rank of every node examines it, then nodes are compared."""

from __future__ import annotations

import os
import secrets
import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.engine.mesh import process_group
from shardwise.interop.fabric import of_hosts
from shardwise.layout.groups import node_of
from shardwise.layout.network import joining_level, rate_for_each
from shardwise.measure.calibrate.ranks import Rank, StartedRanks, StoreBarrier, hosts_of, node_names, started_ranks
from shardwise.measure.collectives.pairs import LATE, SLOW, Pair, PairFigures, measured_matrix, usual, wiring_of
from shardwise.measure.doctor.findings import Checked, Examination, Status
from shardwise.measure.doctor.host import examine, skew_finding
from shardwise.measure.doctor.software import (
    all_reduce_finding,
    compared,
    file_system_of,
    gpu_findings,
    node_facts,
    timed_all_reduce,
)
from shardwise.run.environment import Started, address_towards
from shardwise.spec.files import dump_yaml
from shardwise.spec.hardware import Cluster
from shardwise.spec.units import readable_rate, readable_seconds

# -- ports ---------------------------------------------------------------------------------------------

LISTENING, CONNECT_SECONDS, _AT_ONCE = 3, 5.0, 16  # gloo and NCCL take ports that the system gives them


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(self.request.recv(1))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


def closed_ports(rank: Rank, address: str | None) -> list[tuple[int, str]]:
    """The nodes whose ports the first rank of this node cannot reach, and why; empty on other ranks.

    ``address`` is rank 0's: towards it every node finds out its own address.
    """
    barrier = StoreBarrier(rank.store, rank.world // rank.ranks_per_host)
    if not rank.first_of_host or address is None:
        return []
    own = node_of(rank.number, rank.ranks_per_host)
    with _listening() as ports:
        rank.store.set(f"ports-{own}", " ".join([address_towards(address), *map(str, ports)]))
        nodes = [node for node in range(rank.world // rank.ranks_per_host) if node != own]
        with ThreadPoolExecutor(_AT_ONCE) as workers:
            reasons = list(workers.map(lambda node: (node, _why_closed(rank, node, address)), nodes))
        barrier.wait()  # until the others have tried this node
    return [(node, why) for node, why in reasons if why]


@contextmanager
def _listening() -> Iterator[list[int]]:
    servers = [_Server(("", 0), _Echo) for _ in range(LISTENING)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield [server.server_address[1] for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _why_closed(rank: Rank, node: int, first_address: str) -> str:
    host, *ports = rank.store.get(f"ports-{node}").decode().split()
    host = first_address if host.startswith("127.") else host
    for port in ports:
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
                connection.sendall(b"?")
                if connection.recv(1) != b"?":
                    return f"{host}:{port} does not answer"
        except OSError as error:
            return f"{host}:{port}: {error.strerror or error}"
    return ""


def ports_finding(closed: Sequence[Sequence[tuple[int, str]]], hosts: Sequence[str]) -> Checked:
    """``closed`` is by node; names the node that most of the failed pairs have in common."""
    seen = [(tried, node, why) for tried, unreached in enumerate(closed) for node, why in unreached]
    if not seen:
        figure = f"every one of {len(hosts)} hosts reaches {LISTENING} ports of every other"
        return Checked("open ports", "pass", figure)
    counts = {node: [pair for pair in seen if node in pair[:2]] for node in range(len(hosts))}
    worst = max(counts, key=lambda node: len(counts[node]))
    tried, node, why = seen[0]
    figure = f"{hosts[tried]} cannot reach {hosts[node]} ({why})"
    if len(seen) > 1:
        figure += f"; {len(counts[worst])} of {len(seen)} such pairs are with {hosts[worst]}"
    return Checked("open ports", "fail", figure, "open the ports 1024 to 65535 between the hosts")


# -- clocks --------------------------------------------------------------------------------------------

_READINGS = 8


def clock_offsets(rank: Rank) -> list[float]:
    """How far each node's clock is ahead of the first node's; only rank 0 knows.

    Measured like NTP (RFC 5905, section 8), by the quickest of several exchanges, which is the most exact.
    """
    nodes, offsets = rank.world // rank.ranks_per_host, [0.0]
    with process_group(rank.number, rank.world, rank.store):
        for node in range(1, nodes):
            other = node * rank.ranks_per_host
            if rank.number == 0:
                offsets.append(min(_asked(other) for _ in range(_READINGS))[1])
            elif rank.number == other:
                for _ in range(_READINGS):
                    dist.recv(torch.zeros(1, dtype=torch.float64), 0)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    return offsets


def _asked(other: int) -> tuple[float, float]:
    """The seconds of one exchange, and the offset that it shows."""
    theirs = torch.zeros(1, dtype=torch.float64)
    before = time.time()
    dist.send(torch.zeros(1, dtype=torch.float64), other)
    dist.recv(theirs, other)
    after = time.time()
    return after - before, float(theirs) - (before + after) / 2


def clocks_finding(offsets: Sequence[float], hosts: Sequence[str]) -> Checked:
    """Compares with the median of all: the first node may itself be the odd one."""
    middle = statistics.median(offsets)
    node = max(range(len(hosts)), key=lambda other: abs(offsets[other] - middle))
    seconds = abs(offsets[node] - middle)
    return skew_finding("clocks", f"the others' ({hosts[node]} is farthest)", seconds)


# -- bandwidth and latency of pairs, beside the plan -------------------------------------------------

VERY_SLOW = 3.0  # times slower than the others
_LATE_SECONDS = 1e-3  # at least so much later than the others


def planned_pair(cluster: Cluster, pair: Pair) -> PairFigures:
    """What the cluster's description promises each device while all devices of both nodes send."""
    level = joining_level(cluster, *pair)
    return PairFigures(rate_for_each(cluster, level), level.latency_per_step)


def pairs_findings(
    figures: Mapping[Pair, PairFigures], hosts: Sequence[str], cluster: Cluster | None
) -> Iterator[Checked]:
    """Names pairs that are slower than the others, and compares all with the plan."""
    planned = {pair: None if cluster is None else planned_pair(cluster, pair) for pair in figures}
    alike: dict[PairFigures | None, list[Pair]] = {}
    for pair, promised in planned.items():
        alike.setdefault(promised, []).append(pair)
    for promised, pairs in alike.items():
        rates = {pair: figures[pair].bandwidth for pair in pairs}
        yield _bandwidth(rates, hosts, promised)
        yield _latency({pair: figures[pair].latency for pair in pairs}, hosts, promised)


def _bandwidth(rates: Mapping[Pair, float], hosts: Sequence[str], promised: PairFigures | None) -> Checked:
    most = usual(rates, max)
    slow = {pair: rate for pair, rate in rates.items() if rate * SLOW < most}
    against = "" if promised is None else f", planned {readable_rate(promised.bandwidth)}"
    if slow:
        status: Status = "fail" if min(slow.values()) * VERY_SLOW < most else "warn"
        figure = f"{named(slow, rates, hosts, readable_rate)}; others {readable_rate(most)}{against}"
        remedy = "check its cables and cards, leave it out, or let `train` place ranks around it (docs/placement.md)"
        return Checked("bandwidth", status, figure, remedy)
    figure = f"{readable_rate(min(rates.values()))} to {readable_rate(max(rates.values()))} between hosts{against}"
    if promised is not None and most * SLOW < promised.bandwidth:
        return Checked("bandwidth", "warn", figure, "plan with what there is: `shardwise calibrate`")
    return Checked("bandwidth", "pass", figure)


def _latency(seconds: Mapping[Pair, float], hosts: Sequence[str], promised: PairFigures | None) -> Checked:
    most = usual(seconds, min)
    late = {pair: spent for pair, spent in seconds.items() if spent > max(LATE * most, most + _LATE_SECONDS)}
    against = "" if promised is None else f", planned {readable_seconds(promised.latency)}"
    if late:
        figure = f"{named(late, seconds, hosts, readable_seconds)}; others {readable_seconds(most)}{against}"
        return Checked("latency", "warn", figure, "check the switches on its way")
    figure = f"{readable_seconds(min(seconds.values()))} to {readable_seconds(max(seconds.values()))} one way{against}"
    return Checked("latency", "pass", figure)


def named(
    odd: Mapping[Pair, float], every: Mapping[Pair, float], hosts: Sequence[str], say: Callable[[float], str]
) -> str:
    """The host that all odd pairs share, if all of its pairs are odd; otherwise the pairs."""
    for node in range(len(hosts)):
        of_node = [pair for pair in every if node in pair]
        if len(of_node) > 1 and set(of_node) <= set(odd) and all(node in pair for pair in odd):
            return f"{hosts[node]} with every other host {say(statistics.median(odd.values()))}"
    shown = [f"{hosts[a]} with {hosts[b]} {say(value)}" for (a, b), value in list(odd.items())[:4]]
    return ", ".join(shown) + (f" and {len(odd) - 4} more pairs" if len(odd) > 4 else "")


# -- whether all nodes see one folder: each writes a file, and looks for those of the others ---------


SEEN_SECONDS = 10.0  # NFS caches a folder's content for some seconds (nfs(5): acdirmin is 30 s, unless it is read)
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class SeenFiles:
    """Whose files one node sees, on which file system; or why it cannot write there."""

    nodes: frozenset[int]
    file_system: str
    problem: str = ""


def seen_files(rank: Rank, folder: Path) -> SeenFiles | None:
    """What the first rank of every node sees; None on other ranks."""
    if rank.number == 0:
        rank.store.set("token", secrets.token_hex(8))
    if not rank.first_of_host:
        return None
    nodes, token = rank.world // rank.ranks_per_host, rank.store.get("token").decode()
    own, barrier = node_of(rank.number, rank.ranks_per_host), StoreBarrier(rank.store, nodes)
    path, problem = _file(folder, token, own), ""
    try:
        path.write_text(token, encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        barrier.wait()
        seen = _seen(folder, token, nodes)
        barrier.wait()  # nobody removes a file that another looks for
    finally:
        path.unlink(missing_ok=True)
    return SeenFiles(seen, file_system_of(folder) if folder.is_dir() else "missing", problem)


def _file(folder: Path, token: str, node: int) -> Path:
    return folder / f".shardwise-doctor-{token}-{node}"


def _seen(folder: Path, token: str, nodes: int) -> frozenset[int]:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            names = set(os.listdir(folder))  # noqa: PTH208 (reading the folder is what refreshes it)
        except OSError:
            names = set()
        seen = frozenset(node for node in range(nodes) if _file(folder, token, node).name in names)
        if len(seen) == nodes or time.monotonic() > deadline:
            return seen
        time.sleep(_LOOK_SECONDS)


def shared_finding(seen: Sequence[SeenFiles], hosts: Sequence[str], folder: Path, *, is_run: bool) -> Checked:
    """``seen`` is by node; ``is_run``: the folder is a run's, which all nodes must share."""
    bad: Status = "fail" if is_run else "warn"
    cannot = [f"{host} cannot write there ({own.problem})" for host, own in zip(hosts, seen) if own.problem]
    if cannot:
        return Checked("shared folder", "fail", f"{folder}: {'; '.join(cannot)}", "mount it for writing")
    every = frozenset(range(len(hosts)))
    if all(own.nodes == every for own in seen):
        figure = f"{folder} ({seen[0].file_system}): every host sees the files of all {len(hosts)}"
        return Checked("shared folder", "pass", figure)
    remedy = "put it on storage that all hosts share"
    together = max((own.nodes for own in seen), key=len)
    odd = [host for host, own in zip(hosts, seen) if own.nodes != together]
    if len(together) == 1:
        return Checked("shared folder", bad, f"{folder} is another folder on every host", remedy)
    what = f"{', '.join(odd)} {'has' if len(odd) == 1 else 'have'} another {folder} than the {len(together)} others"
    return Checked("shared folder", bad, what, remedy)


# -- all checks --------------------------------------------------------------------------------------

_SECONDS = 120.0


def examine_ranks(request: Examination, here: Started) -> Iterator[Checked]:
    """Every rank calls this and gets all findings."""
    with started_ranks(here) as ranks:
        hosts = node_names(hosts_of(ranks), here.ranks_per_host)
        own = replace(request, processes=here.ranks_per_host, host_count=here.hosts)
        checked = ranks.run(lambda rank: list(examine(own, beside_others=True)) if rank.first_of_host else [])
        yield from _of_each(checked, hosts, here.ranks_per_host)
        if here.hosts > 1:
            yield from _between(ranks, hosts, request, here)
        right, seconds = ranks.run(_sum_over_all, request.device)[0]
        yield all_reduce_finding(here.world, request.device, right, seconds)


def _of_each(of_ranks: Sequence[Sequence[Checked]], hosts: Sequence[str], ranks_per_host: int) -> Iterator[Checked]:
    """Findings of the single nodes: one line for a check that all pass, otherwise a line for each failure."""
    by_check: dict[str, dict[str, Checked]] = {}
    for host, own in zip(hosts, of_ranks[::ranks_per_host], strict=True):
        for finding in own:
            by_check.setdefault(finding.check, {})[host] = finding
    for results in by_check.values():
        first = next(iter(results.values()))
        odd: dict[Checked, list[str]] = {}
        for host, finding in results.items():
            if finding.status != "pass":
                odd.setdefault(finding, []).append(host)
        if len(hosts) == 1:
            yield first
        elif not odd:
            yield replace(first, figure=f"{hosts[0]}: {first.figure}; {len(results)} hosts pass")
        else:
            for finding, named in odd.items():
                who = f"all {len(hosts)} hosts" if len(named) == len(hosts) else ", ".join(named)
                yield replace(finding, figure=f"{who}: {finding.figure}")


def _between(ranks: StartedRanks, hosts: Sequence[str], request: Examination, here: Started) -> Iterator[Checked]:
    each = here.ranks_per_host
    of_ranks = ranks.run(lambda rank: node_facts() if rank.first_of_host else None)
    facts = {host: node for host, node in zip(hosts, of_ranks[::each], strict=True) if node is not None}
    yield from compared(facts)
    yield from gpu_findings(facts, request.tp)
    yield ports_finding(ranks.run(closed_ports, here.address)[::each], hosts)
    yield clocks_finding(ranks.run(clock_offsets)[0], hosts)
    seen = [files for files in ranks.run(seen_files, request.folder) if files is not None]
    yield shared_finding(seen, hosts, request.folder, is_run=request.checkpoint_bytes is not None)
    figures = measured_matrix(ranks, len(hosts), request.device)
    cluster = request.cluster if request.cluster and request.cluster.node_devices == each else None
    yield from pairs_findings(figures, hosts, cluster)
    if request.wiring is not None:
        if here.rank == 0:
            switches = of_hosts(dict(request.switches), hosts)
            wiring = wiring_of(hosts, figures, f"shardwise doctor, {date.today().isoformat()}", switches)
            request.wiring.write_text(dump_yaml(wiring.to_dict()), encoding="utf-8")
        yield Checked("wiring", "pass", f"{request.wiring}: what was measured between {len(hosts)} hosts")


def _sum_over_all(rank: Rank, device: str) -> tuple[bool, float]:
    with process_group(rank.number, rank.world, rank.store, device=device, seconds=_SECONDS):
        return timed_all_reduce(rank.number, rank.world, device)
