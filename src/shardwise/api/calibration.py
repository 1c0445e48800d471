"""`calibrate`: this machine as a cluster to plan with; the stages of a profiled run rebalanced."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.api.quantities import path_text, require_writable, texts, whole_number, write_text
from shardwise.api.results import Figure, Result, Rows
from shardwise.launch.pool import told_in_one_line
from shardwise.report.console import picked
from shardwise.report.measured import calibration_page, recut_page
from shardwise.report.page import Page
from shardwise.run.environment import Started, started
from shardwise.spec.clusters import cluster_from, cpu_hosts
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import dump_yaml
from shardwise.spec.hardware import Cluster
from shardwise.spec.installation import require_packages
from shardwise.spec.job import Job

if TYPE_CHECKING:
    from shardwise.measure.calibrate.run import Calibration
    from shardwise.measure.recut import Recut

RECUT, CLUSTER = "recut.yaml", "cluster.yaml"


@dataclass(frozen=True)
class CalibrationResult(Result):
    """The measured cluster."""

    verb = "calibrate"
    found: Calibration
    before: Cluster
    """What was known of it before."""
    path: Path
    """The cluster file."""
    is_written: bool = True
    """By this process: under a launcher only rank 0 writes."""

    cluster = Figure[Cluster]("found.cluster", "To plan with: ``plan(cluster=result.cluster, ...)``.")

    @cached_property
    def page(self) -> Page:
        return calibration_page(self.found, self.before, self.path)

    def _data(self) -> dict[str, Any]:
        found = {**picked(self, "cluster"), **picked(self.found, "residuals", "far_off")}
        return {**found, "written": str(self.path)}


@dataclass(frozen=True)
class RecutResult(Result):
    """A profiled run's pipeline, rebalanced."""

    verb = "calibrate"
    found: Recut
    path: Path
    """The file with the new job."""

    job = Figure[Job]("found.job")
    predicted_seconds = Figure[float]("found.expected_seconds", "A step with the new stages, by the measured times.")
    measured_seconds = Figure[float]("found.step_seconds")

    @cached_property
    def page(self) -> Page:
        return recut_page(self.found, self.path)

    def _data(self) -> dict[str, Any]:
        cut = self.found
        return {
            "layers_before": cut.layers[0],
            "layers_after": cut.layers[1],
            **picked(cut, order_before="old.strategy.order", order_after="job.strategy.order"),
            **picked(cut, slowness_of_ranks="slowness"),
            **picked(cut, "step_seconds", "expected_seconds", "gain"),
            "written": str(self.path),
        }

    def tables(self) -> Mapping[str, Rows]:
        stages = enumerate(zip(*self.found.layers))
        return {"layers": [{"stage": stage, "before": old, "after": new} for stage, (old, new) in stages]}


def calibrate(
    *,
    out: str | PathLike[str] = CLUSTER,
    cluster: str | None = None,
    processes: int | str | None = None,
    emulate: str | None = None,
    run_device: Literal["auto", "cpu", "cuda"] = "auto",
    only: str | Sequence[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationResult:
    """Measures this machine, or the hosts that a launcher started this on, and writes a cluster file to plan with.

    ``only`` restricts it to some of device, host, links and storage. ``on_progress`` is called with what is measured
    next.
    """
    require_packages("calibrate", "torch")
    here = started()
    for flag, value in (("⟨processes⟩", processes), ("⟨emulate⟩", emulate)):
        if here is not None and value is not None:
            remedy = f"leave it out: {here.launcher} says how many there are"
            raise SpecError(flag, f"cannot be combined with {here.launcher}", remedy)
    from shardwise.launch.emulate.network import require_emulation
    from shardwise.measure.calibrate import run as measured

    path, writes = Path(path_text(out, "⟨out⟩")), here is None or here.rank == 0
    if writes:
        require_writable(path, "⟨out⟩")
    emulation = None if emulate is None else Emulation.parse(emulate, "⟨emulate⟩")
    if emulation is not None:
        require_emulation()
    kind = _device(run_device, emulated=emulation is not None)
    known = _cluster(cluster, processes, kind, emulation) if here is None else started_cluster(cluster, kind, here)
    threads = max(1, (os.cpu_count() or 1) // (known.devices if here is None else here.ranks_per_host))
    folder = path.resolve().parent
    request = measured.CalibrationRequest(known, kind, threads, folder, emulation, _parts(only), here)
    with told_in_one_line():
        calibration = measured.calibrate(request, on_progress or (lambda text: None))
    if writes:
        write_text(path, dump_yaml(_rounded(calibration.cluster.to_dict())), "⟨out⟩")
    return CalibrationResult(calibration, known, path, writes)


def recut(run: str | PathLike[str], *, out: str | PathLike[str] | None = None) -> RecutResult:
    """The job of a profiled run with its stages rebalanced by the measured times of stages, layers and ranks."""
    require_packages("calibrate", "torch")
    from shardwise.measure import recut as measured
    from shardwise.measure.compare.comparison import profiled_run

    if (here := started()) is not None:
        raise SpecError("⟨from⟩", "runs in one process", f"run it without {here.launcher}")
    profiled = profiled_run(path_text(run, "run"))
    result = measured.recut(profiled.job, profiled.measured)
    path = profiled.folder.path / RECUT if out is None else Path(path_text(out, "⟨out⟩"))
    write_text(path, result.new_run().to_yaml(), "⟨out⟩")
    return RecutResult(result, path)


def _device(asked: str, *, emulated: bool) -> str:
    from shardwise.measure.doctor.software import visible_devices

    if asked not in ("auto", "cpu", "cuda"):
        raise SpecError("⟨run_device⟩", f"{shown(asked)} is not a choice", "use auto, cpu or cuda")
    if asked == "cuda" and not visible_devices():
        raise SpecError("⟨run_device⟩", "PyTorch finds no GPU here", "use ⟨run_device=cpu⟩")
    if asked == "auto":
        return "cuda" if visible_devices() and not emulated else "cpu"
    return asked


def _cluster(name: str | None, processes: int | str | None, device: str, emulation: Emulation | None) -> Cluster:
    """The cluster as known before it is measured, with the devices that are visible or asked for."""
    base = named_cluster(name or _preset_here(device))
    if emulation is not None:
        return cluster_of(emulation, base)
    if device == "cuda":
        from shardwise.measure.doctor.software import visible_devices

        return base.with_devices(visible_devices())
    count = (os.cpu_count() or 1) if processes is None else whole_number(processes, "⟨processes⟩")
    return base.with_devices(count) if name is not None else cpu_hosts(1, count)


def started_cluster(name: str | None, device: str, here: Started) -> Cluster:
    """The named cluster, which must match the ranks that were started; for CPUs no name is needed."""
    if name is None and device == "cpu":
        return cpu_hosts(here.hosts, here.ranks_per_host)
    name = name or f"{_preset_here(device)}:{here.hosts}"
    if here.hosts == 1:  # part of a node is enough
        return named_cluster(name).with_devices(here.world)
    cluster = cluster_of_ranks(name, here.world)
    if cluster.node_devices != here.ranks_per_host:
        nodes = f"a node of {cluster.name} has {cluster.node_devices} devices"
        remedy = "start one rank per device, or give a file with devices_per_node"
        raise SpecError("⟨cluster⟩", f"{nodes}, a host here {here.ranks_per_host} ranks", remedy)
    return cluster


def _preset_here(device: str) -> str:
    """The preset for this machine's devices; raises SpecError for GPUs that no preset has."""
    if device == "cpu":
        return "laptop:1"
    from shardwise.measure.step import cluster_name_here

    try:
        return cluster_name_here(device)
    except SpecError as error:
        remedy = "name what these GPUs are, such as dgx-h200:1 (`shardwise list`)"
        raise SpecError("⟨cluster⟩", error.problem, remedy) from None


def _parts(only: str | Sequence[str] | None) -> tuple[str, ...]:
    from shardwise.measure.calibrate.run import PARTS

    if only is None:
        return PARTS
    chosen = tuple(part.strip() for text in texts(only, "⟨only⟩") for part in text.split(","))
    for part in chosen:
        if part not in PARTS:
            raise SpecError("⟨only⟩", f"{part!r} is not measured", "choose from " + ", ".join(PARTS))
    return chosen


def _rounded(data: Any) -> Any:
    """Measured numbers rounded to four significant digits."""
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.4g}") if isinstance(data, float) else data


def named_cluster(name: str) -> Cluster:
    try:
        return cluster_from(name)
    except SpecError as error:
        raise error.under("⟨cluster⟩") from None


def cluster_of_ranks(name: str, ranks: int) -> Cluster:
    """The named cluster; raises SpecError unless it has one device per rank."""
    cluster = named_cluster(name)
    if cluster.devices == ranks:
        return cluster
    nodes, rest = divmod(ranks, cluster.levels[0].width)
    remedy = (
        f"start a multiple of {cluster.levels[0].width}" if rest else f"name it like {name.partition(':')[0]}:{nodes}"
    )
    raise SpecError("⟨cluster⟩", f"{cluster.name} has {cluster.devices} devices, there are {ranks} ranks", remedy)
