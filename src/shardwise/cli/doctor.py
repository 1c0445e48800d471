"""`shardwise doctor`: whether this machine is fit for a long run."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from shardwise.api.given import JobArguments
from shardwise.cli.arguments import Parser, add_job_arguments, job_arguments
from shardwise.cli.inputs import job_from, require_torch
from shardwise.cost.analysis import analyze
from shardwise.cost.campaign import checkpoint_bytes
from shardwise.measure.doctor.host import Checked, Examination, examine
from shardwise.report.console import console
from shardwise.report.doctor import print_finding
from shardwise.spec.errors import SpecError, shown
from shardwise.training.environment.reader import Started, started

PROCESSES = 2  # without a job and without GPUs
_EXAMPLE = """
shardwise doctor
shardwise doctor --model tiny --cluster laptop:2 --global-batch 8 --seq 64
"""


def run(arguments: list[str]) -> int:
    parser = Parser(
        "doctor",
        "Checks what a long run needs from this machine: loopback and ports, shared memory, open files, clocks, disk "
        "space and speed, versions, device memory, and a small all-reduce. Exit status 1 if something fails.",
        _EXAMPLE,
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--folder", metavar="DIR", help="folder that the run will write to (default: the job's, or this one)"
    )
    parser.add_argument("--on", choices=("cpu", "cuda"), help="device (default: the job's, or GPUs if there are any)")
    parser.add_argument("--hosts", default="", metavar="A,B", help="compare clocks with these hosts, by ssh")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    findings, out, here = [], console(), started()
    shows = here is None or here.rank == 0
    for found in _findings(_examination(parsed), here):
        findings.append(found)
        if shows and not parsed.json:
            print_finding(out, found)
    failed = any(found.status == "fail" for found in findings)
    if shows and parsed.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(found) for found in findings]}, indent=2))
    return 1 if failed else 0


def _findings(request: Examination, here: Started | None) -> Iterator[Checked]:
    if here is None:
        return examine(request)
    require_torch("doctor")
    from shardwise.measure.doctor.ranks import examine_ranks

    return examine_ranks(request, here)


def _examination(parsed: argparse.Namespace) -> Examination:
    hosts = tuple(host.strip() for host in parsed.hosts.split(",")) if parsed.hosts else ()
    for host in hosts:
        if not host or host.startswith("-"):
            raise SpecError("--hosts", f"{shown(host)} is not a host", "write them like node-1,node-2")
    if job_arguments(parsed) == JobArguments():
        folder = _existing(parsed.folder or ".")
        devices = 0 if parsed.on == "cpu" else _visible_devices()
        device = parsed.on or ("cuda" if devices else "cpu")
        return Examination(folder, devices or PROCESSES, device, 1 + len(hosts), hosts)
    job = job_from(parsed, runs_here=True)
    processes = min(job.cluster.node_devices, job.strategy.world)
    return Examination(
        folder=_existing(parsed.folder) if parsed.folder else _nearest(Path(job.run.folder or ".")),
        processes=processes,
        device=parsed.on or job.run_device,
        host_count=max(1 + len(hosts), job.strategy.world // processes),
        others=hosts,
        checkpoint_bytes=checkpoint_bytes(analyze(job)),
        checkpoint_limit_seconds=job.run.timeouts.checkpoint,
    )


def _existing(name: str) -> Path:
    if "\0" in name or not Path(name).is_dir():
        raise SpecError("--folder", f"{shown(name)} is not a folder", "make it, or name another")
    return Path(name)


def _nearest(folder: Path) -> Path:
    """The folder, or where it will be made."""
    return next((one for one in (folder, *folder.parents) if one.is_dir()), Path())


def _visible_devices() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    from shardwise.measure.doctor.software import visible_devices

    return visible_devices()
