"""A verb on a launch target: its hosts run the same command as ranks; what rank 0 prints is printed here."""

from __future__ import annotations

import shlex
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Sequence

from shardwise.api.calibration import named_cluster
from shardwise.cli.arguments import print_notes
from shardwise.cli.parser import Parser, flags_now
from shardwise.launch.local import FIRST_ATTEMPT, supervise
from shardwise.launch.node import UNWATCHED, printed_as_it_grows
from shardwise.launch.outcome import Event
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.targets.registry import (
    LaunchTarget,
    TargetRequest,
    command_status,
    started_on,
    target_named,
    text_of,
)
from shardwise.run.attempt import rank_file
from shardwise.run.environment import Started
from shardwise.spec.clusters import cpu_hosts
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job

_DEVICES = ("cpu", "cuda")
EMULATE_HELP = "run on virtual nodes of this machine; 2x2,1Gbit,1ms is 2 nodes of 2 ranks (as root; docs/emulate.md)"
WIRING_HELP = "file for what was measured between nodes, which cluster.wiring of a job reads"
# Flags of earlier versions that are options of a target now: the option that each became, and of which targets.
_OLD = {
    "sbatch": ("", ("slurm",)),
    "submit": ("submit", ("slurm",)),
    "ray_address": ("address=", ("ray",)),
    "manifest": ("", ("kubernetes", "skypilot")),
    "out": ("out=", ("kubernetes", "skypilot")),
}


def add_target_argument(parser: Parser) -> None:
    on = (
        "run on other hosts; TARGET is a file of hosts (`host slots=8`, over ssh), ray, or slurm, which uses srun "
        "(options: `shardwise list targets`)"
    )
    parser.add_argument_group("where it runs").add_argument("--on", metavar="TARGET[,OPTION=...]", help=on)


def add_run_device_argument(
    group: ArgumentParser | _ArgumentGroup, about: str, default: str | None = None, also: Sequence[str] = ()
) -> None:
    """``about`` follows its help; ``also`` are choices beside the devices."""
    text = f"what to run on, cpu or cuda{about}"
    group.add_argument("--run-device", choices=(*also, *_DEVICES), default=default, help=text)


def add_old_arguments(parser: Parser, *names: str) -> None:
    """Flags that work until version 1.0."""
    for name in names:
        action = "store_true" if name == "submit" else "append"
        parser.add_argument(f"--{name.replace('_', '-')}", help=SUPPRESS, action=action)


def with_old_arguments(parsed: Namespace, *names: str) -> str | None:
    """The value of `--on`, with the options that were given by flags of earlier versions; a note says the new form."""
    words: list[str] = []
    named: str | None = parsed.on
    for name in names:
        (option, targets), given = _OLD[name], getattr(parsed, name)
        if given and (named is None or named.partition(",")[0] not in targets):
            raise SpecError(f"⟨{name}⟩", f"is for ⟨on={' or '.join(targets)}⟩", "leave it out")
        words += [option] if given is True else [f"{option}{value}" for value in given or ()]
    if not words:
        return named
    on = f"{named},{text_of(words)}"
    print_notes([f"options of a target follow its name, and their own flags will go in 1.0: --on {shlex.quote(on)}"])
    return on


def run_on_target(
    target: LaunchTarget, job: Job, verb: str, arguments: Sequence[str], device: str | None = None
) -> int:
    """Runs the verb as the job's ranks, with the arguments that it was given here, on ``device`` if that is said."""
    given = without_option(arguments, "--on")
    if device is not None:
        given = [*without_option(given, "--run-device"), "--run-device", device]
    today = (argument for argument, _ in flags_now(verb.split()[0], given))  # the hint was given here
    command = [sys.executable, "-m", "shardwise", *verb.split(), *today]
    if target.kind != "starts":
        return command_status(TargetRequest(target, job), command)
    with started_on(TargetRequest(target, job)) as started_target, OwnedFolder("target") as folder:
        print_notes(started_target.notes)
        with printed_as_it_grows(rank_file(folder / FIRST_ATTEMPT, 0, "log")):
            outcome = supervise(
                command, job.strategy.world, folder, start=started_target.start, timeouts=UNWATCHED, restarts=0,
                on_event=_failed,
            )  # fmt: skip
    return outcome.status


def target_of_verb(on: str | None, here: Started | None) -> LaunchTarget | None:
    """The target that starts a verb's ranks; None for this machine."""
    if on is None:
        return None
    target = target_named(on)
    if here is not None:
        raise SpecError("⟨on⟩", f"{here.launcher} has started this as a rank", "leave it out, or start it alone")
    return target


def a_rank_for_each_device(target: LaunchTarget, cluster: str | None, device: str) -> Job:
    """A small job with a rank per device, for verbs without a job: targets read ranks, nodes and device from one.

    A file of hosts gives their number and slots; other targets need a ``cluster``, and so do GPUs.
    """
    sized = _cluster(target, cluster, device)
    world = sized.devices
    return Job.from_dict(
        {
            "model": "tiny", "cluster": sized, "strategy": {"dp": world},
            "training": {"global_batch": world, "seq": 32}, "run": {"device": device},
        }
    )  # fmt: skip


def _cluster(target: LaunchTarget, cluster: str | None, device: str) -> Cluster:
    if cluster is not None:
        return named_cluster(cluster)
    hosts = target.hosts()
    if hosts is None or device == "cuda":
        what = f"on {target.name}" if hosts is None else "of GPUs"
        raise SpecError("⟨cluster⟩", f"is missing: nothing else says how many ranks {what}", "such as dgx-h100:2")
    return cpu_hosts(len(hosts), min(host.slots or 1 for host in hosts))


def _failed(event: Event) -> None:
    if event.kind == "failed":
        print(f"shardwise: error: {event.text}", file=sys.stderr)


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if skip or argument == option or argument.startswith(f"{option}="):
            skip = argument == option and not skip
            continue
        kept.append(argument)
    return kept
