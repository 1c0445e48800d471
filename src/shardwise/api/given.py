"""The job as a caller gives it: a file, a job or its fields, and keywords or flags that override them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

from shardwise.api.quantities import path_text
from shardwise.spec.bare import BareNumbers
from shardwise.spec.codec import Spec
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.fields import job_fields, keyword_paths, parts
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack

if TYPE_CHECKING:
    from shardwise.interop.frameworks import Configuration


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """A job as given, before anything is looked up: made once by a surface, turned into a `Job` by `inputs`."""

    file: str | None = None
    """Path of a job file, or of another framework's configuration."""
    source: Mapping[str, Any] | Configuration = field(default_factory=dict)
    """Fields of a job, or another framework's configuration, that are not in a file."""
    bare: BareNumbers = BareNumbers()
    """Numbers that stand for a model or a cluster."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values that override those of the source, by the path of their field: ``model``, ``strategy.tp``."""


JobSource = Job | JobArguments | Mapping[str, Any] | str | PathLike[str]


class JobKeywords(TypedDict, total=False):
    """Keywords that describe a job or override one; a plan takes bounds for those of the strategy: ``tp="2..8"``."""

    # Made by docs/make_fields.py:
    strategy: Mapping[str, Any]
    training: Mapping[str, Any]
    run: Mapping[str, Any]
    model: Mapping[str, Any] | Model | str
    cluster: Cluster | Mapping[str, Any] | str
    tp: int | str
    cp: int | str
    dp: int | str
    pp: int | str
    ep: int | str
    expert_tp: int | str
    sequence_parallel: bool
    zero: int | str
    shard_group: int | str
    keep_parameters: bool
    accumulate: str
    order: Sequence[str] | str
    microbatch: int | str
    schedule: str
    interleave: int | str
    stage_layers: Sequence[int] | str
    stage_tp: Sequence[int] | str
    stage_dp: Sequence[int] | str
    dp_shares: Sequence[int] | str
    recompute: str
    recompute_operators: Sequence[str] | str
    recompute_layers: int | str
    context_method: str
    dispatch: str
    overlap: Mapping[str, Any]
    collective: str
    bucket: float | str
    compression: Mapping[str, Any] | str
    synchronise: Mapping[str, Any] | str
    global_batch: int | str
    seq: int | str
    precision: str
    optimizer: str
    attention: str
    dropout: bool
    compile: bool
    graphs: bool | str
    optimization: Mapping[str, Any]
    task: str
    adapters: Mapping[str, Any]
    trained: Sequence[str] | str
    base_precision: str
    preference: Mapping[str, Any]
    lengths: Mapping[str, Any]
    checkpoint_interval: float | str
    stack: Mapping[str, Any] | Stack | str
    memory_risk: float | str
    gpus: int | str
    gpus_per_node: int | str
    params: float | int | str
    layers: int | str
    hidden: int | str
    heads: int | str
    kv_heads: int | str
    ffn: int | str
    vocab: int | str
    topology: str
    shape: str
    bandwidth: float | int | str
    latency: float | int | str
    device: Device | Mapping[str, Any] | str


def job_arguments(job: JobSource | None, keywords: Mapping[str, Any]) -> JobArguments:
    """The arguments of a call of the API; raises SpecError for an unknown keyword."""
    if isinstance(job, JobArguments):
        return job
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        if value is None:
            continue
        if name in parts():
            values |= {f"{name}.{inner}": inside for inner, inside in _mapping(name, value).items()}
        else:
            values[_path(name)] = value if name in ("model", "cluster") else _plain(value)
    if job is None or isinstance(job, Mapping):
        return arguments_of(values, source=job or {})
    if isinstance(job, Job):
        return arguments_of(values, source=job.to_dict())
    if isinstance(job, (str, PathLike)):
        return arguments_of(values, path_text(job, "job"))
    raise SpecError("job", f"{shown(job)} is not a job", "give a Job, the path of a job file, or a mapping of fields")


def arguments_of(
    values: Mapping[str, Any], file: str | None = None, source: Mapping[str, Any] | None = None
) -> JobArguments:
    """The arguments with values by path, of which some are bare numbers, over those of a file or a mapping."""
    numbers = {path for path, record in job_fields().items() if record.owner is BareNumbers} & values.keys()
    bare = BareNumbers(**{path: values[path] for path in numbers})
    overrides = {path: value for path, value in values.items() if path not in numbers}
    return JobArguments(file=file, source=source or {}, bare=bare, overrides=overrides)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Spec):
        return value.to_dict()
    if not isinstance(value, Mapping):
        raise SpecError(name, f"{shown(value)} should be a mapping of fields", f"give {name}=dict(...)")
    return value


def _path(name: str) -> str:
    known = keyword_paths()
    if name not in known:
        raise SpecError(name, "is not a keyword of a job", nearest_name(name, [*known, *parts()]))
    return known[name]


def _plain(value: Any) -> Any:
    """Plain data as in a file: lists for tuples, mappings for parts of a strategy."""
    if isinstance(value, tuple):
        return list(value)
    return value.to_dict() if hasattr(value, "to_dict") else value
