"""A script for sbatch that trains a prepared run with one task per rank; and the submitted job, which can be followed.

The script restarts the tasks after a failure, as the local launcher does. Before the time limit Slurm signals the
script: the ranks save a checkpoint, and the job is requeued, to resume later.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise import __version__
from shardwise.interop.fabric import Switches, nodes_of, of_hosts, read_slurm
from shardwise.launch.local import DEBUG
from shardwise.launch.outcome import STOPPED
from shardwise.launch.resume import on_nodes, write_job
from shardwise.launch.targets.registry import TargetOption, TargetRequest, Written
from shardwise.run.attempt import WORKER
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.job import Job
from shardwise.spec.wiring import Wiring

SCRIPT = "slurm.sh"
WARNING_SECONDS = 60  # beyond the time for a checkpoint: Slurm may signal up to a minute late or early
POLL_SECONDS = 2.0
# Options of sbatch up to Slurm 26 (src/common/slurm_opt.c), without those that have it print or wait for something.
_SBATCH = (
    "account", "acctg-freq", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters", "comment",
    "consolidate-segments", "constraint", "container", "container-id", "context", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
    "distribution", "error", "exclude", "exclusive", "export", "export-file", "extra", "extra-node-info",
    "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task",
    "gres", "gres-flags", "hint", "hold", "ignore-pbs", "input", "job-name", "kill-on-invalid-dep", "licenses",
    "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network",
    "nice", "no-kill", "nodefile", "nodelist", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket",
    "ntasks-per-tres", "oom-kill-step", "open-mode", "output", "overcommit", "oversubscribe", "partition", "power",
    "prefer", "priority", "profile", "propagate", "qos", "reboot", "reservation", "resv-ports", "segment",
    "sockets-per-node", "spread-job", "spread-segments", "stepmgr", "switches", "thread-spec", "threads-per-core",
    "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "use-min-nodes", "wait-all-nodes", "wckey",
)  # fmt: skip
_FIXED = ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "signal", "requeue", "no-requeue", "array", "wrap")
SUBMIT = "submit"
OPTIONS = {
    SUBMIT: TargetOption("a switch: the script is submitted, and its job followed", lambda text: False, alone=True),
    "OPTION": TargetOption("an option of sbatch, such as time=4:00:00", alone=True, names=_SBATCH),
    "--": TargetOption("an option of this site's sbatch, such as --bank=physics", alone=True),
    "": TargetOption("decided by the job", None, names=_FIXED),
}
_RUNNING = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "RESIZING", "SUSPENDED", "SIGNALING", "STAGE_OUT",
)  # fmt: skip


def write_for(request: TargetRequest, *, grace_seconds: float = 30, debug: bool = False) -> Written:
    assert request.folder is not None
    folder = request.folder.resolve()
    path = folder / SCRIPT
    text = script(request.job, folder, grace_seconds=grace_seconds, sbatch=_sbatch(request), debug=debug)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return Written(path, ("sbatch", str(path)))


def script(
    job: Job, folder: Path, *, grace_seconds: float, sbatch: Mapping[str, str] | None = None, debug: bool = False
) -> str:
    """The script for ``job``, which is prepared in ``folder`` on storage that all nodes share."""
    directives = {**_directives(job, folder, grace_seconds), **(sbatch or {})}
    heading = "\n".join(f"#SBATCH {flag}" for flag in _flags(directives))
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


def _sbatch(request: TargetRequest) -> dict[str, str]:
    return {name: values[-1] for name, values in request.target.given.items() if name != SUBMIT}


def _flags(options: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def _directives(job: Job, folder: Path, grace_seconds: float) -> dict[str, str]:
    before = round(max(grace_seconds, 1) + WARNING_SECONDS)
    return {
        "job-name": re.sub(r"[^\w.-]", "-", folder.name) or "shardwise",
        **_resources(job),
        "requeue": "",
        "open-mode": "append",  # a job that was requeued continues its log
        "output": f"{folder}/slurm-%j.log",
        "signal": f"B:USR1@{before}",
    }


def _resources(job: Job) -> dict[str, str]:
    world = job.strategy.world
    here = min(job.cluster.node_devices, world)
    if world % here:
        raise SpecError("strategy", f"{world} ranks are not a whole number of nodes of {here} devices")
    resources = {"nodes": str(world // here), "ntasks": str(world), "ntasks-per-node": str(here)}
    if job.run_device == "cuda":
        resources["gpus-per-node"] = str(here)
    return resources


def _order(directives: Mapping[str, str]) -> str:
    if directives["nodes"] == "1":
        return "  # one node: nothing to order"
    return _ORDER.replace("@command@", shlex.join([sys.executable, "-m", __name__]))


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
        raise SpecError("⟨on⟩", "there is no srun here", "use a login node of a Slurm cluster")
    if SUBMIT in request.target.given:
        raise SpecError("⟨on⟩", f"{SUBMIT} is for `train`: this runs by srun", "leave it out")
    options = _flags({**_resources(request.job), **_sbatch(request)})
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
        raise SpecError("⟨on⟩", "there is no sbatch here", f"submit {written.path} on a login node")
    done = subprocess.run([written.command[0], "--parsable", *written.command[1:]], capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"sbatch ended with status {done.returncode}"
        raise SpecError("⟨on⟩", said, "give it more options, such as ⟨on=slurm,partition=gpu,submit⟩")
    return SlurmJob(done.stdout.strip().partition(";")[0])


# -- the order of a job's nodes, asked for by the script when Slurm has chosen them ------------------
# `python -m shardwise.launch.targets.slurm RUN FILE` prints nothing if the ranks follow Slurm's own order. If not, it
# writes the node of every task to FILE, which `srun --distribution=arbitrary` reads from SLURM_HOSTFILE (srun(1)), and
# prints the address of the first: rank 0 need not be on the first node of Slurm's list.

_NODES = "SLURM_JOB_NODELIST"


def in_order(
    job: Job, hosts: Sequence[str], switches: Callable[[], Switches]
) -> tuple[Job, tuple[str, ...], list[str]]:
    """The job, the hosts in the order of its ranks, and notes.

    The job's wiring decides if it knows all hosts; otherwise the ``switches`` above them, if Slurm knows these.
    """
    wiring, notes = job.cluster.wiring, list[str]()
    unknown = [] if wiring is None else [host for host in hosts if host not in wiring.hosts]
    if unknown:
        notes.append(f"cluster.wiring is not used: it does not know {unknown[0]}")
    if wiring is None or unknown:
        above = of_hosts(switches(), hosts)
        if len(above) < len(hosts):
            return job, tuple(hosts), notes
        wiring = Wiring(hosts=tuple(hosts), switches=above, source="scontrol show topology")
    placed, said = on_nodes(_wired(job, wiring), hosts, started=False)
    order = tuple(hosts) if placed.cluster.wiring is None else placed.cluster.wiring.hosts
    # A requeued job may get other nodes, so hosts that are not used now stay in the wiring.
    rest = tuple(host for host in wiring.hosts if host not in order)
    return _wired(job, replace(wiring, hosts=(*order, *rest))), order, notes + said


def _wired(job: Job, wiring: Wiring) -> Job:
    return replace(job, cluster=replace(job.cluster, wiring=wiring))


def _switches() -> Switches:
    """The switches that Slurm's controller knows; none if the site has not described any."""
    try:
        done = subprocess.run(["scontrol", "show", "topology"], capture_output=True, text=True, timeout=60)
        return read_slurm(done.stdout, "scontrol show topology")
    except (OSError, subprocess.TimeoutExpired, SpecError):
        return {}


def _address(host: str) -> str:
    """The node's name, or its address if only Slurm can resolve the name."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        done = subprocess.run(["scontrol", "show", "node", "--oneliner", host], capture_output=True, text=True)
        facts = dict(part.partition("=")[::2] for part in done.stdout.split() if "=" in part)
        return facts.get("NodeAddr", host)


def main(run: str, file: str) -> None:
    folder = RunFolder(Path(run))
    job = Job.from_dict(read_yaml(folder.job, "job file"))
    given = tuple(nodes_of(os.environ.get(_NODES, ""), _NODES))
    ordered, order, notes = in_order(job, given, _switches)
    for note in notes:
        print(f"shardwise: {note}", file=sys.stderr)
    if ordered != job:
        write_job(ordered, folder)  # what is predicted is for this order
    if order == given:
        return
    each = job.strategy.world // len(order)
    Path(file).write_text("".join(f"{host}\n" * each for host in order), encoding="utf-8")
    print(_address(order[0]))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except SpecError as error:
        print(f"shardwise: error: {error}", file=sys.stderr)
        sys.exit(error.status)
