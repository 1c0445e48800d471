"""How fast the disks are that hosts write to at once, and a cluster with the slowest of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.measure.calibrate.ranks import Rank
from shardwise.measure.doctor.disk import MOST_BYTES, timed_read, timed_write
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import Link


@dataclass(frozen=True)
class DiskSample:
    """``size`` bytes written and synced, and read; the slower of the two took ``seconds``. Or why there are none."""

    size: int
    seconds: float
    problem: str = ""


def measure_disk(rank: Rank, folder: Path) -> DiskSample | None:
    """By the first rank of every host; others have none."""
    if not rank.first_of_host:
        return None
    path = folder / f".shardwise-calibrate-{rank.number}"  # hosts may share the folder
    try:
        room = min(MOST_BYTES, shutil.disk_usage(folder).free // 10)
        size, write_seconds = timed_write(path, room)
        return DiskSample(size, max(write_seconds, timed_read(path) or 0.0))
    except OSError as error:
        return DiskSample(0, 0.0, f"{folder} cannot be written ({error.strerror})")
    finally:
        path.unlink(missing_ok=True)


def with_storage(cluster: Cluster, samples: Sequence[DiskSample | None], hosts: Sequence[str]) -> Cluster:
    """The first of its storages, as fast as the slowest host's."""
    found = [(one, host) for one, host in zip(samples, hosts) if one is not None]
    for one, host in found:
        if one.problem:
            raise SpecError("--out", f"{one.problem} on {host}", "name a file in a folder that every host has")
    rates = [one.size / one.seconds for one, _ in found if one.size]
    if not rates:
        return cluster
    first = cluster.storage[0]
    source = "measured: written and synced" + (f", the slowest of {len(rates)} hosts" if len(rates) > 1 else "")
    link = Link(bandwidth=min(rates), latency=first.link.latency, name=first.link.name, source=source)
    return replace(cluster, storage=(replace(first, link=link, count_per_node=1), *cluster.storage[1:]))
