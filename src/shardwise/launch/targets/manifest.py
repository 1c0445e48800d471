"""What a manifest says of a job, whoever runs it: nodes, folders in their volumes, and the script of a node.

The cluster's manager starts one process per node, which starts the ranks of its node (`launch/node.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from shardwise.launch.outcome import MISTAKE
from shardwise.launch.targets.image import EXECUTABLE, RUNS
from shardwise.launch.targets.manifest_options import FLAG, ManifestOptions, name_from
from shardwise.launch.targets.registry import Written
from shardwise.run.storage.place import RemotePlace, place_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

END_SECONDS = 30  # beyond the time for a checkpoint, before a node is killed
STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class ManifestJob:
    """``job`` as its nodes read it; all have ``ranks_per_node`` ranks."""

    job: Job
    name: str
    nodes: int
    ranks_per_node: int
    grace_seconds: float
    options: ManifestOptions

    @property
    def is_gpu(self) -> bool:
        return self.job.run_device == "cuda"

    @property
    def final_statuses(self) -> list[int]:
        """Exit statuses after which a restart would fail again: a mistake; on one node its launcher has retried."""
        return [1, MISTAKE] if self.nodes == 1 else [MISTAKE]

    def script(self, job_file: str) -> str:
        """For bash on every node. A node that is asked to stop saves, and leaves with a status of `STOPS`."""
        grace = f"{self.grace_seconds:g}s"
        command = shlex.join([EXECUTABLE, "train", job_file, "--grace", grace])
        return _SCRIPT.replace("@command@", command)


# `wait` returns when a trapped signal arrives, before the command has ended.
_SCRIPT = """\
asked=0
train=
trap 'asked=1; [ -z "$train" ] || kill -TERM "$train"' TERM
@command@ &
train=$!
[ "$asked" -eq 0 ] || kill -TERM "$train"
wait "$train"
status=$?
while kill -0 "$train" 2>/dev/null; do
  wait "$train"
  status=$?
done
exit "$status"
"""


def manifest_job(job: Job, options: ManifestOptions, named: str, grace_seconds: float) -> ManifestJob:
    """Raises SpecError for a job whose folders no node would see, or that is no whole number of nodes."""
    world = job.strategy.world
    here = min(job.cluster.node_devices, world)
    if world % here:
        raise SpecError("strategy", f"{world} ranks are not a whole number of nodes of {here} devices")
    name = options.name or name_from(named)
    placed = replace(job, run=replace(job.run, folder=_run_folder(job, options, name)))
    _require_seen(placed, options)
    return ManifestJob(placed, name, world // here, here, grace_seconds, options)


def _run_folder(job: Job, options: ManifestOptions, name: str) -> str:
    """In the volume of the runs; without one each node has its own, and only checkpoints in a store last."""
    folder = str(PurePosixPath(job.run.folder or f"{RUNS}/{name}"))
    if options.runs is None:
        kept = job.run.checkpoints.folder
        if kept is None or not isinstance(place_of(kept), RemotePlace):
            remedy = f"{FLAG} runs=VOLUME, or checkpoints in a store: --set run.checkpoints.folder=s3://bucket/{name}"
            raise SpecError(FLAG, "runs is missing: no volume would keep the run", remedy)
    if not _inside(folder, RUNS):
        raise SpecError("run.folder", f"{shown(folder)} is not in the volume of the runs", f"use {RUNS}/{name}")
    return folder


def _require_seen(job: Job, options: ManifestOptions) -> None:
    run = job.run
    named = {f"run.data.shards[{number}]": path for number, path in enumerate(run.data.shards)}
    named |= {f"run.data.validation[{number}]": path for number, path in enumerate(run.data.validation)}
    if run.start_from is not None:
        named["run.start_from"] = run.start_from
    if run.checkpoints.folder is not None:
        named["run.checkpoints.folder"] = run.checkpoints.folder
    paths = [RUNS, *(mount.path for mount in options.mounts)]
    for field, text in named.items():
        if isinstance(place_of(text), RemotePlace) or any(_inside(text, path) for path in paths):
            continue
        remedy = f"name it below {', '.join(paths)}, {FLAG} volume=VOLUME:/folder, or a URI such as s3://bucket/name"
        raise SpecError(field, f"{shown(text)} is in no volume of the nodes", remedy)


def _inside(text: str, folder: str) -> bool:
    path = PurePosixPath(text)
    return path.is_relative_to(folder) and path != PurePosixPath(folder) and ".." not in path.parts


def written_manifest(text: str, path: Path, command: Sequence[str]) -> Written:
    """Raises SpecError if the file cannot be written; with "-" it is printed instead."""
    if str(path) == STANDARD_OUTPUT:
        print(text, end="")
        return Written(path, ())
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError("--out", f"{shown(str(path))} cannot be written ({error.strerror})", "choose another") from None
    return Written(path, (*command, str(path)))
