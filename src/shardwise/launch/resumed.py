"""A run that goes on as another job than it began: what may change freely, what is told, and what is refused."""

from __future__ import annotations

from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.train.checkpoint.folder import CheckpointFolder
from shardwise.train.checkpoint.manifest import read_manifest

_DESCRIBING = ("name", "source", "published_parameters")  # of a model, no part of what is trained
# What is learned from here on is another thing, and may be meant so. Layout, batch and length may change unsaid.
_TOLD = ("run.data.shards", "run.data.weights", "run.data.held_out", "training.seq", "training.optimizer")


def changes_since_saved(job: Job, folder: CheckpointFolder) -> list[str]:
    """What is worth a note about going on in this folder with this job.

    Raises SpecError where its newest checkpoint is of another model or seed.
    """
    saved = _newest_job(folder)
    if saved is None:
        return []
    _require_same_model(job.model, saved.model, folder)
    if job.run.seed != saved.run.seed:
        problem = f"is {job.run.seed}, but the run in {folder.path.parent} began with {saved.run.seed}"
        raise SpecError("run.seed", problem, f"use {saved.run.seed}, or another folder (--run-folder)")
    return [
        f"{path} is {_spelled(now)}, and was {_spelled(before)} when this run was saved: it goes on with its weights"
        for path in _TOLD
        if (now := _field(job, path)) != (before := _field(saved, path))
    ]


def _newest_job(folder: CheckpointFolder) -> Job | None:
    for step in folder.committed():
        try:
            return Job.from_dict(read_manifest(folder.of_step(step)).job)
        except SpecError:  # damaged: the ranks will say so and take the one before
            continue
    return None


def _require_same_model(model: Model, saved: Model, folder: CheckpointFolder) -> None:
    mine, theirs = model.to_dict(), saved.to_dict()
    for name in sorted({*mine, *theirs} - set(_DESCRIBING)):
        if mine.get(name) != theirs.get(name):
            problem = (
                f"is {_spelled(mine.get(name))}, but {_spelled(theirs.get(name))} in the run in {folder.path.parent}"
            )
            raise SpecError(f"model.{name}", problem, "train it in another folder (--run-folder)")


def _field(job: Job, path: str) -> Any:
    found: Any = job
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _spelled(value: Any) -> str:
    if value in (None, ()):
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else shown(value)
