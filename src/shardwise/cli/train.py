"""`shardwise train`: one command from a job file to a trained model on this machine; started again, it resumes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.api.execution import (
    GRACE,
    ReadyRun,
    TrainingResult,
    no_metrics,
    on_target,
    ready_run,
    require_ray_for,
    run_summary,
    starting_target,
    trained,
    trained_as_rank,
)
from shardwise.cli.arguments import add_job_arguments, job_arguments, keywords
from shardwise.cli.inputs import print_notes, whole_number
from shardwise.cli.on_target import EMULATE_HELP
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.launch.as_rank import FollowsRankZero
from shardwise.launch.outcome import DONE, STOPPED, Attempt, Event, Failure, Outcome
from shardwise.launch.run import Launch
from shardwise.launch.targets.registry import LaunchTarget, TargetRequest, Written, hosts_named, target_named
from shardwise.report.status import points_page
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.environment import Started, started
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import torch_notes
from shardwise.spec.job import Job
from shardwise.spec.run import Restarts
from shardwise.spec.units import parse

if TYPE_CHECKING:
    from shardwise.report.progress import TrainingProgress

_EXAMPLE = """
shardwise train --model tiny --cluster laptop:2 --dp 2 --seq 128 --global-batch 8 --precision fp32 --steps 50
shardwise train --model tiny --emulate 2x1,200Mbit,1ms --seq 128 --global-batch 8 --precision fp32 --steps 50
"""
_DOES = """Prices the job, starts one process per device, trains, shows progress, and starts again after a failure.
Everything is kept in the run's folder; the same command resumes from the last checkpoint.
SIGTERM or Ctrl-C writes a checkpoint first: exit 76 if it could within the time of --grace, else 75."""

_FIRST = "--model --cluster --dp --tp --zero --global-batch --seq --steps --data --on"
# Flags for targets that write a file: flag, kind of target, names of such targets.
_FILE_FLAGS = (
    ("submit", "writes", "slurm"), ("sbatch", "writes", "slurm"),
    ("manifest", "renders", "kubernetes or skypilot"), ("out", "renders", "kubernetes or skypilot"),
)  # fmt: skip


def run(arguments: list[str]) -> int:
    parser = Parser("train", _DOES, _EXAMPLE, _FIRST)
    add_job_arguments(parser)
    parser.add_argument("--run-folder", metavar="DIR", help="folder of the run (default runs/NAME of the job)")
    other = "resume from the folder's weights and position even if data, sequence, batch or optimizer differ"
    parser.add_argument("--go-on", action="store_true", help=other)
    parser.add_argument(
        "--steps", metavar="N", help="steps to train; in the whole run (default: of training.tokens, or 1000)"
    )
    shards = "token shards to train on, without a suffix; repeat for several (default: the built-in corpus)"
    parser.add_argument("--data", action="append", metavar="SHARDS", help=shards)
    grace = f"time allowed for the final checkpoint (default {GRACE})"
    parser.add_argument("--grace", default=GRACE, metavar="TIME", help=grace)
    parser.add_argument("--emulate", metavar="NODES", help=EMULATE_HELP)
    on = (
        "run on other hosts; ray, a file of hosts (`host slots=8`, over ssh); or write what starts the processes: "
        "slurm (a script), kubernetes (manifests), skypilot (a task)"
    )
    parser.add_argument("--on", metavar="TARGET", help=on)
    address = "with --on ray: the cluster (default RAY_ADDRESS, or one started here)"
    parser.add_argument("--ray-address", metavar="ADDRESS", help=address)
    wait = f"how long to wait for missing devices; run.restarts.wait (default {Restarts().wait:g}s)"
    parser.add_argument("--wait-for-resources", metavar="TIME", help=wait)
    least = "after a loss go on with at least N devices, replanned, and with all when they return (run.restarts.shrink)"
    parser.add_argument("--least-devices", metavar="N", help=least)
    parser.add_argument("--submit", action="store_true", help="with --on slurm: submit the script, and follow the job")
    more = "with --on slurm: an option of sbatch, such as time=4:00:00; repeat for several"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=more)
    manifest = (
        "with --on kubernetes or skypilot: what the job does not say, such as image=..., runs=CLAIM, gang=volcano; "
        "repeat for several (docs/kubernetes.md)"
    )
    parser.add_argument("--manifest", action="append", default=[], metavar="OPTION", help=manifest)
    out = "file or folder to write; with --on kubernetes or skypilot, - prints it (default RUN.TARGET.yaml)"
    parser.add_argument("--out", metavar="FILE", help=out)
    parser.add_argument("--print-torchrun", action="store_true", help="the commands for several hosts; starts nothing")
    rehearse = "run N steps of the job in a separate folder, and check them"
    parser.add_argument("--rehearse", metavar="N", help=rehearse)
    parser.add_argument("--profile", metavar="STEPS", help="record these steps for `compare`, such as steps=10:12")
    nvtx = "mark steps, their phases and layers as NVTX ranges for nsys; such as steps=10:12"
    parser.add_argument("--nvtx", metavar="STEPS", help=nvtx)
    port = "serve the state of the run to Prometheus on 127.0.0.1; 0 is any free port"
    parser.add_argument("--metrics-port", metavar="PORT", help=port)
    parser.add_argument("--debug", action="store_true", help="compare every collective between ranks (slow)")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    parse(parsed.grace, "seconds", "--grace")  # refused before anything else is done
    for flag in ("json", "markdown", "csv", "debug"):
        if parsed.print_torchrun and getattr(parsed, flag):
            raise SpecError(f"--{flag}", "cannot be combined with --print-torchrun", "leave it out")
    here = None if parsed.print_torchrun else started()
    target = _target(parsed, here)
    require_ray_for(parsed.ray_address, target)

    def made_ready(hosts: Sequence[str] | None) -> ReadyRun:
        return ready_run(
            job_arguments(parsed), **keywords(ready_run, parsed),
            here=not parsed.print_torchrun, started_as=here, elsewhere=target is not None, hosts=hosts,
            note=lambda text: print_notes([text]),
        )  # fmt: skip

    if target is not None and target.kind != "starts" and parsed.metrics_port is not None:
        raise no_metrics(target.name)
    if target is not None and target.kind == "renders":
        return _render(target, parsed)
    if here is not None:
        return _as_rank(here, made_ready, parsed)
    ready = made_ready(None if target is None else hosts_named(target, parsed.on))
    print_notes(torch_notes())
    if parsed.print_torchrun:
        return _print_commands(ready, parsed)
    if target is not None and target.kind == "writes":
        if ready.job.run.logging.metrics_port is not None:
            raise no_metrics(target.name)
        return _write(target, ready, parsed)
    if parsed.rehearse is not None:
        if parsed.metrics_port is not None:
            raise SpecError("--metrics-port", "cannot be combined with --rehearse", "leave it out")
        return _rehearse(ready, whole_number(parsed.rehearse, "--rehearse"), parsed)

    def supervised(launch: Launch) -> Outcome:
        with _progress(launch.folder, launch.job, quiet=parsed.json) as progress:
            return launch.supervised(lambda event: progress.print(f"{event.kind}: {event.text}"))

    run = supervised if target is None else on_target(target, parsed.on, ready, supervised, parsed.ray_address)
    return _show(trained(ready, run, grace=parsed.grace, debug=parsed.debug), parsed)


def _target(parsed: argparse.Namespace, here: Started | None) -> LaunchTarget | None:
    """The target that starts the ranks, or writes what starts them; None for this machine."""
    target = None if parsed.on is None else target_named(parsed.on)
    for flag, kind, targets in _FILE_FLAGS:
        if getattr(parsed, flag) and (target is None or target.kind != kind):
            raise SpecError(f"--{flag}", f"is for --on {targets}", "leave it out")
    if target is None:
        return None
    for flag in ("print_torchrun", "rehearse", "emulate"):
        if getattr(parsed, flag):
            raise SpecError("--on", f"cannot be combined with --{flag.replace('_', '-')}", "leave one of them out")
    return target if target.kind != "starts" and here is None else starting_target(parsed.on, here)


def _write(target: LaunchTarget, ready: ReadyRun, parsed: argparse.Namespace) -> int:
    """Writes the target's script; with --submit submits it and follows its job to the end."""
    from shardwise.launch.targets.registry import submitted, written_for

    for flag in ("markdown", "csv"):
        if getattr(parsed, flag) and not parsed.submit:
            raise SpecError(f"--{flag}", f"is not for --on {target.name} without --submit", "leave it out")
    with ready.folder.checkpoints.locked():
        step = ready.finished_step()
        if step is not None:
            return _show(TrainingResult(ready.job, run_summary(ready.folder, step), None), parsed)
        request = TargetRequest(parsed.on, ready.job, ready.folder.path)
        grace = float(parse(parsed.grace, "seconds", "--grace"))
        written = written_for(target, request, grace_seconds=grace, sbatch=parsed.sbatch, debug=parsed.debug)
    if not parsed.submit:
        _show_written(written, parsed)
        return 0
    began, job = time.monotonic(), submitted(target, written)
    with _progress(ready.folder, ready.job, quiet=parsed.json) as progress:
        progress.print(f"submitted: job {job.number}, {written.path}; it goes on without this command")
        status = job.wait()
    ended = f"job {job.number} ended with status {status}"
    failure = None if status in (DONE, STOPPED) else Failure(None, "exited", ended)
    outcome = Outcome(status, status == STOPPED, (Attempt(ready.folder.path, time.monotonic() - began, failure),))
    return _show(TrainingResult(ready.job, run_summary(ready.folder, None), outcome), parsed)


def _render(target: LaunchTarget, parsed: argparse.Namespace) -> int:
    """Writes the file of a target whose nodes share no storage with this machine."""
    from shardwise.api.manifests import job_for_manifest
    from shardwise.launch.targets.registry import written_for

    for flag in ("debug", "go_on", "markdown", "csv"):
        if getattr(parsed, flag):
            raise SpecError(f"--{flag.replace('_', '-')}", f"is not for --on {target.name}", "leave it out")
    given = keywords(job_for_manifest, parsed)
    job, name = job_for_manifest(job_arguments(parsed), **given, note=lambda text: print_notes([text]))
    if job.run.logging.metrics_port is not None:
        raise no_metrics(target.name)
    out = Path(parsed.out or f"{name}.{target.name}.yaml")
    if parsed.json and str(out) == "-":
        raise SpecError("--json", "cannot be combined with --out -", "leave one of them out")
    grace = float(parse(parsed.grace, "seconds", "--grace"))
    written = written_for(
        target, TargetRequest(parsed.on, job), out=out, run_name=name, grace_seconds=grace, manifest=parsed.manifest
    )
    _show_written(written, parsed)
    return 0


def _show_written(written: Written, parsed: argparse.Namespace) -> None:
    """Prints the path of the file and the command that submits it; a file that was itself printed has no command."""
    if parsed.json:
        print(json.dumps({"path": str(written.path), "command": written.command}))
    elif written.command:
        print(f"{written.path}\nSubmit it: {shlex.join(written.command)}")


def _as_rank(here: Started, made_ready: Callable[[Sequence[str] | None], ReadyRun], parsed: argparse.Namespace) -> int:
    """Trains as a rank under another launcher; only rank 0 prints."""
    if parsed.rehearse is not None:
        raise SpecError("--rehearse", f"{here.launcher} has started this as a rank", "rehearse without it")

    def watched(folder: RunFolder, job: Job) -> TrainingProgress:
        return _progress(folder, job, quiet=parsed.json)

    try:
        result = trained_as_rank(here, made_ready, watched, debug=parsed.debug)
    except FollowsRankZero as error:
        return error.status
    if here.rank == 0 and result.status in (DONE, STOPPED):
        _show(result, parsed)
    if result.status:
        from shardwise.training.worker import leave

        leave(result.status)
    return DONE


def _print_commands(ready: ReadyRun, parsed: argparse.Namespace) -> int:
    from shardwise.launch.torchrun import torchrun_commands

    with ready.folder.checkpoints.locked():
        step = ready.finished_step(here=False)
    if step is not None:
        return _show(TrainingResult(ready.job, run_summary(ready.folder, step), None), parsed)
    print(*torchrun_commands(ready.job, ready.folder.path), sep="\n")
    return 0


def _progress(folder: RunFolder, job: Job, *, quiet: bool) -> TrainingProgress:
    from shardwise.report.progress import TrainingProgress

    return TrainingProgress(folder.metrics, job.run.steps, quiet=quiet)


def _rehearse(ready: ReadyRun, steps: int, parsed: argparse.Namespace) -> int:
    """Rehearses the run and prints its checks; returns 1 if one failed."""
    from shardwise.launch.rehearsal import rehearse

    def print_event(event: Event) -> None:
        print(f"{event.kind}: {event.text}", file=sys.stderr)

    outcome, points = rehearse(ready.job, ready.folder, ready.checked, steps, print_event, debug=parsed.debug)
    if not points:
        if outcome.failure is not None:
            print(f"shardwise: error: {outcome.failure.reason}", file=sys.stderr)
        return outcome.status or 1
    show(parsed, lambda: points_page(points), lambda: [asdict(check) for check in points])
    return 0 if all(check.passed for check in points) else 1


def _show(result: TrainingResult, parsed: argparse.Namespace) -> int:
    """Prints the summary of a run; returns the exit status."""
    failure = result.failure
    if failure is not None:
        log = f"; its log: {failure.log}" if failure.log else ""
        print(f"shardwise: error: {failure.reason if failure.mistake else f'{failure}{log}'}", file=sys.stderr)
    if parsed.json or failure is None or not failure.mistake:
        show(parsed, lambda: result.page, result.to_dict)
    return result.status
