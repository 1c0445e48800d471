"""The job as a caller gives it: a file, a job or its fields, and keywords or flags that override them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

from shardwise.api.quantities import path_text
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

if TYPE_CHECKING:
    from shardwise.interop.frameworks import Configuration

# Keywords whose name is not that of a field of strategy or training.
_PATHS: dict[str, str] = {
    "expert_tp": "strategy.expert_tp",
    "stack": "stack",
    "memory_risk": "run.memory_risk",
}
_PARTS = ("strategy", "training", "run")


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """A job as given, before anything is looked up. Fields without a line below mean what the flags of that name do."""

    job: str | None = None
    """Path of a job file, or of another framework's configuration."""
    fields: Mapping[str, Any] | None = None
    """Fields of a job that is not in a file."""
    configuration: Configuration | None = None
    """Another framework's configuration that is not in a file."""
    model: Any = None
    cluster: Any = None
    gpus: Any = None
    gpus_per_node: Any = None
    params: Any = None
    layers: Any = None
    hidden: Any = None
    heads: Any = None
    kv_heads: Any = None
    ffn: Any = None
    vocab: Any = None
    topology: Any = None
    shape: Any = None
    bandwidth: Any = None
    latency: Any = None
    device: Any = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values by the path of their field, such as ``strategy.tp``."""


# The fields of `JobArguments` that are keywords and flags.
NAMED = tuple(
    item.name for item in fields(JobArguments) if item.name not in ("job", "fields", "configuration", "overrides")
)

JobSource = Job | JobArguments | Mapping[str, Any] | str | PathLike[str]
Size = int | float | str


class JobKeywords(TypedDict, total=False):
    """Keywords that describe a job or override one; a plan takes bounds for those of the strategy: ``tp="2..8"``."""

    model: str | Model | Mapping[str, Any]
    cluster: str | Cluster | Mapping[str, Any]
    gpus: int
    gpus_per_node: int
    stack: str | Stack | Mapping[str, Any]
    strategy: Mapping[str, Any]
    training: Mapping[str, Any]
    run: Mapping[str, Any]
    dp: int | str
    tp: int | str
    pp: int | str
    cp: int | str
    ep: int | str
    expert_tp: int | str
    zero: int | str
    shard_group: int | str
    order: Sequence[str] | str
    microbatch: int | str
    schedule: str
    interleave: int | str
    stage_layers: Sequence[int] | str
    recompute: str
    recompute_layers: int | str
    sequence_parallel: bool
    context_method: str
    dispatch: str
    overlap: Mapping[str, bool]
    collective: str
    compression: str | Mapping[str, Any]
    synchronise: str | Mapping[str, Any]
    global_batch: int | str
    seq: int
    precision: str
    optimizer: str
    attention: str
    dropout: bool
    memory_risk: float | str
    params: Size
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    topology: str
    shape: str
    bandwidth: Size
    latency: Size
    device: str | Device


def job_arguments(job: JobSource | None, keywords: Mapping[str, Any]) -> JobArguments:
    """The arguments of a call of the API; raises SpecError for an unknown keyword."""
    if isinstance(job, JobArguments):
        return job
    given: dict[str, Any] = {name: value for name, value in keywords.items() if name in NAMED}
    overrides: dict[str, Any] = {}
    for name, value in keywords.items():
        if value is None or name in NAMED:
            continue
        if name in _PARTS:
            overrides |= {f"{name}.{inner}": inside for inner, inside in _mapping(name, value).items()}
        else:
            overrides[_path(name)] = _plain(value)
    return JobArguments(**_source(job), **given, overrides=overrides)


def _source(job: JobSource | None) -> dict[str, Any]:
    if job is None:
        return {}
    if isinstance(job, Job):
        return {"fields": job.to_dict()}
    if isinstance(job, Mapping):
        return {"fields": job}
    if isinstance(job, (str, PathLike)):
        return {"job": path_text(job, "job")}
    raise SpecError("job", f"{shown(job)} is not a job", "give a Job, the path of a job file, or a mapping of fields")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, (Strategy, Training)):
        return value.to_dict()
    if not isinstance(value, Mapping):
        raise SpecError(name, f"{shown(value)} should be a mapping of fields", f"give {name}=dict(...)")
    return value


def keyword_path(name: str) -> str:
    """The path of the field that a keyword sets; the keyword itself if it sets none."""
    return _field_paths().get(name, name)


def _field_paths() -> dict[str, str]:
    strategy = {item.name: f"strategy.{item.name}" for item in fields(Strategy)}
    return strategy | {item.name: f"training.{item.name}" for item in fields(Training)} | _PATHS


def _path(name: str) -> str:
    """The path of the field that a keyword of a job sets."""
    known = _field_paths()
    if name not in known:
        raise SpecError(name, "is not a keyword of a job", nearest_name(name, [*known, *NAMED, *_PARTS]))
    return known[name]


def _plain(value: Any) -> Any:
    """Plain data as in a file: lists for tuples, mappings for parts of a strategy."""
    if isinstance(value, tuple):
        return list(value)
    return value.to_dict() if hasattr(value, "to_dict") else value
