"""A job for nodes that share no storage with this machine: completed and priced here, its files checked there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from shardwise.api.execution import OnProgress
from shardwise.api.given import JobArguments
from shardwise.api.inputs import job_from
from shardwise.api.quantities import whole_number
from shardwise.launch.preflight import preflight
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.run import Profile, StepWindow


def job_for_manifest(
    given: JobArguments,
    *,
    steps: int | str | None = None,
    run_folder: str | PathLike[str] | None = None,
    data: Sequence[str] | None = None,
    profile: str | None = None,
    nvtx: str | None = None,
    note: OnProgress,
) -> tuple[Job, str]:
    """The job, and a name for its run: from its folder or file, else the model's.

    Paths stay as given: they are paths on the nodes.
    """
    described, notes = job_from(given, {} if steps is None else {"steps": whole_number(steps, "--steps")})
    run = described.run
    try:
        job = replace(
            described,
            run=replace(
                run,
                data=replace(run.data, shards=tuple(data) if data else run.data.shards),
                folder=run.folder if run_folder is None else str(run_folder),
                profile=run.profile if profile is None else Profile.parse(profile, "--profile"),
                nvtx=run.nvtx if nvtx is None else StepWindow.parse(nvtx, "--nvtx"),
            ),
        )
    except SpecError as error:
        raise error.under("run") from None
    if job.run.emulate is not None:
        raise SpecError("run.emulate", "puts the ranks on virtual nodes of this machine", "leave it out")
    if job.run.backend != "auto":
        raise SpecError("run.backend", f"{job.run.backend} is for ranks that mpirun starts", "leave it out")
    checked = preflight(job, here=False)
    for text in (*notes, *checked.notes):
        note(text)
    named = job.run.folder or given.job
    return job, Path(named).stem if named else job.model.name or "run"
