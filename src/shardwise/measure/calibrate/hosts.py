"""Measures what the devices of a host share (its memory, cores and disk), on all of them at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shardwise.engine.optim.updates import Update
from shardwise.measure.calibrate.ranks import Rank, StoreBarrier, seconds_of
from shardwise.measure.doctor.host import MOST_BYTES, timed_read, timed_write
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import UPDATE_BYTES, Cluster, NodeHost
from shardwise.spec.network import Link
from shardwise.spec.training import Optimization

# -- memory and cores --------------------------------------------------------------------------------

_ELEMENTS = 2**23  # 128 MiB of weights, gradients and moments, which no core's cache holds


@dataclass(frozen=True)
class HostSample:
    """What one rank measured while its neighbours were busy."""

    copied: float  # bytes/s that copies read and write
    updates: float  # parameters/s that its threads update
    core_updates: float  # parameters/s that one thread updates
    cores: int  # that the host lets it use


def measure_host(rank: Rank, threads: int) -> HostSample:
    """Times copies, and AdamW as our engine runs it on the host for offloaded states."""
    cpu, barrier = torch.device("cpu"), StoreBarrier(rank.store, rank.world)
    values, gradients, first, second = (torch.ones(_ELEMENTS) for _ in range(4))
    update = Update("adamw", Optimization(), 1e-3, 0.1, torch.ones(()), None, None)
    step = partial(update, [values], [gradients], {"exp_avg": [first], "exp_avg_sq": [second]})
    torch.set_num_threads(1)
    alone = _ELEMENTS / seconds_of(step, cpu, barrier)
    torch.set_num_threads(threads)
    updates = _ELEMENTS / seconds_of(step, cpu, barrier)
    copied = 2 * values.nbytes / seconds_of(partial(values.copy_, gradients), cpu, barrier)
    return HostSample(copied, updates, alone, len(os.sched_getaffinity(0)))


def with_host(cluster: Cluster, samples: Sequence[HostSample], hosts: Sequence[str]) -> Cluster:
    """The cluster with all hosts as fast as the slowest."""
    of_hosts = [[sample for sample, host in zip(samples, hosts) if host == name] for name in dict.fromkeys(hosts)]
    bandwidth, updates = (
        min(sum(getattr(sample, name) for sample in some) for some in of_hosts) for name in ("copied", "updates")
    )
    host = NodeHost(
        memory_bandwidth=bandwidth,
        cores=min(sample.cores for sample in samples),
        copied=1.0,
        updated=min(1.0, updates * UPDATE_BYTES / bandwidth),
        core_updates=min(sample.core_updates for sample in samples),
        source="measured: copies and AdamW of all ranks at once",
    )
    return replace(cluster, host=host)


# -- disks: the slowest counts -----------------------------------------------------------------------


@dataclass(frozen=True)
class DiskSample:
    """Seconds to write and sync ``size`` bytes, and to read them past the page cache; or a ``problem``."""

    size: int
    write_seconds: float
    read_seconds: float
    problem: str = ""


def measure_disk(rank: Rank, folder: Path) -> DiskSample | None:
    """Measured by the first rank of every host; None on the others."""
    if not rank.first_of_host:
        return None
    path = folder / f".shardwise-calibrate-{rank.number}"  # hosts may share the folder
    try:
        room = min(MOST_BYTES, shutil.disk_usage(folder).free // 10)
        size, write_seconds = timed_write(path, room)
        return DiskSample(size, write_seconds, timed_read(path) or write_seconds)
    except OSError as error:
        return DiskSample(0, 0.0, 0.0, f"{folder} cannot be written ({error.strerror})")
    finally:
        path.unlink(missing_ok=True)


def with_storage(cluster: Cluster, samples: Sequence[DiskSample | None], hosts: Sequence[str]) -> Cluster:
    """The cluster with its first storage as fast as that of the slowest host."""
    on_hosts = [(sample, host) for sample, host in zip(samples, hosts) if sample is not None]
    for sample, host in on_hosts:
        if sample.problem:
            raise SpecError("--out", f"{sample.problem} on {host}", "name a file in a folder that every host has")
    measured = [sample for sample, _ in on_hosts if sample.size]
    if not measured:
        return cluster
    write, read = (
        min(sample.size / getattr(sample, f"{way}_seconds") for sample in measured) for way in ("write", "read")
    )
    first = cluster.storage[0]
    source = "measured: written and synced, and read" + (
        f", the slowest of {len(measured)} hosts" if len(measured) > 1 else ""
    )
    link = Link(bandwidth=read, outward=write / read, latency=first.link.latency, name=first.link.name, source=source)
    return replace(cluster, storage=(replace(first, link=link, count_per_node=1), *cluster.storage[1:]))
