"""`doctor` on ranks that a launcher has started: every host is examined by its first rank, then all of them sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.engine.world import joined
from shardwise.measure.calibrate.ranks import Rank, hosts_of, started_ranks
from shardwise.measure.doctor.host import Checked, Examination, examine
from shardwise.measure.doctor.software import all_reduce_finding, timed_all_reduce
from shardwise.training.environment.reader import Started

_SECONDS = 120.0


def examine_ranks(request: Examination, here: Started) -> Iterator[Checked]:
    """Every rank calls this and gets all findings; those of one of several hosts are headed by its name."""
    with started_ranks(here) as ranks:
        hosts = hosts_of(ranks)
        own = replace(request, processes=here.ranks_per_host, host_count=here.hosts)
        for rank, findings in enumerate(ranks.run(_examine_host, own)):
            for one in findings:
                yield one if here.hosts == 1 else replace(one, check=f"{hosts[rank]}: {one.check}")
        right, seconds = ranks.run(_sum_over_all, request.device)[0]
        yield all_reduce_finding(here.world, request.device, right, seconds)


def _examine_host(rank: Rank, request: Examination) -> list[Checked]:
    return list(examine(request, all_reduce=False)) if rank.first_of_host else []


def _sum_over_all(rank: Rank, device: str) -> tuple[bool, float]:
    with joined(rank.number, rank.world, rank.store, device=device, seconds=_SECONDS):
        return timed_all_reduce(rank.number, rank.world, device)
