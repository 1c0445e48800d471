"""`shardwise train`: one command from a job file to a trained model on this machine; started again, it resumes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shardwise.cli.arguments import Parser, add_job_arguments
from shardwise.cli.inputs import job_from, require_torch, whole
from shardwise.interop.companions import folder_of_model
from shardwise.interop.jobs import is_folder, other_framework, read_job_fields
from shardwise.launch.outcome import Event, Outcome
from shardwise.launch.preflight import Preflight, preflight
from shardwise.launch.resume import finished_at, place_for, require_going_on, require_same_run
from shardwise.launch.run import Launch, prepare
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.profile import Profile
from shardwise.spec.units import parse
from shardwise.training.metrics.lines import RunSummary
from shardwise.training.run_folder import RunFolder

_EXAMPLE = """
shardwise train --model tiny --cluster laptop:2 --dp 2 --seq 128 --global-batch 8 --precision fp32 --steps 50
shardwise train --model tiny --emulate 2x1,200Mbit,1ms --seq 128 --global-batch 8 --precision fp32 --steps 50
"""
_DOES = """Prices the job, starts one process per device, trains, shows progress, and starts again after a failure.
Everything is kept in the run's folder; the same command resumes from the last checkpoint.
SIGTERM or Ctrl-C writes a checkpoint first: exit 0 if it could within the time of --grace, else 75."""
GRACE = "30s"


def run(arguments: list[str]) -> int:
    parser = Parser("train", _DOES, _EXAMPLE)
    add_job_arguments(parser)
    parser.add_argument("--run-folder", metavar="DIR", help="where the run is kept (default runs/NAME of the job)")
    other = "resume from the folder's weights and position even if data, sequence, batch or optimizer differ"
    parser.add_argument("--go-on", action="store_true", help=other)
    parser.add_argument("--steps", metavar="N", help="steps of the whole run (default: of training.tokens, or 1000)")
    shards = "token shards to train on, without a suffix; repeat for several (default: the built-in corpus)"
    parser.add_argument("--data", action="append", metavar="SHARDS", help=shards)
    parser.add_argument(
        "--grace", default=GRACE, metavar="TIME", help=f"time allowed for the final checkpoint (default {GRACE})"
    )
    emulate = "on virtual nodes of this machine: 2x2,1Gbit,1ms are 2 of 2 ranks (as root; docs/emulate.md)"
    parser.add_argument("--emulate", metavar="NODES", help=emulate)
    parser.add_argument("--print-torchrun", action="store_true", help="the commands for several hosts; starts nothing")
    parser.add_argument(
        "--rehearse", metavar="N", help="run N steps of the job in a separate folder, and give a verdict"
    )
    parser.add_argument("--profile", metavar="STEPS", help="record these steps for `compare`, such as steps=10:12")
    parser.add_argument("--debug", action="store_true", help="compare every collective between ranks (slow)")
    parser.add_argument("--json", action="store_true", help="JSON output: the summary")
    parsed = parser.parse(arguments)
    grace_seconds = float(parse(parsed.grace, "seconds", "--grace"))
    job = _job(parsed)
    require_torch("train", "safetensors")
    if job.run.emulate is not None:
        _check_emulation(job, parsed)
    checked = preflight(job, here=not parsed.print_torchrun)
    job = _placed(job, parsed)
    assert job.run.folder is not None
    folder = RunFolder(Path(job.run.folder))
    if not parsed.print_torchrun:
        job, checked = _tried(job, folder, checked)
    for note in (*checked.notes, *_weights_left(parsed.model, job)):
        print(f"note: {note}", file=sys.stderr)
    if parsed.print_torchrun:
        from shardwise.launch.torchrun import torchrun_commands

        with folder.checkpoints.locked():
            if not _make_ready(job, folder, checked, parsed):
                return 0
        print(*torchrun_commands(job, folder.path), sep="\n")
        return 0
    if parsed.rehearse is not None:
        return _rehearsed(job, folder, checked, whole(parsed.rehearse, "--rehearse"), as_json=parsed.json)
    with folder.checkpoints.locked():
        if not _make_ready(job, folder, checked, parsed):
            return 0
        outcome = _watched(Launch(job, folder, grace_seconds, parsed.debug), quiet=parsed.json)
    return _told(outcome, job, folder, parsed)


def _weights_left(named: str | None, job: Job) -> list[str]:
    """A note for a folder with weights of which only the shape is used: the user may have meant both."""
    if named is None or job.run.start_from is not None or not is_folder(named):
        return []
    if not any(Path(named).glob("*.safetensors")):
        return []
    return [f"weights are random; --set run.start_from={named} begins with those in the folder"]


def _check_emulation(job: Job, parsed: argparse.Namespace) -> None:
    from shardwise.launch.emulate.network import require_emulation

    emulation = job.run.emulate
    assert emulation is not None
    if parsed.print_torchrun:
        raise SpecError("--print-torchrun", "starts no virtual nodes", "leave --emulate out")
    require_emulation()
    if job.cluster.node_devices != emulation.ranks_per_node:
        there = f"{job.cluster.name} has nodes of {job.cluster.node_devices}"
        print(f"note: {there}: the prediction is not for {emulation}", file=sys.stderr)


def _tried(job: Job, folder: RunFolder, checked: Preflight) -> tuple[Job, Preflight]:
    """Resolves `auto` fields by trial before the run begins."""
    from shardwise.launch.preflight import confirmed

    found = confirmed(job, folder, lambda text: print(f"note: {text}", file=sys.stderr))
    return found, checked if found == job else preflight(found)


def _placed(job: Job, parsed: argparse.Namespace) -> Job:
    """The job in its folder; a default folder never belongs to a different job."""
    if job.run.folder is not None:
        return job
    default = Path("runs") / (Path(parsed.job).stem if parsed.job else job.model.name or "run")
    path, why = (default, []) if parsed.go_on else place_for(job, default)
    if why:
        print(f"note: {default} has the run of another job ({why[0]}): this one is in {path}", file=sys.stderr)
    return replace(job, run=replace(job.run, folder=str(path)))


def _make_ready(job: Job, folder: RunFolder, checked: Preflight, parsed: argparse.Namespace) -> bool:
    """Whether there is something to do; prints a line if all steps are done."""
    for note in require_same_run(job, folder, go_on=parsed.go_on):
        print(f"note: {note}", file=sys.stderr)
    step = finished_at(job, folder)
    if step is None:
        if not parsed.print_torchrun:
            require_going_on(job, folder)
        prepare(job, folder, checked, folder_of_model(_named_model(parsed)))
        return True
    if parsed.json:
        print(json.dumps({**asdict(_summary(folder)), "status": 0, "attempts": 0}))
    else:
        more = "" if step == job.run.steps else f" of {job.run.steps:,}, where run.stop_at pauses it"
        print(f"Nothing to do: the run in {folder.path} is at its last step, {step:,}{more}.")
        print("Raise --steps to continue it, or name another --run-folder to start a new run.")
    return False


def _named_model(parsed: argparse.Namespace) -> Any:
    if parsed.model is None and parsed.job and other_framework(parsed.job) is None:
        return read_job_fields(parsed.job).get("model")
    return parsed.model


def _summary(folder: RunFolder) -> RunSummary:
    from shardwise.training.metrics.lines import read_lines, summarise

    return summarise(read_lines(folder.metrics))


def _job(parsed: argparse.Namespace) -> Job:
    """The job with its run complete: the flags' steps, a folder, and paths that hold wherever a worker starts."""
    given: dict[str, Any] = {} if parsed.steps is None else {"steps": whole(parsed.steps, "--steps")}
    if parsed.emulate is not None:
        given["emulate"] = Emulation.parse(parsed.emulate, "--emulate")
    job = job_from(parsed, given)
    changes: dict[str, object] = {}
    changes["folder"] = parsed.run_folder or job.run.folder
    if parsed.profile is not None:
        changes["profile"] = Profile.parse(parsed.profile, "--profile")
    data = job.run.data
    shards = _absolute(tuple(parsed.data or data.shards))
    if job.run.start_from is not None:
        changes["start_from"] = str(Path(job.run.start_from).resolve())
    try:
        changes["data"] = replace(data, shards=shards, validation=_absolute(data.validation))
        return replace(job, run=replace(job.run, **changes))  # type: ignore[arg-type]
    except SpecError as error:
        raise error.under("run") from None


def _absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(Path(path).resolve()) for path in paths)


def _watched(launch: Launch, *, quiet: bool) -> Outcome:
    from shardwise.report.training_progress import TrainingProgress

    with TrainingProgress(launch.folder.metrics, launch.job.run.steps, quiet=quiet) as progress:

        def tell(event: Event) -> None:
            progress.say(f"{event.kind}: {event.text}")

        return launch.supervised(tell)


def _rehearsed(job: Job, folder: RunFolder, checked: Preflight, steps: int, *, as_json: bool) -> int:
    """Exits with 1 if a check failed."""
    from shardwise.launch.rehearsal import rehearse
    from shardwise.report.training import print_points

    def tell(event: Event) -> None:
        print(f"{event.kind}: {event.text}", file=sys.stderr)

    outcome, points = rehearse(job, folder, checked, steps, tell)
    if not points:
        if outcome.failure is not None:
            print(f"shardwise: error: {outcome.failure.reason}", file=sys.stderr)
        return outcome.status or 1
    if as_json:
        print(json.dumps([asdict(one) for one in points]))
    else:
        print_points(points)
    return 0 if all(one.passed for one in points) else 1


def _told(outcome: Outcome, job: Job, folder: RunFolder, parsed: argparse.Namespace) -> int:
    """Prints the summary of a run; returns the exit status."""
    from shardwise.report.training import print_summary

    found, failure = _summary(folder), outcome.failure if outcome.status else None
    if failure is not None:
        log = f"; its log: {failure.log}" if failure.log else ""
        print(f"shardwise: error: {failure.reason if failure.mistake else f'{failure}{log}'}", file=sys.stderr)
    if parsed.json:
        figures = {**asdict(found), "status": outcome.status, "attempts": len(outcome.attempts)}
        print(json.dumps({**figures, "failure": None if failure is None else failure.reason}))
        return outcome.status
    if failure is not None and failure.mistake:
        return outcome.status
    if found.step_seconds is not None:
        print_summary(found, job.training.recipe.compute)
    if outcome.stopped or outcome.status:
        print(f"Stopped at step {found.steps:,} of {job.run.steps:,}: the same command resumes from there.")
    else:
        print(f"Done: {job.run.folder}")
    return outcome.status
