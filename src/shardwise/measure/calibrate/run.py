"""The whole calibration: device, network levels, overlap, storage; each measured, fitted, and put into a cluster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from shardwise.launch.emulate.network import EmulatedPool, Network
from shardwise.launch.pool import Pool
from shardwise.launch.torchrun import Started
from shardwise.measure.calibrate.device_fit import Residual, fitted_device
from shardwise.measure.calibrate.device_samples import measure_device
from shardwise.measure.calibrate.far_off import FarOff, far_off_devices, far_off_links
from shardwise.measure.calibrate.link_fit import Wire, fitted_level
from shardwise.measure.calibrate.link_samples import LinkSample, measure_links, slowest
from shardwise.measure.calibrate.overlap import measure_overlap
from shardwise.measure.calibrate.ranks import PoolRanks, Ranks, hosts_of, started_ranks
from shardwise.measure.calibrate.samples import DeviceSamples
from shardwise.measure.calibrate.storage import measure_disk, with_storage
from shardwise.spec.emulation import Emulation
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.network import Link
from shardwise.spec.units import readable_seconds

PARTS = ("device", "links", "storage")
_PRELOAD = ("torch", "shardwise.engine.engine", "shardwise.engine.collectives")
_DELAYS = (1.0, 3.0)  # times an emulated wire's own: two delays separate the wire's part of a step from the software's


@dataclass(frozen=True)
class Request:
    """``cluster`` is what is measured, as far as it is known; every device of it is a process.

    All of them are processes of this machine, or the ranks of the world that ``started`` is one of: then every rank
    makes the same request, and gets the same answer.
    """

    cluster: Cluster
    device: str  # cpu or cuda
    threads: int
    folder: Path  # whose disk is measured
    emulation: Emulation | None = None
    parts: tuple[str, ...] = PARTS
    started: Started | None = None


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    residuals: tuple[Residual, ...]
    far_off: tuple[FarOff, ...] = ()


def calibrate(asked: Request, report: Callable[[str], None]) -> Calibration:
    """Calls ``report`` with what is measured next."""
    cluster, residuals, slow = asked.cluster, list[Residual](), list[FarOff]()
    with _ranks(asked) as (ranks, network):
        hosts = hosts_of(ranks)
        if "device" in asked.parts:
            report(f"device: matmuls, attention, memory and steps on {cluster.devices} at once")
            samples = ranks.run(measure_device, asked.device, asked.threads)
            device, found = _device(asked, samples)
            cluster, residuals = replace(cluster, device=device), [*residuals, *found]
            slow += far_off_devices(samples, hosts)
            if samples[0].host_copies:
                cluster = replace(cluster, host_link=_host_link(samples))
        if "links" in asked.parts and cluster.devices > 1:
            links = _measured_links(asked, ranks, network, report)
            cluster, found = _with_links(asked, cluster, links)
            residuals += found
            slow += [one for index, level in enumerate(cluster.levels) if level.width > 1
                     for one in far_off_links(links[0].of_ranks, index, level.name, hosts)]  # fmt: skip
            report("overlap: matmuls during an all-reduce")
            cluster = _with_overlap(cluster, max(ranks.run(measure_overlap, asked.device, asked.threads)))
        if "storage" in asked.parts and cluster.storage:
            report(f"storage: the disk of {asked.folder}")
            cluster = with_storage(cluster, ranks.run(measure_disk, asked.folder), hosts)
    source = _provenance(asked, hosts, residuals, slow)
    return Calibration(replace(cluster, name=_name(asked), source=source), tuple(residuals), tuple(slow))


@contextmanager
def _ranks(asked: Request) -> Iterator[tuple[Ranks, Network | None]]:
    if asked.started is not None:
        with started_ranks(asked.started) as ranks:
            yield ranks, None
    elif asked.emulation is not None:
        with EmulatedPool(asked.emulation, _PRELOAD) as pool:
            yield PoolRanks(pool, asked.cluster.devices), pool.network
    else:
        with Pool(_PRELOAD) as pool:
            yield PoolRanks(pool, asked.cluster.devices), None


def _device(asked: Request, samples: list[DeviceSamples]) -> tuple[Device, list[Residual]]:
    known = asked.device == "cuda"
    device, residuals = fitted_device(asked.cluster.device, samples, known_peak=known)
    source = f"measured: {samples[0].device_name}, {samples[0].threads} threads, PyTorch {torch.__version__}"
    device = replace(device, efficiency=replace(device.efficiency, source=source))
    return (device if known else replace(device, name="calibrated-cpu", source=source)), residuals


def _host_link(samples: list[DeviceSamples]) -> Link:
    rate = statistics.median(max(copy.bytes / copy.seconds for copy in one.host_copies) for one in samples)
    return Link(bandwidth=rate, latency=1e-5, name="host link", source="measured: pinned memory to a device")


@dataclass(frozen=True)
class _Links:
    """What every rank measured of a wire; its rate and delay if known (else 0)."""

    of_ranks: Sequence[Sequence[LinkSample]]
    rate: float = 0.0
    delay: float = 0.0


def _measured_links(
    asked: Request, ranks: Ranks, network: Network | None, report: Callable[[str], None]
) -> list[_Links]:
    widths = tuple(level.width for level in asked.cluster.levels)

    def measured() -> Sequence[Sequence[LinkSample]]:
        return ranks.run(measure_links, widths, asked.device, asked.threads)

    if network is None:
        report("links: collectives of every level")
        return [_Links(measured())]
    found, wire = [], network.emulation
    for times in _DELAYS if wire.delay else (1.0,):
        delay = times * wire.delay
        network.reshape(delay=delay)
        report(f"links: collectives of every level, {readable_seconds(delay)} one way")
        found.append(_Links(measured(), wire.rate, delay))
    return found


def _with_links(asked: Request, cluster: Cluster, links: Sequence[_Links]) -> tuple[Cluster, list[Residual]]:
    samples = [sample for one in links for sample in slowest(one.of_ranks, rate=one.rate, delay=one.delay)]
    widths, emulation = tuple(level.width for level in cluster.levels), asked.emulation
    residuals: list[Residual] = []
    for index, level in enumerate(cluster.levels):
        if level.width > 1:
            outermost = index == len(cluster.levels) - 1
            wire = Wire(emulation.rate, emulation.delay) if emulation is not None and outermost else None
            fitted, found = fitted_level(level, index, widths, samples, wire)
            cluster, residuals = cluster.with_level(index, fitted), [*residuals, *found]
    return cluster, residuals


def _with_overlap(cluster: Cluster, taken: float) -> Cluster:
    device = cluster.device
    return replace(cluster, device=replace(device, units_taken=replace(device.units_taken, collectives=taken)))


def _name(asked: Request) -> str:
    return f"calibrated-{asked.cluster.name.removeprefix('emulated-').removeprefix('calibrated-')}"


def _provenance(asked: Request, hosts: Sequence[str], residuals: Sequence[Residual], slow: Sequence[FarOff]) -> str:
    where = f"{asked.cluster.devices} {asked.device} devices of one machine"
    if asked.started is not None and asked.started.hosts > 1:
        named = ", ".join(dict.fromkeys(hosts))
        where = f"{asked.cluster.devices} {asked.device} devices of {asked.started.hosts} hosts ({named})"
    if asked.emulation is not None:
        where += f", emulated as {asked.emulation}"
    errors = "; ".join(f"{one.what}: median {one.median_error:.0%}, worst {one.worst_error:.0%}" for one in residuals)
    parts = [
        f"shardwise calibrate, {date.today().isoformat()}, PyTorch {torch.__version__}, {where}",
        "Of devices the middle one, of collectives and disks the slowest",
        *([f"Errors: {errors}"] if errors else ()),
        *(f"Slow: {one}" for one in slow),
    ]
    return "".join(f"{part}. " for part in parts).strip()
