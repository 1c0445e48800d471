"""What manifests of all managers share: `--manifest NAME=VALUE`, nodes, folders in volumes, and the script of a node.

Options say what no job does, such as an image, claims or a namespace. The cluster's manager starts one process per
node, which starts the ranks of its node (`launch/node.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from shardwise.launch.outcome import MISTAKE
from shardwise.launch.targets.image import DATA, EXECUTABLE, IMAGE, RUNS
from shardwise.launch.targets.registry import Written
from shardwise.run.storage.place import RemotePlace, place_of
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.units import parse

FLAG = "--manifest"
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035: JobSet creates a Service, whose name Kubernetes restricts so
MOST_NAME = 40  # JobSet appends "-node-0-" and numbers, and a pod's host name has at most 63 characters
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kKMGTP]i?)?")
_RESOURCE = re.compile(r"([a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-\w.]*):(\d+)")
_SELECTOR = re.compile(r"[A-Za-z0-9][-\w./]*=[-\w.]*")
_VOLUME = re.compile(r"([^:]+):(/[^:]*?)/*(:ro)?")
_URI = re.compile(r"[a-z][a-z0-9]+://\S+")
_ACCELERATOR = re.compile(r"[A-Za-z][\w-]*")
_PLAIN = re.compile(r"[^\s\0]+")


@dataclass(frozen=True)
class Mount:
    """Mounts ``source`` (a claim, a volume, a URI) as the folder ``path`` on every node."""

    path: str
    source: str
    read_only: bool = False

    @property
    def is_uri(self) -> bool:
        return _URI.fullmatch(self.source) is not None


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


@dataclass(frozen=True)
class ManifestOption:
    """An option of one target."""

    what: str  # the value, in the words of an error
    accepts: Callable[[str], object]  # whether a text is such a value
    several: bool = False  # it may be given several times


def _one_of(*names: str) -> Callable[[str], object]:
    return lambda text: text in names


def _bytes(text: str) -> bool:
    try:
        return float(parse(text, "bytes", FLAG)) > 0
    except SpecError:
        return False


_COMMON = {
    "name": ManifestOption(
        f"a name of at most {MOST_NAME} lowercase letters, digits and -", lambda text: is_name(text)
    ),
    "image": ManifestOption(f"an image such as registry.example.com/{IMAGE}", _IMAGE.fullmatch),
    "cpu": ManifestOption("a number of cores such as 32", re.compile(r"\d+").fullmatch),
    "env": ManifestOption("a variable such as NCCL_DEBUG=INFO", _VARIABLE.fullmatch, several=True),
}
OPTIONS: Mapping[str, Mapping[str, ManifestOption]] = {
    "kubernetes": {
        **_COMMON,
        "memory": ManifestOption("an amount of memory such as 500Gi", _QUANTITY.fullmatch),
        "kind": ManifestOption("trainjob or jobset", _one_of("trainjob", "jobset")),
        "namespace": ManifestOption("a namespace", _OBJECT.fullmatch),
        "runs": ManifestOption("the name of a claim", _OBJECT.fullmatch),
        "data": ManifestOption("the name of a claim", _OBJECT.fullmatch),
        "volume": ManifestOption("a claim and its folder, such as models:/models or models:/models:ro",
                         lambda text: _is_mount(text, _OBJECT), several=True),
        "shm": ManifestOption("an amount of memory such as 16GiB", _bytes),
        "gang": ManifestOption("coscheduling, volcano or none", _one_of("coscheduling", "volcano", "none")),
        "scheduler": ManifestOption("the name of a scheduler", _OBJECT.fullmatch),
        "queue": ManifestOption("the name of a Kueue queue", _OBJECT.fullmatch),
        "rdma": ManifestOption("a resource and its number, such as rdma/ib:8", _RESOURCE.fullmatch),
        "secret": ManifestOption("the name of a secret", _OBJECT.fullmatch),
        "pull-secret": ManifestOption("the name of a secret", _OBJECT.fullmatch),
        "service-account": ManifestOption("the name of a service account", _OBJECT.fullmatch),
        "node-selector": ManifestOption("a label such as pool=h100", _SELECTOR.fullmatch, several=True),
    },
    "skypilot": {
        **_COMMON,
        "runs": ManifestOption("the name of a SkyPilot volume", _OBJECT.fullmatch),
        "data": ManifestOption("a bucket such as s3://bucket/corpus, or a SkyPilot volume",
                       lambda text: _URI.fullmatch(text) or _OBJECT.fullmatch(text)),
        "volume": ManifestOption("a SkyPilot volume and its folder, such as models:/models",
                         lambda text: _is_mount(text, _OBJECT), several=True),
        "memory": ManifestOption("GB of memory such as 500, or 500+", re.compile(r"\d+(\.\d+)?\+?").fullmatch),
        "infra": ManifestOption("a place such as aws/us-east-1 or k8s", _PLAIN.fullmatch),
        "accelerator": ManifestOption("SkyPilot's name of a GPU, such as H100", _ACCELERATOR.fullmatch),
        "spot": ManifestOption("true or false", _one_of("true", "false")),
    },
}  # fmt: skip


def is_name(text: str) -> bool:
    return len(text) <= MOST_NAME and re.fullmatch(_LABEL, text) is not None


def name_from(text: str) -> str:
    """Turns any text into a name that the cluster accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[^a-z]*", "", name)[:MOST_NAME].strip("-") or "shardwise"


def manifest_options(target: str, given: Sequence[str]) -> ManifestOptions:
    """Raises SpecError for the first option that is unknown, malformed or given twice."""
    table = OPTIONS[target]
    values: dict[str, list[str]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in table:
            elsewhere = [other for other, known in OPTIONS.items() if name in known]
            remedy = f"it is for --on {elsewhere[0]}" if elsewhere else nearest_name(name, table)
            raise SpecError(FLAG, f"{shown(name)} is not an option of {target}", remedy or f"use {', '.join(table)}")
        if not equals or not table[name].accepts(value):
            raise SpecError(FLAG, f"{shown(text)}: {name} is {table[name].what}", f"write it like {name}=...")
        if name in values and not table[name].several:
            raise SpecError(FLAG, f"{name} is given twice", "give it once")
        values.setdefault(name, []).append(value)
    return _options(values)


def _options(values: Mapping[str, Sequence[str]]) -> ManifestOptions:
    single = {name: texts[0] for name, texts in values.items()}
    mounts = [Mount(DATA, single["data"], read_only=True)] if "data" in single else []
    mounts += [_mount(text) for text in values.get("volume", ())]
    _require_apart(mounts)
    rdma = _RESOURCE.fullmatch(single.get("rdma", ""))
    return ManifestOptions(
        name=single.get("name"),
        image=single.get("image", IMAGE),
        runs=single.get("runs"),
        mounts=tuple(mounts),
        shared_memory_bytes=int(parse(single["shm"], "bytes", FLAG)) if "shm" in single else None,
        cpu=single.get("cpu"),
        memory=single.get("memory"),
        env=_pairs(values.get("env", ())),
        kind=single.get("kind", "trainjob"),
        namespace=single.get("namespace"),
        gang=single.get("gang"),
        scheduler=single.get("scheduler"),
        queue=single.get("queue"),
        rdma=None if rdma is None else (rdma[1], int(rdma[2])),
        secret=single.get("secret"),
        pull_secret=single.get("pull-secret"),
        service_account=single.get("service-account"),
        node_selector=_pairs(values.get("node-selector", ())),
        infra=single.get("infra"),
        accelerator=single.get("accelerator"),
        spot=single.get("spot") == "true",
    )


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if pairs.setdefault(name, value) != value:
            raise SpecError(FLAG, f"{name} is given twice", "give it once")
    return pairs


def _is_mount(text: str, source: re.Pattern[str]) -> bool:
    match = _VOLUME.fullmatch(text)
    return match is not None and len(match[2]) > 1 and source.fullmatch(match[1]) is not None


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
            raise SpecError(
                FLAG, f"volume {mount.source} at {mount.path}: {clash} is another volume's", "choose another"
            )
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


def manifest_job(job: Job, options: ManifestOptions, named: str, grace_seconds: float) -> ManifestJob:
    """Raises SpecError if nodes would not see the job's folders, or its ranks do not fill whole nodes."""
    world = job.strategy.world
    here = min(job.cluster.node_devices, world)
    if world % here:
        raise SpecError("strategy", f"{world} ranks are not a whole number of nodes of {here} devices")
    name = options.name or name_from(named)
    placed = replace(job, run=replace(job.run, folder=_run_folder(job, options, name)))
    _require_seen(placed, options)
    return ManifestJob(placed, name, world // here, here, grace_seconds, options)


def _run_folder(job: Job, options: ManifestOptions, name: str) -> str:
    """The run's folder in the volume of the runs; without a volume, checkpoints must go to a store to last."""
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
    for where, text in named.items():
        if isinstance(place_of(text), RemotePlace) or any(_inside(text, path) for path in paths):
            continue
        remedy = f"name it below {', '.join(paths)}, {FLAG} volume=VOLUME:/folder, or a URI such as s3://bucket/name"
        raise SpecError(where, f"{shown(text)} is in no volume of the nodes", remedy)


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
