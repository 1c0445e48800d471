"""From flags to a `Job`, and what a verb needs before it starts; what was assumed is said on standard error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.api import inputs
from shardwise.api.inputs import whole
from shardwise.cli.arguments import given
from shardwise.interop.jobs import model_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.installation import require_packages, torch_notes
from shardwise.spec.job import Job

__all__ = ["job_from", "model_from", "path_from", "print_notes", "require_torch", "whole"]


def job_from(parsed: argparse.Namespace, run: Mapping[str, Any] | None = None, *, runs_here: bool = False) -> Job:
    """The job that a file and flags describe."""
    job, notes = inputs.job_from(given(parsed), run, runs_here=runs_here)
    print_notes(notes)
    return job


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def path_from(text: str) -> Path:
    """A path that a user named, whether there is something or not; raises SpecError for what can be none."""
    try:
        Path(text).exists()
    except (OSError, ValueError) as error:
        raise SpecError("", f"{shown(text)} is not a path ({getattr(error, 'strerror', error)})", "check it") from None
    return Path(text)


def require_torch(verb: str, *also: str) -> None:
    """Refuses a verb that computes where only the planner was installed; says where PyTorch is one not tested.

    ``also`` names what the verb needs besides.
    """
    require_packages(verb, "torch", *also)
    print_notes(torch_notes())
