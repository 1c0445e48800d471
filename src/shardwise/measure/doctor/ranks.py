"""`doctor` on ranks that a launcher has started: the first rank of every node examines it, then nodes are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from shardwise.engine.world import joined
from shardwise.interop.fabric.switches import of_hosts
from shardwise.measure.calibrate.ranks import Rank, StartedRanks, hosts_of, node_names, started_ranks
from shardwise.measure.collectives.pairs import measured_matrix, wiring_of
from shardwise.measure.doctor.facts import NodeFacts, compared, gpu_findings, node_facts
from shardwise.measure.doctor.findings import Checked, Examination
from shardwise.measure.doctor.host import examine
from shardwise.measure.doctor.pairs import (
    clock_offsets,
    clocks_finding,
    closed_ports,
    pairs_findings,
    ports_finding,
    seen_files,
    shared_finding,
)
from shardwise.measure.doctor.software import all_reduce_finding, timed_all_reduce
from shardwise.run.environment.reader import Started
from shardwise.spec.files import dump_yaml

_SECONDS = 120.0


def examine_ranks(request: Examination, here: Started) -> Iterator[Checked]:
    """Every rank calls this and gets all findings."""
    with started_ranks(here) as ranks:
        hosts = node_names(hosts_of(ranks), here.ranks_per_host)
        own = replace(request, processes=here.ranks_per_host, host_count=here.hosts)
        yield from _of_each(ranks.run(_examine_host, own), hosts, here.ranks_per_host)
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
    facts = {host: node for host, node in zip(hosts, ranks.run(_facts)[::each], strict=True) if node is not None}
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


def _facts(rank: Rank) -> NodeFacts | None:
    return node_facts() if rank.first_of_host else None


def _examine_host(rank: Rank, request: Examination) -> list[Checked]:
    return list(examine(request, beside_others=True)) if rank.first_of_host else []


def _sum_over_all(rank: Rank, device: str) -> tuple[bool, float]:
    with joined(rank.number, rank.world, rank.store, device=device, seconds=_SECONDS):
        return timed_all_reduce(rank.number, rank.world, device)
