"""The job in a run's folder: its file, whether another job resumes the run, and the order of its nodes.

Model, data and batches identify a run. Layout, devices, precision, learning rate and length may change when it resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.placement import WORTHWHILE, place_nodes, placement_words
from shardwise.run.checkpoint.folder import CheckpointFolder, RunFolder
from shardwise.run.checkpoint.manifest import read_manifest
from shardwise.run.metrics.recorder import write_prediction
from shardwise.run.storage.place import Place, RemotePlace, place_of, read_range
from shardwise.spec.codec import Spec
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_json
from shardwise.spec.job import Job

_DESCRIBING = ("name", "source", "published_parameters")  # of a model: they do not change what is trained
_IDENTITY = (
    *("run.data.shards", "run.data.weights", "run.data.held_out", "run.start_from"),
    *("training.seq", "sequences", "training.optimizer"),
    *("training.adapters", "training.trained", "training.task"),
)
_SPELLED = {"sequences": "training.global_batch"}
_REPORTED = ("training.precision", "training.optimization", "run.schedule")
_ANOTHER = "another folder (⟨run_folder⟩)"
_SUFFIXES = (".bin", ".idx", ".mask")
_BLOCKS, _BLOCK_BYTES = 64, 2**16


@dataclass(frozen=True)
class JobDifference:
    """A field that differs between the job and the saved run."""

    field: str
    now: str
    before: str
    always: bool = False  # the run cannot continue, not even with --go-on

    def __str__(self) -> str:
        return f"{self.field} is {self.now}, and was {self.before}"


def _saved_job(folder: CheckpointFolder) -> Job | None:
    """The job of the newest readable checkpoint."""
    for step in folder.committed():
        try:
            return Job.from_dict(read_manifest(folder.of_step(step)).job)
        except SpecError:  # damaged: the ranks will report it and use the previous one
            continue
    return None


def differences(job: Job, folder: RunFolder) -> list[JobDifference]:
    """How ``job`` differs from the run saved in the folder; empty if there is none."""
    saved = _saved_job(folder.checkpoints)
    if saved is None:
        return []
    mine, theirs, different = job.model.to_dict(), saved.model.to_dict(), []
    for name in sorted({*mine, *theirs} - set(_DESCRIBING)):
        if mine.get(name) != theirs.get(name):
            now, before = _spelled(mine.get(name)), _spelled(theirs.get(name))
            different.append(JobDifference(f"model.{name}", now, before, always=True))
    if job.run.seed != saved.run.seed:
        different.append(JobDifference("run.seed", str(job.run.seed), str(saved.run.seed), always=True))
    for path in _IDENTITY:
        different += _changed(_SPELLED.get(path, path), _field(job, path), _field(saved, path))
    recorded = recorded_data(folder)
    for name, content in contents_of_data(job).items():
        if recorded.get(name, content) != content:  # of a shard with the same name as when the run began
            different.append(JobDifference("run.data.shards", f"{name} as it is now", "other content"))
    return different


def folder_for(job: Job, folder: Path) -> tuple[Path, list[JobDifference]]:
    """The first of FOLDER, FOLDER-2, ... that is free or has this run; and why FOLDER itself is not used."""
    why = differences(job, RunFolder(folder))
    if not why:
        return folder, []
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(other for other in others if not differences(job, RunFolder(other))), why


def require_same_run(job: Job, folder: RunFolder, *, go_on: bool) -> list[str]:
    """Notes on resuming in this folder with this job.

    Raises SpecError if the folder holds the run of a different job, unless ``go_on`` asks to continue it as this one.
    """
    _require_same_place(folder)
    for difference in differences(job, folder):
        if difference.field == "run.seed":
            problem = f"is {difference.now}, but the run in {folder.path} began with {difference.before}"
            raise SpecError(difference.field, problem, f"use {difference.before}, or {_ANOTHER}")
        if difference.always or not go_on:
            problem = f"is {difference.now}, but {difference.before} in the run in {folder.path}"
            way = "" if difference.always else ", or continue with its weights as another job (⟨go_on=true⟩)"
            raise SpecError(difference.field, problem, f"train it in {_ANOTHER}{way}")
    saved = _saved_job(folder.checkpoints)
    if saved is None:
        return []
    changed = [
        difference for path in _REPORTED for difference in _changed(path, _field(job, path), _field(saved, path))
    ]
    return [
        f"{difference} when this run was saved: it continues from there"
        for difference in (*differences(job, folder), *changed)
    ]


def _require_same_place(folder: RunFolder) -> None:
    """Raises SpecError if the run in the folder has checkpoints, but not where this job looks for them."""
    before = RunFolder(folder.path).checkpoints
    if str(before.path) == str(folder.checkpoints.path) or folder.checkpoints.committed():
        return
    if before.committed():
        problem = f"is {folder.checkpoints.path}, but the run in {folder.path} has its checkpoints in {before.path}"
        raise SpecError("run.checkpoints.folder", problem, f"copy them, or train in {_ANOTHER}")


def finished_at(job: Job, folder: RunFolder) -> int | None:
    """The step of an intact checkpoint at which the run has done all that the job asks for; None if steps are left.

    Raises SpecError if the run is beyond the job's last step.
    """
    from shardwise.training.checkpoint.load import problems_of

    checkpoints, last = folder.checkpoints, job.run.last_step
    for step in checkpoints.committed():
        if step < last:
            return None
        path = checkpoints.of_step(step)
        if path.is_symlink() or problems_of(path):
            continue
        if step > last:
            name = "run.steps" if job.run.stop_at is None else "run.stop_at"
            problem = f"is {last:,}, and the run in {folder.path} is at step {step:,}"
            raise SpecError(name, problem, f"raise the steps to continue it; {_ANOTHER} starts a new one")
        return step
    return None


def _changed(path: str, now: Any, before: Any) -> Iterator[JobDifference]:
    """Yields the fields that differ; of a nested dataclass each of its fields by itself."""
    if now == before:
        return
    if is_dataclass(now) and type(now) is type(before):
        for field in fields(now):
            yield from _changed(f"{path}.{field.name}", getattr(now, field.name), getattr(before, field.name))
    else:
        yield JobDifference(path, _spelled(now), _spelled(before))


def _field(job: Job, path: str) -> Any:
    value: Any = job
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _spelled(value: Any) -> str:
    if value in (None, ()):
        return "not given"
    if isinstance(value, Spec):
        return ", ".join(f"{name}: {shown(given)}" for name, given in value.to_dict().items()) or "given"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else shown(value)


def contents_of_data(job: Job) -> dict[str, str]:
    """A checksum of each shard that is here, over its size and 64 blocks of 64 KiB: a shard may be terabytes."""
    checksums, limit_seconds = {}, job.run.timeouts.checkpoint
    for name in job.run.data.shards:
        files = [path for suffix in _SUFFIXES if (path := place_of(f"{name}{suffix}", limit_seconds)).is_file()]
        sums = place_of(f"{name}.sums.json", limit_seconds)
        if isinstance(sums, RemotePlace) and sums.is_file():  # one request instead of hundreds
            checksums[name] = hashlib.sha256(sums.read_bytes()).hexdigest()
        elif files:
            checksums[name] = _checksum(files)
    return checksums


def record_data(job: Job, folder: RunFolder) -> None:
    folder.data.write_text(json.dumps({"shards": contents_of_data(job)}, indent=1) + "\n", encoding="utf-8")


def recorded_data(folder: RunFolder) -> dict[str, str]:
    """Empty if nothing was recorded, or the record is damaged."""
    try:
        shards = read_json(folder.data, "record of data")["shards"]
        return {str(name): str(content) for name, content in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _checksum(files: list[Place]) -> str:
    checksum = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        checksum.update(f".{path.name.rpartition('.')[2]} {size} ".encode())
        apart = max(_BLOCK_BYTES, size // _BLOCKS)
        for at in range(0, size, apart):
            checksum.update(read_range(path, at, min(at + _BLOCK_BYTES, size)))
    return checksum.hexdigest()


# -- the job's file, written again for every layout --------------------------------------------------


def write_job(job: Job, folder: RunFolder, price: Candidate | None = None) -> None:
    """Replaces the job file atomically; ``price`` is computed unless it is given."""
    temporary = folder.job.with_suffix(".part")
    temporary.write_text(job.to_yaml(), encoding="utf-8")
    temporary.replace(folder.job)
    memory = (price := price or candidate(job)).memory
    # What a run measures is its tensors, without the framework's own memory.
    write_prediction(folder.path, price.step_seconds, memory.total - memory.allowance)


# -- The order of a run's nodes --------------------------------------------------------------------


def on_nodes(job: Job, hosts: Sequence[str] | None, *, started: bool) -> tuple[Job, list[str]]:
    """The job with its wiring in the order of the ranks, and notes; a job without a wiring is returned unchanged.

    The order is the one predicted to be fastest, or the given one with a note on what that costs.
    ``hosts`` are those that a target names, in its order; None for virtual nodes, which stand for those of the wiring,
    or if a manager chooses the hosts later. ``started`` says that ranks run there already and cannot be reordered.
    """
    wiring = job.cluster.wiring
    if wiring is None or (hosts is None and job.run.emulate is None):
        return job, []
    named = wiring.hosts[: job.cluster.nodes] if hosts is None else tuple(hosts)
    unknown = [host for host in named if host not in wiring.hosts]
    if unknown or len(named) < job.cluster.nodes:
        why = f"it does not know {unknown[0]}" if unknown else f"it names {len(named)} of {job.cluster.nodes} nodes"
        return replace(job, cluster=replace(job.cluster, wiring=None)), [f"cluster.wiring is not used: {why}"]
    as_given = replace(job, cluster=replace(job.cluster, wiring=wiring.of(named)))
    placement = place_nodes(job, named)
    words = None if placement is None else placement_words(placement)
    if placement is None or words is None:
        return as_given, []
    if not started and job.run.reorder:
        return placement.job, [f"ranks go to the nodes in another order: {words}"]
    if placement.gain < WORTHWHILE:
        return as_given, []
    remedy = "start the ranks on the hosts in that order" if started else "run.reorder: true does it"
    return as_given, [f"the nodes are not in their best order, {words}; {remedy}"]
