"""`shardwise train`: one command from a job file to a trained model on this machine; started again, it resumes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from shardwise.api.execution import (
    ReadyRun,
    TrainingResult,
    job_for_manifest,
    ready_run,
    run_summary,
    trained,
    trained_as_rank,
)
from shardwise.api.quantities import whole_number
from shardwise.api.run_options import RunOptions, RunPlace, require_compatible
from shardwise.cli.arguments import add_job_arguments, job_arguments, print_notes
from shardwise.cli.on_target import add_old_arguments, with_old_arguments
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.launch.outcome import DONE, STOPPED, Attempt, Failure, Outcome
from shardwise.launch.run import FollowsRankZero, Launch
from shardwise.launch.targets.registry import LaunchTarget, TargetRequest, Written, submitted, written_for
from shardwise.report.console import versioned
from shardwise.report.status import points_page
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.environment import Started, started
from shardwise.spec.fields import fields_of
from shardwise.spec.installation import torch_notes
from shardwise.spec.job import Job

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
_OLD = ("sbatch", "submit", "ray_address", "manifest", "out")  # flags of earlier versions


def run(arguments: list[str]) -> int:
    parsed = _parser().parse(arguments)
    parsed.on = with_old_arguments(parsed, *_OLD)
    options = RunOptions.taken_from(vars(parsed))
    place = RunPlace.of(options.on, None if parsed.print_torchrun else started(), printed=parsed.print_torchrun)
    require_compatible([name for name, value in vars(parsed).items() if value not in (None, False)], place)
    if place.target is not None and place.target.kind == "renders":
        return _render(options, place, parsed)

    def made_ready(hosts: Sequence[str] | None) -> ReadyRun:
        return ready_run(options.over(job_arguments(parsed)), options, place, hosts=hosts, note=_note)

    if place.started_as is not None:
        return _as_rank(place.started_as, made_ready, parsed)
    ready = made_ready(place.host_names())
    print_notes(torch_notes())
    if parsed.print_torchrun:
        return _print_commands(ready, parsed)
    if place.target is not None and place.target.kind == "writes":
        return _write(place.target, ready, parsed)
    if parsed.rehearse is not None:
        return _rehearse(ready, whole_number(parsed.rehearse, "⟨rehearse⟩"), parsed)

    def supervised(launch: Launch) -> Outcome:
        with _progress(launch.folder, launch.job, quiet=parsed.json) as progress:
            return launch.supervised(lambda event: progress.print(str(event)))

    return _show(trained(ready, supervised), parsed)


def _parser() -> Parser:
    parser = Parser("train", _DOES, _EXAMPLE, _FIRST)
    add_job_arguments(parser)
    of_run, place = parser.add_argument_group("the run"), parser.add_argument_group("where it runs")
    for record in fields_of(RunOptions):
        how = {"action": "store_true"} if record.is_switch else {"metavar": record.metadata["metavar"]}
        if record.is_list:
            how["action"] = "append"
        group = place if record.name in ("on", "emulate") else of_run
        group.add_argument(f"--{record.name.replace('_', '-')}", help=record.help, **how)
    torchrun = "print the torchrun command of each host; starts nothing"
    place.add_argument("--print-torchrun", action="store_true", help=torchrun)
    of_run.add_argument("--rehearse", metavar="N", help="run N steps of the job in a separate folder, and check them")
    add_old_arguments(parser, *_OLD)
    add_output_arguments(parser)
    return parser


def _note(text: str) -> None:
    print_notes([text])


def _write(target: LaunchTarget, ready: ReadyRun, parsed: argparse.Namespace) -> int:
    """Writes the target's script; with `submit` submits it and follows its job to the end."""
    with ready.folder.checkpoints.locked():
        step = ready.finished_step()
        if step is not None:
            return _show(TrainingResult(ready.job, run_summary(ready.folder, step), None), parsed)
        request = TargetRequest(target, ready.job, ready.folder.path)
        written = written_for(request, grace_seconds=ready.options.grace_seconds, debug=ready.options.debug)
    if "submit" not in target.given:
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


def _render(options: RunOptions, place: RunPlace, parsed: argparse.Namespace) -> int:
    """Writes the file of a target whose nodes share no storage with this machine."""
    assert place.target is not None
    job, name = job_for_manifest(options.over(job_arguments(parsed)), place, _note)
    request = TargetRequest(place.target, job)
    _show_written(written_for(request, run_name=name, grace_seconds=options.grace_seconds), parsed)
    return 0


def _show_written(written: Written, parsed: argparse.Namespace) -> None:
    """Prints the path of the file and the command that submits it; a file that was itself printed has no command."""
    if parsed.json:
        print(json.dumps(versioned("train --on", {"path": str(written.path), "command": written.command})))
    elif written.command:
        print(f"{written.path}\nSubmit it: {shlex.join(written.command)}")


def _as_rank(here: Started, made_ready: Callable[[Sequence[str] | None], ReadyRun], parsed: argparse.Namespace) -> int:
    """Trains as a rank under another launcher; only rank 0 prints."""

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
    from shardwise.launch.run import torchrun_commands

    with ready.folder.checkpoints.locked():
        step = ready.finished_step()
    if step is not None:
        return _show(TrainingResult(ready.job, run_summary(ready.folder, step), None), parsed)
    print(*torchrun_commands(ready.job, ready.folder.path), sep="\n")
    return 0


def _progress(folder: RunFolder, job: Job, *, quiet: bool) -> TrainingProgress:
    from shardwise.report.progress import TrainingProgress

    return TrainingProgress(folder.metrics, job.run.steps, quiet=quiet)


def _rehearse(ready: ReadyRun, steps: int, parsed: argparse.Namespace) -> int:
    """Rehearses the run and prints its checks; returns 1 if one failed."""
    from shardwise.launch.run import rehearse

    tell = partial(print, file=sys.stderr)
    outcome, points = rehearse(ready.job, ready.folder, ready.checked, steps, tell, debug=parsed.debug)
    if not points:
        if outcome.failure is not None:
            print(f"shardwise: error: {outcome.failure.reason}", file=sys.stderr)
        return outcome.status or 1
    show(parsed, lambda: points_page(points), lambda: [asdict(check) for check in points])
    return 0 if all(check.passed for check in points) else 1


def _show(result: TrainingResult, parsed: argparse.Namespace) -> int:
    failure = result.failure
    if failure is not None:
        log = f"; its log: {failure.log}" if failure.log else ""
        print(f"shardwise: error: {failure.reason if failure.mistake else f'{failure}{log}'}", file=sys.stderr)
    if parsed.json or failure is None or not failure.mistake:
        show(parsed, lambda: result.page, result.to_dict)
    return result.status
