"""`shardwise calibrate`: what was measured becomes what is planned with."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from shardwise.cli.arguments import Parser
from shardwise.cli.inputs import require_torch, whole
from shardwise.spec.clusters import cluster_from
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.errors import SpecError
from shardwise.spec.files import dump_yaml
from shardwise.spec.hardware import Cluster

_EXAMPLE = """
shardwise calibrate --processes 2 --out cluster.yaml
"""
_DOES = """Measures this machine (products, attention, memory, whole steps, collectives of every level, disk) and writes
a cluster file that `plan` reads. --from RUN: the times of stages, layers and ranks of a profiled run become a job whose
stages are cut again, and what that would gain."""
RECUT, CLUSTER = "recut.yaml", "cluster.yaml"


def run(arguments: list[str]) -> int:
    parser = Parser("calibrate", _DOES, _EXAMPLE)
    parser.add_argument("--from", dest="run", metavar="RUN", help="the folder of a run with --profile, or runs/last")
    parser.add_argument("--out", metavar="FILE", help=f"where it goes (default {CLUSTER}; --from: {RECUT} in the run)")
    parser.add_argument("--cluster", metavar="NAME", help="what is measured, as far as it is known (default laptop)")
    parser.add_argument("--processes", metavar="N", help="CPU processes that work at once (default: the cores)")
    parser.add_argument("--emulate", metavar="LINK", help="measure virtual nodes, such as 2x2,1Gbit,1ms (needs root)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: GPUs if any)")
    parser.add_argument("--only", metavar="PARTS", help="some of device,links,storage; the rest stays as it is")
    parser.add_argument("--json", action="store_true", help="the result for a machine")
    parsed = parser.parse(arguments)
    require_torch("calibrate")
    if parsed.run is None:
        return _measure(parsed)
    for name in ("cluster", "processes", "emulate", "only"):
        if getattr(parsed, name) is not None:
            raise SpecError(f"--{name}", "does not go with --from", "leave one of the two out")
    return _recut(parsed.run, parsed.out, as_json=parsed.json)


def _measure(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from shardwise.launch.emulate.network import require_emulation
    from shardwise.measure.calibrate.run import Request, calibrate
    from shardwise.report.calibration import calibration_data, print_calibration

    path = Path(parsed.out or CLUSTER)
    _require_writable(path)
    emulation = None if parsed.emulate is None else Emulation.parse(parsed.emulate, "--emulate")
    if emulation is not None:
        require_emulation()
    device = _device(parsed.device, emulated=emulation is not None)
    cluster = _cluster(parsed, device, emulation)
    threads = max(1, (os.cpu_count() or 1) // cluster.devices)
    request = Request(cluster, device, threads, path.resolve().parent, emulation, _parts(parsed.only))
    with Console(stderr=True).status("") as status:
        found = calibrate(request, lambda text: status.update(f"Measuring {text}"))
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
    if device == "cuda" and parsed.cluster is None:
        raise SpecError("--cluster", "is missing", "name what these GPUs are, such as dgx-h200:1 (`shardwise list`)")
    base = cluster_from(parsed.cluster or "laptop:1")
    if emulation is not None:
        return cluster_of(emulation, base)
    if device == "cuda":
        from shardwise.measure.calibrate.device_samples import gpus

        return base.with_devices(gpus())
    count = (os.cpu_count() or 1) if parsed.processes is None else whole(parsed.processes, "--processes")
    return base.with_devices(count) if parsed.cluster is not None else cluster_from(f"laptop:{count}")


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


def _require_writable(path: Path) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise SpecError("--out", f"{path} cannot be written", "give another name")


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
