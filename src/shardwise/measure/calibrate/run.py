"""The whole calibration: device, host, network, overlap, storage; each measured, fitted, and put into a cluster."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import torch

from shardwise.engine.optim.updates import Update
from shardwise.launch.emulate.network import EmulatedPool, Network
from shardwise.launch.pool import Pool
from shardwise.measure.calibrate.device_samples import DeviceSamples, HostLinkSample, measure_device
from shardwise.measure.calibrate.fit import Residual, Wire, fitted_cpu, fitted_level
from shardwise.measure.calibrate.fit_gpu import fitted_gpu
from shardwise.measure.calibrate.gpu_samples import middle_gpu
from shardwise.measure.calibrate.link_samples import LinkSample, measure_links, measure_overlap, slowest
from shardwise.measure.calibrate.ranks import PoolRanks, Rank, Ranks, StoreBarrier, hosts_of, seconds_of, started_ranks
from shardwise.measure.doctor.host import MOST_BYTES, timed_read, timed_write
from shardwise.run.environment import Started
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import UPDATE_BYTES, Cluster, Device, NodeHost
from shardwise.spec.network import Link
from shardwise.spec.training import Optimization
from shardwise.spec.units import readable_seconds

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
            raise SpecError("⟨out⟩", f"{sample.problem} on {host}", "name a file in a folder that every host has")
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


# -- ranks much slower than others: a median hides them, but every training step waits for them ------

FAR = 1.3  # times the seconds of the others


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes ``times`` as long as the median of the others for ``what``."""

    what: str
    rank: int
    host: str
    times: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} takes {self.times:.1f} times as long as others for {self.what}"


def slow_ranks(what: str, seconds: Mapping[int, Sequence[float]], hosts: Sequence[str]) -> Iterator[SlowRank]:
    """``seconds`` has the same figures for every rank, in the same order; ``hosts`` are by rank."""
    for rank, own in seconds.items():
        others = zip(*(figures for other, figures in seconds.items() if other != rank))
        shares = [spent / statistics.median(same) for spent, same in zip(own, others)]
        if shares and (times := statistics.median(shares)) > FAR:
            yield SlowRank(what, rank, hosts[rank], times)


def slow_devices(samples: Sequence[DeviceSamples], hosts: Sequence[str]) -> Iterator[SlowRank]:
    kinds: dict[str, Callable[[DeviceSamples], list[float]]] = {
        "matmuls": lambda sample: [matmul.seconds for matmul in sample.matmuls],
        "attention": lambda sample: [attention.forward_seconds for attention in sample.attentions],
        "copies in memory": lambda sample: [copy.seconds for copy in sample.copies],
        "steps of small models": lambda sample: [step.passes_seconds for step in sample.steps],
    }
    for what, figures in kinds.items():
        yield from slow_ranks(what, {rank: figures(sample) for rank, sample in enumerate(samples)}, hosts)


def slow_links(
    of_ranks: Sequence[Sequence[LinkSample]], level: int, name: str, hosts: Sequence[str]
) -> Iterator[SlowRank]:
    """Compares the groups of one level while all of them worked: the ranks of a group wait for each other."""
    seconds = {
        rank: [
            sample.seconds
            for sample in samples
            if sample.level == level and sum(map(len, sample.groups)) == len(of_ranks)
        ]
        for rank, samples in enumerate(of_ranks)
    }
    yield from slow_ranks(f"collectives over {name}", seconds, hosts)


# -- the whole calibration ---------------------------------------------------------------------------

PARTS = ("device", "host", "links", "storage")
_PRELOAD = ("torch", "shardwise.engine.engine", "shardwise.engine.collectives")
_DELAYS = (1.0, 3.0)  # times an emulated wire's own: two delays tell the wire's part of a step from the software's


@dataclass(frozen=True)
class CalibrationRequest:
    cluster: Cluster  # as far as it is known; each of its devices is a process
    device: str  # cpu or cuda
    threads: int
    folder: Path  # whose disk is measured
    emulation: Emulation | None = None
    parts: tuple[str, ...] = PARTS
    started: Started | None = None  # if a launcher started the ranks; then all make the same request


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    residuals: tuple[Residual, ...]
    far_off: tuple[SlowRank, ...] = ()


def calibrate(request: CalibrationRequest, report: Callable[[str], None]) -> Calibration:
    """Measures and fits the requested parts; calls ``report`` before each measurement."""
    cluster, residuals, slow = request.cluster, list[Residual](), list[SlowRank]()
    with _ranks(request) as (ranks, network):
        hosts = hosts_of(ranks)
        if "device" in request.parts:
            report(f"device: matmuls, attention, memory and steps on {cluster.devices} at once")
            samples = ranks.run(measure_device, request.device, request.threads, cluster.device)
            device, errors = _device(request, samples)
            cluster, residuals = replace(cluster, device=device), [*residuals, *errors]
            slow += slow_devices(samples, hosts)
            to_hosts = [sample.host_link for sample in samples if sample.host_link is not None]
            if to_hosts:
                cluster = replace(cluster, host_link=_host_link(to_hosts))
        if "host" in request.parts:
            report("host: copies and optimizer updates in its memory")
            cluster = with_host(cluster, ranks.run(measure_host, request.threads), hosts)
        if "links" in request.parts and cluster.devices > 1:
            links = _measured_links(request, ranks, network, report)
            cluster, errors = _with_links(request, cluster, links)
            residuals += errors
            slow += [rank for index, level in enumerate(cluster.levels) if level.width > 1
                     for rank in slow_links(next(iter(links.values())), index, level.name, hosts)]  # fmt: skip
            report("overlap: matmuls during an all-reduce")
            taken = max(ranks.run(measure_overlap, request.device, request.threads))
            units = replace(cluster.device.units_taken, collectives=taken)
            cluster = replace(cluster, device=replace(cluster.device, units_taken=units))
        if "storage" in request.parts and cluster.storage:
            report(f"storage: the disk of {request.folder}")
            cluster = with_storage(cluster, ranks.run(measure_disk, request.folder), hosts)
    name = f"calibrated-{request.cluster.name.removeprefix('emulated-').removeprefix('calibrated-')}"
    source = _provenance(request, hosts, residuals, slow)
    return Calibration(replace(cluster, name=name, source=source), tuple(residuals), tuple(slow))


@contextmanager
def _ranks(request: CalibrationRequest) -> Iterator[tuple[Ranks, Network | None]]:
    if request.started is not None:
        with started_ranks(request.started) as ranks:
            yield ranks, None
    elif request.emulation is not None:
        with EmulatedPool(request.emulation, _PRELOAD) as pool:
            yield PoolRanks(pool, request.cluster.devices), pool.network
    else:
        with Pool(_PRELOAD) as pool:
            yield PoolRanks(pool, request.cluster.devices), None


def _device(request: CalibrationRequest, samples: list[DeviceSamples]) -> tuple[Device, list[Residual]]:
    base, of_gpus = request.cluster.device, [sample.gpu for sample in samples if sample.gpu is not None]
    if of_gpus:
        device, residuals = fitted_gpu(base, middle_gpu(of_gpus), samples[0].memory_bytes)
    else:
        device, residuals = fitted_cpu(base, samples)
    source = f"measured: {samples[0].device_name}, {samples[0].threads} threads, PyTorch {torch.__version__}"
    device = replace(device, efficiency=replace(device.efficiency, source=source))
    return (device if of_gpus else replace(device, name="calibrated-cpu", source=source)), residuals


def _host_link(samples: Sequence[HostLinkSample]) -> Link:
    into, out, both, latency = (statistics.median(each) for each in zip(*map(astuple, samples)))
    return Link(
        bandwidth=into,
        latency=latency,
        outward=out / into,
        duplex=min(1.0, both / into),
        name="host link",
        source="measured: pinned memory and a device",
    )


def _measured_links(
    request: CalibrationRequest, ranks: Ranks, network: Network | None, report: Callable[[str], None]
) -> dict[float, Sequence[Sequence[LinkSample]]]:
    """What every rank measured, by the delay of an emulated wire (0 if unknown); its own delay first."""
    widths = tuple(level.width for level in request.cluster.levels)

    def measured() -> Sequence[Sequence[LinkSample]]:
        return ranks.run(measure_links, widths, request.device, request.threads)

    if network is None:
        report("links: collectives of every level")
        return {0.0: measured()}
    links = {}
    for times in _DELAYS if network.emulation.delay else (1.0,):
        delay = times * network.emulation.delay
        network.reshape(delay=delay)
        report(f"links: collectives of every level, {readable_seconds(delay)} one way")
        links[delay] = measured()
    return links


def _with_links(
    request: CalibrationRequest, cluster: Cluster, links: Mapping[float, Sequence[Sequence[LinkSample]]]
) -> tuple[Cluster, list[Residual]]:
    samples = [sample for delay, of_ranks in links.items() for sample in slowest(of_ranks, delay)]
    widths, emulation = tuple(level.width for level in cluster.levels), request.emulation
    residuals: list[Residual] = []
    for index, level in enumerate(cluster.levels):
        if level.width > 1:
            outermost = index == len(cluster.levels) - 1
            wire = Wire(emulation.rate, emulation.delay) if emulation is not None and outermost else None
            fitted, errors = fitted_level(level, index, widths, samples, wire)
            cluster, residuals = cluster.with_level(index, fitted), [*residuals, *errors]
    return cluster, residuals


def _provenance(
    request: CalibrationRequest, hosts: Sequence[str], residuals: Sequence[Residual], slow: Sequence[SlowRank]
) -> str:
    where = f"{request.cluster.devices} {request.device} devices of one machine"
    if request.started is not None and request.started.hosts > 1:
        named = ", ".join(dict.fromkeys(hosts))
        where = f"{request.cluster.devices} {request.device} devices of {request.started.hosts} hosts ({named})"
    if request.emulation is not None:
        where += f", emulated as {request.emulation}"
    errors = "; ".join(
        f"{residual.what}: median {residual.median_error:.0%}, worst {residual.worst_error:.0%}"
        for residual in residuals
    )
    parts = [
        f"shardwise calibrate, {date.today().isoformat()}, PyTorch {torch.__version__}, {where}",
        "Devices: the median; hosts, collectives and disks: the slowest",
        *([f"Errors: {errors}"] if errors else ()),
        *(f"Slow: {rank}" for rank in slow),
    ]
    return "".join(f"{part}. " for part in parts).strip()
