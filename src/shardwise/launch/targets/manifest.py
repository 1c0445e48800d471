"""What manifests of all managers share: options, nodes, folders in volumes, and the script of a node.

Options say what no job does, such as an image, claims or a namespace. The cluster's manager starts one process per
node, which starts the ranks of its node (`launch/node.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise import __version__
from shardwise.launch.outcome import MISTAKE
from shardwise.launch.targets.registry import OptionValues, TargetOption, TargetRequest, Written
from shardwise.run.storage.place import RemotePlace, place_of
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.units import parse

# The image that manifests name and `make image` builds.
IMAGE = f"shardwise:{__version__}"
USER_ID = 1000  # who runs in it: not root
RUNS, DATA = "/runs", "/data"  # where volumes are mounted
JOB_FOLDER, JOB_FILE = "/etc/shardwise", "job.yaml"
EXECUTABLE = "shardwise"
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035: JobSet creates a Service, whose name Kubernetes restricts so
MOST_NAME = 40  # JobSet appends "-node-0-" and numbers, and a pod's host name has at most 63 characters
OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
RESOURCE = re.compile(r"([a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-\w.]*):(\d+)")
_VOLUME = re.compile(r"([^:]+):(/[^:]*?)/*(:ro)?")
URI = re.compile(r"[a-z][a-z0-9]+://\S+")


@dataclass(frozen=True)
class Mount:
    """Mounts ``source`` (a claim, a volume, a URI) as the folder ``path`` on every node."""

    path: str
    source: str
    read_only: bool = False

    @property
    def is_uri(self) -> bool:
        return URI.fullmatch(self.source) is not None


@dataclass(frozen=True)
class ManifestOptions:
    """The options as given; None for those that were not."""

    name: str | None = None
    image: str = IMAGE
    runs: str | None = None
    mounts: tuple[Mount, ...] = ()  # of data and other volumes
    shared_memory_bytes: int | None = None
    cpu: str | None = None
    memory: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    # Kubernetes
    kind: str = "trainjob"
    namespace: str | None = None
    gang: str | None = None
    scheduler: str | None = None
    queue: str | None = None
    rdma: tuple[str, int] | None = None
    secret: str | None = None
    pull_secret: str | None = None
    service_account: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    # SkyPilot
    infra: str | None = None
    accelerator: str | None = None
    spot: bool = False

    @property
    def all_mounts(self) -> tuple[Mount, ...]:
        return (*(() if self.runs is None else (Mount(RUNS, self.runs),)), *self.mounts)


def one_of(*names: str) -> Callable[[str], object]:
    return lambda text: text in names


def is_bytes(text: str) -> bool:
    try:
        return float(parse(text, "bytes", "shm")) > 0
    except SpecError:
        return False


COMMON = {
    "name": TargetOption(f"a name of at most {MOST_NAME} lowercase letters, digits and -", lambda text: is_name(text)),
    "image": TargetOption(f"an image such as registry.example.com/{IMAGE}", _IMAGE.fullmatch),
    "cpu": TargetOption("a number of cores such as 32", re.compile(r"\d+").fullmatch),
    "env": TargetOption("a variable such as NCCL_DEBUG=INFO", _VARIABLE.fullmatch, several=True),
    "out": TargetOption("the file to write, or - to print it (default RUN.TARGET.yaml)"),
}


def is_name(text: str) -> bool:
    return len(text) <= MOST_NAME and re.fullmatch(_LABEL, text) is not None


def name_from(text: str) -> str:
    """Turns any text into a name that the cluster accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[^a-z]*", "", name)[:MOST_NAME].strip("-") or "shardwise"


def manifest_options(given: OptionValues) -> ManifestOptions:
    single = {name.replace("-", "_"): values[0] for name, values in given.items()}
    mounts = [Mount(DATA, single["data"], read_only=True)] if "data" in single else []
    mounts += [_mount(text) for text in given.get("volume", ())]
    _require_apart(mounts)
    rdma = RESOURCE.fullmatch(single.get("rdma", ""))
    as_given: dict[str, Any] = {item.name: single[item.name] for item in fields(ManifestOptions) if item.name in single}
    return ManifestOptions(
        **as_given
        | {
            "mounts": tuple(mounts),
            "shared_memory_bytes": int(parse(single["shm"], "bytes", "shm")) if "shm" in single else None,
            "env": _pairs(given.get("env", ())),
            "rdma": None if rdma is None else (rdma[1], int(rdma[2])),
            "node_selector": _pairs(given.get("node-selector", ())),
            "spot": single.get("spot") == "true",
        }
    )


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if pairs.setdefault(name, value) != value:
            raise SpecError("⟨on⟩", f"{name} is given twice", "give it once")
    return pairs


def is_mount(text: str) -> bool:
    match = _VOLUME.fullmatch(text)
    return match is not None and len(match[2]) > 1 and OBJECT.fullmatch(match[1]) is not None


def _mount(text: str) -> Mount:
    match = _VOLUME.fullmatch(text)
    assert match is not None
    return Mount(match[2], match[1], read_only=match[3] is not None)


def _require_apart(mounts: Sequence[Mount]) -> None:
    """Raises SpecError if two volumes are mounted at or below the same folder."""
    seen = [RUNS]
    for mount in mounts:
        clash = next((path for path in seen if f"{mount.path}/".startswith(f"{path}/")), None)
        if clash is not None:
            problem = f"volume {mount.source} at {mount.path}: {clash} is another volume's"
            raise SpecError("⟨on⟩", problem, "choose another")
        seen.append(mount.path)


END_SECONDS = 30  # beyond the time for a checkpoint, before a node is killed
STANDARD_OUTPUT = "-"


@dataclass(frozen=True)
class ManifestJob:
    """A job with its folders inside the nodes' volumes; every node has ``ranks_per_node`` ranks."""

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
        """Exit statuses after which a restart is useless: a mistake; on a single node any failure, retried there."""
        return [1, MISTAKE] if self.nodes == 1 else [MISTAKE]

    def script(self, job_file: str) -> str:
        """The bash script of every node. A node that is asked to stop saves, and exits with a status of `STOPS`."""
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


def manifest_job(request: TargetRequest, run_name: str, grace_seconds: float) -> ManifestJob:
    """Raises SpecError if nodes would not see the job's folders, or its ranks do not fill whole nodes."""
    job, options = request.job, manifest_options(request.target.given)
    world = job.strategy.world
    here = min(job.cluster.node_devices, world)
    if world % here:
        raise SpecError("strategy", f"{world} ranks are not a whole number of nodes of {here} devices")
    name = options.name or name_from(run_name)
    placed = replace(job, run=replace(job.run, folder=_run_folder(job, options, name)))
    _require_seen(placed, options)
    return ManifestJob(placed, name, world // here, here, grace_seconds, options)


def _run_folder(job: Job, options: ManifestOptions, name: str) -> str:
    """The run's folder in the volume of the runs; without a volume, checkpoints must go to a store to last."""
    folder = str(PurePosixPath(job.run.folder or f"{RUNS}/{name}"))
    if options.runs is None:
        kept = job.run.checkpoints.folder
        if kept is None or not isinstance(place_of(kept), RemotePlace):
            remedy = f"give runs=VOLUME, or keep checkpoints in a store: ⟨run.checkpoints.folder=s3://bucket/{name}⟩"
            raise SpecError("⟨on⟩", "runs is missing: no volume would keep the run", remedy)
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
    for where, text in named.items():
        if isinstance(place_of(text), RemotePlace) or any(_inside(text, path) for path in paths):
            continue
        remedy = f"name it below {', '.join(paths)}, give volume=VOLUME:/folder, or a URI such as s3://bucket/name"
        raise SpecError(where, f"{shown(text)} is in no volume of the nodes", remedy)


def _inside(text: str, folder: str) -> bool:
    path = PurePosixPath(text)
    return path.is_relative_to(folder) and path != PurePosixPath(folder) and ".." not in path.parts


def written_manifest(text: str, request: TargetRequest, run_name: str, command: Sequence[str]) -> Written:
    """Raises SpecError if the file cannot be written; with "-" it is printed instead."""
    path = Path(request.target.option("out") or f"{run_name}.{request.target.name}.yaml")
    if str(path) == STANDARD_OUTPUT:
        print(text, end="")
        return Written(path, ())
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"out={path} cannot be written ({error.strerror})"
        raise SpecError("⟨on⟩", problem, "choose another file") from None
    return Written(path, (*command, str(path)))
