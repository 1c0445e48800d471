"""From flags to a `Job`, and the checks before a verb starts; notes on assumptions go to standard error."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from shardwise.api import inputs
from shardwise.api.quantities import whole_number
from shardwise.cli.arguments import job_arguments
from shardwise.interop.jobs import model_from
from shardwise.planner.automatic import decided
from shardwise.run.storage.place import Place, place_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.installation import require_packages, torch_notes
from shardwise.spec.job import Job

__all__ = [
    "job_from", "model_from", "path_from", "place_from", "port_number", "print_notes", "require_torch", "whole_number",
]  # fmt: skip
MOST_PORT = 65535


def job_from(parsed: argparse.Namespace, *, runs_here: bool = False) -> Job:
    """The job that a file and flags describe, with what it leaves open chosen."""
    job, notes = inputs.job_from(job_arguments(parsed), runs_here=runs_here)
    print_notes(notes)
    return decided(job)


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def path_from(text: str) -> Path:
    """A path that need not exist; raises SpecError for text that cannot be one."""
    place = place_from(text)
    if isinstance(place, Path):
        return place
    raise SpecError("", f"{shown(text)} is not a path of this machine", "copy it here, or `checkpoint reshard` it")


def place_from(text: str) -> Place:
    """A path, or the URI of a place in a store; it need not exist."""
    place = place_of(text)
    try:
        if isinstance(place, Path):
            place.exists()
    except (OSError, ValueError) as error:
        raise SpecError("", f"{shown(text)} is not a path ({getattr(error, 'strerror', error)})", "check it") from None
    return place


def port_number(text: str, flag: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > MOST_PORT:
        raise SpecError(flag, f"{shown(text)} is not a port", "use 0 (any that is free) to 65535")
    return int(text)


def require_torch(verb: str, *also: str) -> None:
    """Raises SpecError unless PyTorch and the packages of ``also`` are installed; notes an untested PyTorch."""
    require_packages(verb, "torch", *also)
    print_notes(torch_notes())
