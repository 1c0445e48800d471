"""The whole calibration: device, network levels, overlap, storage; each measured, fitted, and put into a cluster."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from shardwise.launch.emulate.pool import EmulatedPool
from shardwise.launch.pool import Pool
from shardwise.measure.calibrate.device_fit import Residual, fitted_device
from shardwise.measure.calibrate.device_samples import measure_device
from shardwise.measure.calibrate.link_fit import Wire, fitted_level
from shardwise.measure.calibrate.link_samples import LinkSample, measure_links, slowest
from shardwise.measure.calibrate.overlap import measure_overlap
from shardwise.measure.calibrate.samples import DeviceSamples
from shardwise.measure.doctor.disk import MOST_BYTES, timed_read, timed_write
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.network import Link

PARTS = ("device", "links", "storage")
_PRELOAD = ("torch", "shardwise.engine.engine", "shardwise.engine.collectives")
_DELAYS = (1.0, 3.0)  # times an emulated wire's own: with two the wire's part of a step is told from the software's


@dataclass(frozen=True)
class Request:
    """``cluster`` is what is measured, as far as it is known; every device of it is a process here."""

    cluster: Cluster
    device: str  # cpu or cuda
    threads: int
    folder: Path  # whose disk is measured
    emulation: Emulation | None = None
    parts: tuple[str, ...] = PARTS


@dataclass(frozen=True)
class Calibration:
    cluster: Cluster
    residuals: tuple[Residual, ...]


def calibrate(asked: Request, tell: Callable[[str], None]) -> Calibration:
    """``tell`` hears what is measured next."""
    cluster, residuals = asked.cluster, list[Residual]()
    with _pool(asked) as pool:
        if "device" in asked.parts:
            tell(f"device: products, attention, memory and steps on {cluster.devices} at once")
            samples = pool.run(measure_device, cluster.devices, asked.device, asked.threads, timeout_seconds=1800)
            device, found = _device(asked, samples)
            cluster, residuals = replace(cluster, device=device), [*residuals, *found]
            if samples[0].host_copies:
                cluster = replace(cluster, host_link=_host_link(samples))
        if "links" in asked.parts and cluster.devices > 1:
            cluster, found = _links(asked, cluster, pool, tell)
            residuals += found
    if "storage" in asked.parts and cluster.storage:
        tell(f"storage: the disk of {asked.folder}")
        cluster = _with_storage(cluster, asked.folder)
    return Calibration(replace(cluster, name=_name(asked), source=_provenance(asked, residuals)), tuple(residuals))


@contextmanager
def _pool(asked: Request) -> Iterator[Pool]:
    with Pool(_PRELOAD) if asked.emulation is None else EmulatedPool(asked.emulation, _PRELOAD) as pool:
        yield pool


def _device(asked: Request, samples: list[DeviceSamples]) -> tuple[Device, list[Residual]]:
    known = asked.device == "cuda"
    device, residuals = fitted_device(asked.cluster.device, samples, known_peak=known)
    source = f"measured: {samples[0].device_name}, {samples[0].threads} threads, PyTorch {torch.__version__}"
    device = replace(device, efficiency=replace(device.efficiency, source=source))
    return (device if known else replace(device, name="calibrated-cpu", source=source)), residuals


def _host_link(samples: list[DeviceSamples]) -> Link:
    rate = statistics.median(max(copy.bytes / copy.seconds for copy in one.host_copies) for one in samples)
    return Link(bandwidth=rate, latency=1e-5, name="host link", source="measured: pinned memory to a device")


def _links(asked: Request, cluster: Cluster, pool: Pool, tell: Callable[[str], None]) -> tuple[Cluster, list[Residual]]:
    widths = tuple(level.width for level in cluster.levels)
    samples: list[LinkSample] = []
    emulation = asked.emulation
    for times in (1.0,) if emulation is None or not emulation.delay else _DELAYS:
        rate, delay = (0.0, 0.0) if emulation is None else (emulation.rate, times * emulation.delay)
        if emulation is not None:
            assert isinstance(pool, EmulatedPool)
            pool.network.reshape(delay=delay)
        tell("links: collectives of every level" + (f", {delay * 1e3:g} ms one way" if emulation else ""))
        measured = pool.run(
            measure_links, cluster.devices, widths, asked.device, asked.threads, timeout_seconds=1800
        )  # fmt: skip
        samples += slowest(measured, rate=rate, delay=delay)
    residuals: list[Residual] = []
    for index, level in enumerate(cluster.levels):
        if level.width > 1:
            outermost = index == len(cluster.levels) - 1
            wire = Wire(emulation.rate, emulation.delay) if emulation is not None and outermost else None
            fitted, found = fitted_level(level, index, widths, samples, wire)
            cluster, residuals = cluster.with_level(index, fitted), [*residuals, *found]
    tell("overlap: products beside an all-reduce")
    taken = max(pool.run(measure_overlap, cluster.devices, asked.device, asked.threads))
    device = cluster.device
    units = replace(device.units_taken, collectives=taken)
    return replace(cluster, device=replace(device, units_taken=units)), residuals


def _with_storage(cluster: Cluster, folder: Path) -> Cluster:
    """The first of its storages, as fast as the slower of writing and reading."""
    path = folder / ".shardwise-calibrate"
    try:
        room = min(MOST_BYTES, shutil.disk_usage(folder).free // 10)
        size, write_seconds = timed_write(path, room)
        read_seconds = timed_read(path)
    except OSError as error:
        raise SpecError("--folder", f"{folder} cannot be written ({error.strerror})", "name another") from None
    finally:
        path.unlink(missing_ok=True)
    if not size:
        return cluster
    rate = size / max(write_seconds, read_seconds or 0.0)
    first = cluster.storage[0]
    link = Link(bandwidth=rate, latency=first.link.latency, name=first.link.name, source="measured: written and synced")
    return replace(cluster, storage=(replace(first, link=link, count_per_node=1), *cluster.storage[1:]))


def _name(asked: Request) -> str:
    return f"calibrated-{asked.cluster.name.removeprefix('emulated-').removeprefix('calibrated-')}"


def _provenance(asked: Request, residuals: list[Residual]) -> str:
    where = f"{asked.cluster.devices} {asked.device} devices of one machine"
    if asked.emulation is not None:
        where += f", emulated as {asked.emulation}"
    errors = "; ".join(f"{one.what}: median {one.median_error:.0%}, worst {one.worst_error:.0%}" for one in residuals)
    return f"shardwise calibrate, {date.today().isoformat()}, PyTorch {torch.__version__}, {where}. Errors: {errors}."
