"""`shardwise doctor`: whether this machine, or every node of a cluster, is fit for a long run."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardwise.api.calibration import started_cluster
from shardwise.api.given import JobArguments
from shardwise.api.quantities import require_writable
from shardwise.cli.arguments import add_job_arguments, job_arguments, job_from, require_torch
from shardwise.cli.on_target import (
    WIRING_HELP,
    a_rank_for_each_device,
    add_run_device_argument,
    add_target_argument,
    run_on_target,
    target_of_verb,
)
from shardwise.cli.parser import Parser
from shardwise.cli.streams import ReaderGone
from shardwise.cost.analysis import analyze
from shardwise.cost.campaign import checkpoint_bytes
from shardwise.interop.fabric import read_switches
from shardwise.launch.targets.registry import LaunchTarget
from shardwise.measure.doctor.host import Checked, Examination, examine
from shardwise.report.console import console, versioned
from shardwise.report.tables import wrapped
from shardwise.run.environment import Started, started
from shardwise.spec.errors import SpecError, shown

PROCESSES = 2  # without a job and without GPUs
_EXAMPLE = """
shardwise doctor
shardwise doctor --model tiny --cluster laptop:2 --global-batch 8 --seq 64
shardwise doctor job.yaml --on hosts.txt --wiring wiring.yaml
"""
_FIRST = "--cluster --on --run-device --run-folder --hosts --wiring --switches --json"
_DOES = """Checks what a long run needs from this machine: loopback and ports, shared memory, open files, clocks, disk
space and speed, versions, device memory, and a small all-reduce. On several nodes (--on, or under torchrun, srun or
mpirun) each is checked, and all are compared: versions, open ports, clocks, NVLink and InfiniBand, the folder that
they share, bandwidth and latency of every pair against the job's cluster; the node that differs is named. Exit status 1
if something fails."""


def run(arguments: list[str]) -> int:
    parser = _parser()
    parsed = parser.parse(arguments)
    findings, out, here = [], console(), started()
    shows = here is None or here.rank == 0
    target = target_of_verb(parsed.on, here)
    if target is not None:
        return _on_target(target, parsed, arguments)
    for finding in _findings(_examination(parsed, here), here):
        findings.append(finding)
        if shows and not parsed.json:
            print_finding(out, finding)
    failed = any(finding.status == "fail" for finding in findings)
    if shows and parsed.json:
        with suppress(ReaderGone):
            data = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
            print(json.dumps(versioned("doctor", data), indent=2))
    return 1 if failed and shows else 0


def _parser() -> Parser:
    parser = Parser("doctor", _DOES, _EXAMPLE, _FIRST)
    add_job_arguments(parser)
    parser.add_argument("--run-folder", metavar="DIR", help="folder of the run (default: the job's, or this one)")
    where = parser.add_argument_group("where it runs")
    add_run_device_argument(where, " (default: the job's, or GPUs if there are any)")
    add_target_argument(parser)
    parser.add_argument("--hosts", default="", metavar="A,B", help="compare clocks with these hosts, by ssh")
    parser.add_argument("--wiring", metavar="FILE", help=WIRING_HELP)
    switches = "with --wiring: Slurm's topology.conf, or the output of `kubectl get nodes -o json`"
    parser.add_argument("--switches", metavar="FILE", help=switches)
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="JSON output")
    return parser


def _on_target(target: LaunchTarget, parsed: argparse.Namespace, arguments: list[str]) -> int:
    """Runs the same command on the target's hosts; bad input is refused here, before any host is asked."""
    if _no_job(parsed):
        job = a_rank_for_each_device(target, parsed.cluster, parsed.run_device or "cpu")
    else:
        job = job_from(parsed, runs_here=True)
    _switches(parsed)
    return run_on_target(target, job, "doctor", arguments, parsed.run_device or job.run_device)


def _findings(request: Examination, here: Started | None) -> Iterator[Checked]:
    if here is None:
        return examine(request)
    require_torch("doctor")
    from shardwise.measure.doctor.ranks import examine_ranks

    return examine_ranks(request, here)


def _examination(parsed: argparse.Namespace, here: Started | None) -> Examination:
    hosts = tuple(host.strip() for host in parsed.hosts.split(",")) if parsed.hosts else ()
    for host in hosts:
        if not host or host.startswith("-"):
            raise SpecError("--hosts", f"{shown(host)} is not a host", "write them like node-1,node-2")
    if parsed.wiring is not None and (here is None or here.hosts == 1):
        raise SpecError("--wiring", "is for several nodes", "use --on, or start it by torchrun, srun or mpirun")
    switches, examination = _switches(parsed), _of_job(parsed, hosts, here)
    return examination if parsed.wiring is None else replace(examination, wiring=Path(parsed.wiring), switches=switches)


def _of_job(parsed: argparse.Namespace, hosts: tuple[str, ...], here: Started | None) -> Examination:
    if _no_job(parsed) and (parsed.cluster is None or here is not None):
        folder = _existing(parsed.run_folder or ".")
        devices = 0 if parsed.run_device == "cpu" else _visible_devices()
        device = parsed.run_device or ("cuda" if devices else "cpu")
        cluster = None if parsed.cluster is None or here is None else started_cluster(parsed.cluster, device, here)
        return Examination(folder, devices or PROCESSES, device, 1 + len(hosts), hosts, cluster=cluster)
    job = job_from(parsed, runs_here=True)
    processes = min(job.cluster.node_devices, job.strategy.world)
    return Examination(
        folder=_existing(parsed.run_folder) if parsed.run_folder else _nearest(Path(job.run.folder or ".")),
        processes=processes,
        device=parsed.run_device or job.run_device,
        host_count=max(1 + len(hosts), job.strategy.world // processes),
        others=hosts,
        checkpoint_bytes=checkpoint_bytes(analyze(job)),
        checkpoint_limit_seconds=job.run.timeouts.checkpoint,
        cluster=job.cluster,
        tp=job.strategy.tp,
    )


def _no_job(parsed: argparse.Namespace) -> bool:
    """Whether nothing of a job is given but perhaps its cluster."""
    given = job_arguments(parsed)
    return replace(given, overrides={}) == JobArguments() and given.overrides.keys() <= {"cluster"}


def _switches(parsed: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The switches of each host, from a file; also checks that the wiring can be written."""
    if parsed.switches is not None and parsed.wiring is None:
        raise SpecError("--switches", "is for --wiring", "give both")
    if parsed.wiring is not None:
        require_writable(Path(parsed.wiring), "--wiring")
    return {} if parsed.switches is None else read_switches(Path(parsed.switches), "--switches")


def _existing(name: str) -> Path:
    if "\0" in name or not Path(name).is_dir():
        raise SpecError("--run-folder", f"{shown(name)} is not a folder", "make it, or name another")
    return Path(name)


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next((parent for parent in (folder, *folder.parents) if parent.is_dir()), Path())


def _visible_devices() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    from shardwise.measure.doctor.software import visible_devices

    return visible_devices()


_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_LEAST = 20  # columns of text, however narrow the console


def print_finding(out: Console, checked: Checked) -> None:
    """The status, the check and what was found; folded lines are indented under the first."""
    said = f"{checked.figure}; {checked.remedy}" if checked.remedy else checked.figure
    check = f"{checked.check:<14} "
    indent = len(checked.status) + 2 + len(check)
    # In a file or a pipe, where consoles do not wrap, a finding stays on its line.
    first, *rest = [said] if out.soft_wrap else wrapped(said, max(_LEAST, out.width - indent))
    out.print(Text.assemble((f"{checked.status}  ", _STYLES[checked.status]), check + first))
    for line in rest:
        out.print(Text(" " * indent + line))
