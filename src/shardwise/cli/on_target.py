"""A verb on a launch target: the same command as the ranks of its hosts; what rank 0 prints is printed here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardwise.cli.inputs import print_notes
from shardwise.launch.local import FIRST_ATTEMPT, supervise
from shardwise.launch.node import UNWATCHED
from shardwise.launch.outcome import Event
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.tail import printed_as_it_grows
from shardwise.launch.targets.registry import (
    DEVICES,
    LaunchTarget,
    TargetRequest,
    command_status,
    started_on,
    target_named,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.training.attempt import rank_file
from shardwise.training.environment.reader import Started


def run_on_target(target: LaunchTarget, named: str, job: Job, arguments: Sequence[str]) -> int:
    """The exit status of `shardwise ARGUMENTS` as the job's ranks."""
    command = [sys.executable, "-m", "shardwise", *arguments]
    if target.kind != "starts":
        return command_status(target, TargetRequest(named, job), command)
    with started_on(target, TargetRequest(named, job)) as found, OwnedFolder("target") as folder:
        print_notes(found.notes)
        with printed_as_it_grows(rank_file(folder / FIRST_ATTEMPT, 0, "log")):
            outcome = supervise(
                command, job.strategy.world, folder, start=found.start, timeouts=UNWATCHED, restarts=0,
                on_event=_failed,
            )  # fmt: skip
    return outcome.status


def target_of_verb(on: str, here: Started | None) -> LaunchTarget | None:
    """Where a verb's ranks start; None if ``on`` is a device."""
    if on in DEVICES:
        return None
    target = target_named(on)
    if here is not None:
        raise SpecError("--on", f"{here.launcher} has started this as a rank", "leave it out, or start it alone")
    return target


def _failed(event: Event) -> None:
    if event.kind == "failed":
        print(f"shardwise: error: {event.text}", file=sys.stderr)


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """The arguments without an option and its value."""
    found, skip = [], False
    for one in arguments:
        if skip or one == option or one.startswith(f"{option}="):
            skip = one == option and not skip
            continue
        found.append(one)
    return found
