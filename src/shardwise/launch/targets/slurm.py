"""A script for sbatch that trains a prepared run with one task per rank; and the submitted job, which can be followed.

The script restarts the tasks after a failure, as the local launcher does. Before the time limit Slurm signals the
script: the ranks save a checkpoint, and the job is requeued, to resume later.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise import __version__
from shardwise.launch.local import DEBUG
from shardwise.launch.outcome import STOPPED
from shardwise.launch.targets.registry import TargetRequest, Written
from shardwise.launch.torchrun import WORKER
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

SCRIPT = "slurm.sh"
ORDER = "shardwise.launch.targets.slurm_order"
WARNING_SECONDS = 60  # beyond the time for a checkpoint: Slurm may signal up to a minute late or early
POLL_SECONDS = 2.0
_OPTION = re.compile(r"(?:--)?(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.*))?", re.DOTALL)
_FIXED = ("nodes", "ntasks", "ntasks-per-node", "signal", "requeue", "no-requeue", "array", "wrap")
_RUNNING = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SUSPENDED", "SIGNALING", "STAGE_OUT",
)  # fmt: skip


def write_for(
    request: TargetRequest, *, grace_seconds: float = 30, sbatch: Sequence[str] = (), debug: bool = False
) -> Written:
    """The script in the run's folder; ``sbatch`` are more options, such as "partition=gpu" and "time=4:00:00"."""
    assert request.folder is not None
    folder = request.folder.resolve()
    path = folder / SCRIPT
    text = script(request.job, folder, grace_seconds=grace_seconds, sbatch=sbatch, debug=debug)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return Written(path, ("sbatch", str(path)))


def script(job: Job, folder: Path, *, grace_seconds: float, sbatch: Sequence[str] = (), debug: bool = False) -> str:
    """The script for ``job``, which is prepared in ``folder`` on storage that all nodes share."""
    directives = {**_directives(job, folder, grace_seconds), **_given(sbatch)}
    heading = "\n".join(f"#SBATCH --{name}{'' if value is None else f'={value}'}" for name, value in directives.items())
    values = {
        "heading": heading,
        "version": __version__,
        "folder": shlex.quote(str(folder)),
        "working_folder": shlex.quote(str(Path.cwd())),
        "exports": _exports(debug=debug),
        "order": _order(directives),
        "worker": shlex.join([sys.executable, "-m", WORKER]),
        "restarts": str(job.run.restarts.most),
        "stopped": str(STOPPED),
    }
    text = _SCRIPT
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _directives(job: Job, folder: Path, grace_seconds: float) -> dict[str, str | None]:
    before = round(max(grace_seconds, 1) + WARNING_SECONDS)
    return {
        "job-name": re.sub(r"[^\w.-]", "-", folder.name) or "shardwise",
        **_resources(job),
        "requeue": None,
        "open-mode": "append",  # a job that was requeued continues its log
        "output": f"{folder}/slurm-%j.log",
        "signal": f"B:USR1@{before}",
    }


def _resources(job: Job) -> dict[str, str | None]:
    """The options that give every rank a task."""
    world = job.strategy.world
    here = min(job.cluster.node_devices, world)
    if world % here:
        raise SpecError("strategy", f"{world} ranks are not a whole number of nodes of {here} devices")
    resources: dict[str, str | None] = {"nodes": str(world // here), "ntasks": str(world), "ntasks-per-node": str(here)}
    if job.run_device == "cuda":
        resources["gpus-per-node"] = str(here)
    return resources


def _order(directives: Mapping[str, str | None]) -> str:
    if directives["nodes"] == "1":
        return "  # one node: nothing to order"
    return _ORDER.replace("@command@", shlex.join([sys.executable, "-m", ORDER]))


def _given(options: Sequence[str]) -> dict[str, str | None]:
    """The user's options of sbatch; those that follow from the job are refused."""
    given: dict[str, str | None] = {}
    for text in options:
        match = _OPTION.fullmatch(text.strip())
        if match is None or "\n" in text:
            raise SpecError("--sbatch", f"{shown(text)} is not an option of sbatch", "write it like time=4:00:00")
        if match["name"] in _FIXED:
            raise SpecError("--sbatch", f"{match['name']} follows from the job", "leave it out")
        given[match["name"]] = match["value"]
    return given


def _exports(*, debug: bool) -> str:
    """Sets PYTHONPATH again: sites may keep sbatch from passing on the environment, and our code must be found."""
    path = os.environ.get("PYTHONPATH")
    exports = [f"export PYTHONPATH={shlex.quote(path)}" if path else "# PYTHONPATH was not set"]
    return "\n".join([*exports, *(f"export {name}={value}" for name, value in DEBUG.items() if debug)])


_SCRIPT = """#!/bin/bash
# Trains the run in its folder; written by shardwise @version@. Submit it with sbatch: again, it resumes.
@heading@

run=@folder@
restarts=@restarts@
cd @working_folder@ || exit 1
@exports@
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

# Slurm warns the script before the time limit (USR1): the ranks save a checkpoint and end, then the job is requeued.
# When a job is cancelled or requeued by hand, Slurm tells the ranks themselves (TERM): the script only waits for them.
warned=0
trap 'warned=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap ':' TERM

newest() { ls "$run/checkpoints" 2>/dev/null | grep '^step-' | sort | tail -n 1; }

tries=0
while :; do
  before=$(newest)
  logs="$run/slurm/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$tries"
  mkdir -p "$logs" || exit 1
  echo "shardwise: $run from ${before:-the beginning}, logs in $logs"
  order=()
@order@
  if [ "$warned" -eq 1 ]; then # before any rank was there to be told
    status=@stopped@
    break
  fi
  srun "${order[@]}" --kill-on-bad-exit=1 --output="$logs/rank-%t.log" @worker@ "$run" &
  step=$!
  wait "$step"
  status=$?
  while kill -0 "$step" 2>/dev/null; do # a trapped signal ended the wait
    wait "$step"
    status=$?
  done
  if [ "$status" -eq 0 ] || [ "$status" -eq @stopped@ ] || [ "$warned" -eq 1 ]; then
    break
  fi
  [ "$(newest)" = "$before" ] || tries=0
  tries=$((tries + 1))
  if [ "$status" -eq 2 ] || [ "$tries" -gt "$restarts" ]; then
    echo "shardwise: the ranks ended with status $status; gave up" >&2
    tail -n 3 "$logs"/rank-*.log >&2
    exit "$status"
  fi
  echo "shardwise: the ranks ended with status $status; restart $tries of $restarts" >&2
done
if [ "$warned" -eq 1 ]; then
  echo "shardwise: stopped before the time limit; requeued"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
# By now Slurm has chosen the nodes: another order of the ranks than its own may be faster.
_ORDER = """  first=$(@command@ "$run" "$logs/hosts") || exit
  if [ -n "$first" ]; then
    export MASTER_ADDR="$first" SLURM_HOSTFILE="$logs/hosts"
    order=(--distribution=arbitrary)
  fi"""


def run_command(request: TargetRequest, command: Sequence[str]) -> int:
    """Runs a command as the ranks of a job, in this allocation or one of its own, and prints what they print."""
    if shutil.which("srun") is None:
        raise SpecError("--on", "there is no srun here", "use a login node of a Slurm cluster")
    wanted = {name: value for name, value in _resources(request.job).items() if value is not None}
    options = [f"--{name}={value}" for name, value in wanted.items()]
    return subprocess.run(["srun", *options, "--kill-on-bad-exit=1", *command]).returncode


# -- a job that was submitted ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmJob:
    """A job by its number, as the controller knows it."""

    number: str

    def facts(self) -> Mapping[str, str]:
        """What the controller says of the job; empty once it has forgotten the job."""
        done = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", self.number], capture_output=True, text=True, timeout=60
        )
        return dict(part.partition("=")[::2] for part in done.stdout.split() if "=" in part)

    def wait(self) -> int:
        """Waits until it has ended and is not requeued; its exit status, 1 if it was cancelled or lost."""
        facts: Mapping[str, str] = {}
        while True:
            now = self.facts()
            if not now:
                break
            facts = now
            if facts.get("JobState", "") not in _RUNNING:
                break
            time.sleep(POLL_SECONDS)
        status = facts.get("ExitCode", "1:0").partition(":")[0]
        return int(status) if status.isdecimal() and facts.get("JobState") in ("COMPLETED", "FAILED") else 1


def submitted(written: Written) -> SlurmJob:
    if shutil.which("sbatch") is None:
        raise SpecError("--submit", "there is no sbatch here", f"submit {written.path} on a login node")
    done = subprocess.run([written.command[0], "--parsable", *written.command[1:]], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"sbatch ended with status {done.returncode}"
        raise SpecError("--submit", said, "--sbatch gives it more options, such as --sbatch partition=gpu")
    return SlurmJob(done.stdout.strip().partition(";")[0])
