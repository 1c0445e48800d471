"""`shardwise calibrate`: measures a machine, and writes the cluster to plan with."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from shardwise.cli.arguments import Parser
from shardwise.cli.inputs import require_torch, whole
from shardwise.cli.measured_cluster import cluster_of_ranks, named_cluster
from shardwise.cli.outputs import require_writable
from shardwise.launch.torchrun import Started, started
from shardwise.spec.clusters import cpu_hosts
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.errors import SpecError
from shardwise.spec.files import dump_yaml
from shardwise.spec.hardware import Cluster

_EXAMPLE = """
shardwise calibrate --processes 2 --out cluster.yaml
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host-0:29400 -m shardwise calibrate --cluster dgx-h100:2
"""
_DOES = """Measures this machine (matmuls, attention, memory, whole steps, collectives of every level, disk), or the
hosts that torchrun has started it on, and writes a cluster file that `plan` reads. --from RUN: the times of stages,
layers and ranks of a profiled run become a job with rebalanced stages, with the expected gain."""
RECUT, CLUSTER = "recut.yaml", "cluster.yaml"


def run(arguments: list[str]) -> int:
    parser = Parser("calibrate", _DOES, _EXAMPLE)
    parser.add_argument("--from", dest="run", metavar="RUN", help="the folder of a run with --profile, or runs/last")
    parser.add_argument("--out", metavar="FILE", help=f"where it goes (default {CLUSTER}; --from: {RECUT} in the run)")
    parser.add_argument("--cluster", metavar="NAME", help="what this hardware is, if known (default laptop)")
    parser.add_argument("--processes", metavar="N", help="CPU processes to run at once (default: one per core)")
    parser.add_argument("--emulate", metavar="LINK", help="measure virtual nodes, such as 2x2,1Gbit,1ms (needs root)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: GPUs if any)")
    parser.add_argument("--only", metavar="PARTS", help="some of device,links,storage; the rest stays as it is")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    require_torch("calibrate")
    here = started()
    if parsed.run is None:
        if here is not None:
            _refuse(parsed, ("processes", "emulate"), "torchrun", "leave it out: torchrun says how many there are")
        return _measure(parsed, here)
    if here is not None:
        raise SpecError("--from", "runs in one process", "run it without torchrun")
    _refuse(parsed, ("cluster", "processes", "emulate", "only"), "--from", "leave one of the two out")
    return _recut(parsed.run, parsed.out, as_json=parsed.json)


def _refuse(parsed: argparse.Namespace, names: tuple[str, ...], beside: str, remedy: str) -> None:
    for name in names:
        if getattr(parsed, name) is not None:
            raise SpecError(f"--{name}", f"cannot be combined with {beside}", remedy)


def _measure(parsed: argparse.Namespace, here: Started | None) -> int:
    from rich.console import Console

    from shardwise.launch.emulate.network import require_emulation
    from shardwise.measure.calibrate.run import Request, calibrate
    from shardwise.report.calibration import calibration_data, print_calibration

    path, writes = Path(parsed.out or CLUSTER), here is None or here.rank == 0
    if writes:
        require_writable(path, "--out")
    emulation = None if parsed.emulate is None else Emulation.parse(parsed.emulate, "--emulate")
    if emulation is not None:
        require_emulation()
    device = _device(parsed.device, emulated=emulation is not None)
    cluster = _cluster(parsed, device, emulation) if here is None else started_cluster(parsed.cluster, device, here)
    threads = max(1, (os.cpu_count() or 1) // (cluster.devices if here is None else here.ranks_per_host))
    request = Request(cluster, device, threads, path.resolve().parent, emulation, _parts(parsed.only), here)
    with Console(stderr=True, quiet=not writes).status("") as status:
        found = calibrate(request, lambda text: status.update(f"Measuring {text}"))
    if not writes:
        return 0
    path.write_text(dump_yaml(_rounded(found.cluster.to_dict())), encoding="utf-8")
    if parsed.json:
        print(json.dumps({**calibration_data(found), "written": str(path)}, indent=2))
    else:
        print_calibration(found, cluster, path)
    return 0


def _device(asked: str, *, emulated: bool) -> str:
    from shardwise.measure.calibrate.device_samples import gpus

    if asked == "cuda" and not gpus():
        raise SpecError("--device", "PyTorch finds no GPU here", "use --device cpu")
    if asked == "auto":
        return "cuda" if gpus() and not emulated else "cpu"
    return asked


def _cluster(parsed: argparse.Namespace, device: str, emulation: Emulation | None) -> Cluster:
    """What is known before anything is measured: as many devices as there are, or as are asked for."""
    base = named_cluster(_require_name(parsed.cluster) if device == "cuda" else parsed.cluster or "laptop:1")
    if emulation is not None:
        return cluster_of(emulation, base)
    if device == "cuda":
        from shardwise.measure.calibrate.device_samples import gpus

        return base.with_devices(gpus())
    count = (os.cpu_count() or 1) if parsed.processes is None else whole(parsed.processes, "--processes")
    return base.with_devices(count) if parsed.cluster is not None else cpu_hosts(1, count)


def started_cluster(name: str | None, device: str, here: Started) -> Cluster:
    """What the hosts are by name, which has to fit the ranks on them; of CPUs a name is not needed."""
    if name is None and device == "cpu":
        return cpu_hosts(here.hosts, here.ranks_per_host)
    name = _require_name(name)
    if here.hosts == 1:  # a part of a node will do
        return named_cluster(name).with_devices(here.world)
    cluster = cluster_of_ranks(name, here.world)
    if cluster.node_devices != here.ranks_per_host:
        nodes = f"a node of {cluster.name} has {cluster.node_devices} devices"
        remedy = "start one rank per device, or give a file with devices_per_node"
        raise SpecError("--cluster", f"{nodes}, a host here {here.ranks_per_host} ranks", remedy)
    return cluster


def _require_name(name: str | None) -> str:
    if name is None:
        raise SpecError("--cluster", "is missing", "name what these GPUs are, such as dgx-h200:1 (`shardwise list`)")
    return name


def _parts(only: str | None) -> tuple[str, ...]:
    from shardwise.measure.calibrate.run import PARTS

    if only is None:
        return PARTS
    chosen = tuple(part.strip() for part in only.split(","))
    for part in chosen:
        if part not in PARTS:
            raise SpecError("--only", f"{part!r} is not measured", "choose from " + ", ".join(PARTS))
    return chosen


def _rounded(data: Any) -> Any:
    """Measured numbers with the digits that mean something."""
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.4g}") if isinstance(data, float) else data


def _recut(run_name: str, out: str | None, *, as_json: bool) -> int:
    from shardwise.measure.compare.run import profiled_run
    from shardwise.measure.recut import recut
    from shardwise.report.recut import print_recut, recut_data

    found = profiled_run(run_name)
    result = recut(found.job, found.measured)
    path = found.folder.path / RECUT if out is None else Path(out)
    try:
        path.write_text(result.new_run().to_yaml(), encoding="utf-8")
    except OSError as error:
        raise SpecError("--out", f"{path} cannot be written ({error.strerror})", "give another name") from None
    if as_json:
        print(json.dumps({**recut_data(result), "written": str(path)}, indent=2))
    else:
        print_recut(result, path)
    return 0
