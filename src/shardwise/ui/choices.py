"""What can be picked on the page: presets, and the values of every control.

A value comes with the other changes it entails, or with the reason why it is refused. Every value is tried: the checks
of a job (`spec.rules`) and the planner's support matrix give the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any

from shardwise.api.inputs import NOT_SEARCHED
from shardwise.interop.frameworks import TARGETS
from shardwise.planner.constraints import OFFLOADS, offload_name
from shardwise.planner.search.space import INTERLEAVES, MOST_MICROBATCH, MOST_TENSOR, shard_groups
from shardwise.planner.search.supported import findings_of
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from, cluster_short
from shardwise.spec.errors import SpecError
from shardwise.spec.fields import job_fields
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import active_parameter_count, parameter_count
from shardwise.spec.rules import divisors
from shardwise.spec.schedules import PLAIN, schedule_record
from shardwise.spec.strategy import Offload, Strategy
from shardwise.spec.units import readable_count

# The job of a page that is opened without one, as in the README.
FIRST: dict[str, Any] = {
    "model": "llama3-70b", "cluster": "dgx-h100:8", "global_batch": 512, "seq": 8192,
    "tp": 8, "pp": 2, "zero": 1, "precision": "bf16",
}  # fmt: skip


@cache
def catalogue() -> dict[str, Any]:
    """Presets by kind, the job to begin with, and which of its keywords a search varies."""
    return {
        "models": [_model(name) for name in presets.names("model")],
        "clusters": [_cluster(name) for name in presets.names("cluster")],
        "stacks": presets.names("stack"),
        "frameworks": list(TARGETS),
        "first": FIRST,
        "varied": [item.name for item in fields(Strategy) if item.name not in NOT_SEARCHED],
    }


def _model(name: str) -> dict[str, Any]:
    model = presets.load("model", Model, name)
    total, active = parameter_count(model), active_parameter_count(model)
    words = f"{readable_count(total)} parameters" + (f", {readable_count(active)} active" if model.moe else "")
    return {"name": name, "words": words, "max_seq": model.max_seq}


def _cluster(name: str) -> dict[str, Any]:
    """A cluster preset; ``shape`` is None unless its size is that of a mesh or torus."""
    cluster = cluster_from(name)
    shape = next((list(level.shape) for level in cluster.levels if level.shape), None)
    words = f"{cluster.node_devices} × {cluster.device.name} a node"
    return {"name": name, "words": words, "shape": shape, "devices": cluster.devices, "nodes": cluster.nodes}


_MOST_VALUES = 12  # of one control
_USUAL = Strategy()


@dataclass(frozen=True)
class ControlValue:
    value: Any
    label: str
    changes: Mapping[str, Any]
    """Keywords that choosing it sets; None resets one to its default."""
    chosen: bool = False
    refused: str = ""
    """Why it is impossible."""
    priced_only: str = ""
    """Why this project's engine does not run it, though it can be priced."""

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"value": self.value, "label": self.label, "set": dict(self.changes)}
        flags = {"chosen": self.chosen, "refused": self.refused, "priced_only": self.priced_only}
        return {**data, **{name: value for name, value in flags.items() if value}}


def choices(job: Job) -> dict[str, list[dict[str, Any]]]:
    """The values of every control, by the name of its field; none for those without effect on this job."""
    strategy = job.strategy
    offered: dict[str, Iterator[ControlValue]] = {
        **{name: _degrees(job, name) for name in ("tp", "pp", "cp", "ep")},
        "dp": _replicas(job),
        "zero": _tried(job, "zero"),
        "shard_group": _tried(job, "shard_group", shard_groups(strategy)) if strategy.zero else iter(()),
        "microbatch": _tried(job, "microbatch", _doublings(MOST_MICROBATCH, strategy.microbatch)),
        "schedule": _schedules(job),
        "interleave": _interleaves(job),
        "recompute": _tried(job, "recompute"),
        "context_method": _tried(job, "context_method") if strategy.cp > 1 else iter(()),
        "sequence_parallel": _tried(job, "sequence_parallel", (True, False)) if strategy.tp > 1 else iter(()),
        "offload": _offloads(job),
        "precision": _trainings(job, "precision"),
        "optimizer": _trainings(job, "optimizer"),
    }
    return {name: [value.to_dict() for value in values] for name, values in offered.items()}


def _doublings(most: int, present: int) -> list[int]:
    return sorted({present, *(2**power for power in range(24) if 2**power <= most)})


def _degrees(job: Job, name: str) -> Iterator[ControlValue]:
    """Divisors of the number of devices, also those that the model refuses; at most a dozen, and the present degree."""
    if name == "ep" and job.model.moe is None:
        return _tried(job, name, (1, 2))
    most = {"tp": MOST_TENSOR, "pp": 2 * job.model.layers}.get(name, job.cluster.devices)
    present = getattr(job.strategy, name)
    usual = [degree for degree in divisors(job.cluster.devices) if degree <= most]
    if len(usual) > _MOST_VALUES:
        usual = [degree for degree in usual if degree & (degree - 1) == 0]
    return _tried(job, name, sorted({present, *usual[:_MOST_VALUES]}))


def _tried(job: Job, name: str, values: Iterable[Any] | None = None) -> Iterator[ControlValue]:
    """The given values of a field of the strategy, or all that it can have, each tried on the job."""
    for value in job_fields()[f"strategy.{name}"].choices if values is None else values:
        changes = {name: value, **_follows(job.strategy, name, value)}
        offered = _staged if name in ("pp", "interleave") else _choice
        yield offered(job, name, value, changes, _label(name, value))


def _staged(job: Job, name: str, value: Any, changes: Mapping[str, Any], label: str) -> ControlValue:
    """A value with equal stages, or with balanced ones if the layers do not divide evenly."""
    even = _choice(job, name, value, changes, label)
    if not even.refused or job.strategy.stage_layers != _USUAL.stage_layers:
        return even
    balanced = _choice(job, name, value, {**changes, "stage_layers": "balanced"}, label)
    return even if balanced.refused else balanced


def _label(name: str, value: Any) -> str:
    if name == "sequence_parallel":
        return "on" if value else "off"
    return "all" if value is None else str(value)


def _follows(strategy: Strategy, name: str, value: Any) -> dict[str, Any]:
    """Other keywords to change with the value, such as those that it makes meaningless."""
    changes: dict[str, Any] = {}
    if value == getattr(strategy, name):
        return changes
    if name in ("tp", "cp", "pp"):
        changes["dp"] = None
    if name == "pp":
        if isinstance(strategy.stage_layers, tuple):
            changes["stage_layers"] = "balanced"
        if value == 1:
            changes |= {"schedule": None, "interleave": None}
    if name == "zero":
        changes["shard_group"] = strategy.shard_group if value else None
        changes |= {"keep_parameters": None} if value < 3 else {}
    return changes


def _replicas(job: Job) -> Iterator[ControlValue]:
    """Numbers of replicas, each with the nodes, or the part of a node, that it takes; the batch stays."""
    strategy, cluster = job.strategy, job.cluster
    present, preset = strategy.data_parallel, _preset(cluster)
    if preset is None or strategy.has_unlike_stages:
        return
    width = preset.levels[0].width
    for value in sorted({present, *(2**power for power in range(24) if present / 8 <= 2**power <= 8 * present)}):
        devices = strategy.world // present * value
        try:
            grown = cluster if value == present else _grown(preset, devices)
        except SpecError as error:
            yield ControlValue(value, str(value), {}, refused=_line(error))
            continue
        whole = {"cluster": f"{preset.name}:{devices // width}", "gpus": None}
        size = whole if devices >= width else {"cluster": preset.name, "gpus": devices}
        # Not checked yet: the strategy is still that of the present cluster.
        other = job.unchecked(cluster=grown, strategy=strategy.unchecked(dp=None))
        changes = {} if value == present else {**size, "dp": None}
        yield _choice(other, "dp", value, changes, str(value), chosen=value == present)


# Cached: clusters change less often than layouts, and take longer to check.


@lru_cache(maxsize=256)
def _grown(preset: Cluster, devices: int) -> Cluster:
    return preset.with_devices(devices)


@lru_cache(maxsize=64)
def _preset(cluster: Cluster) -> Cluster | None:
    """The preset that a cluster is made of; None for a cluster that was written out."""
    if isinstance(cluster_short(cluster), str):
        return cluster_from(cluster.name)
    try:
        preset = cluster_from(cluster.name)
        return preset if preset.with_devices(cluster.devices) == cluster else None
    except SpecError:
        return None


def _schedules(job: Job) -> Iterator[ControlValue]:
    if job.strategy.pp == 1:
        return
    for name in job_fields()["strategy.schedule"].choices:
        chunks = max(2, job.strategy.interleave) if schedule_record(name).chooses_chunks else None
        changes = {"schedule": None if name == PLAIN else name, "interleave": chunks}
        yield _staged(job, "schedule", name, changes, name)


def _interleaves(job: Job) -> Iterator[ControlValue]:
    if job.strategy.pp == 1 or not job.strategy.schedule_record.chooses_chunks:
        return iter(())
    return _tried(job, "interleave", sorted({*INTERLEAVES, job.strategy.interleave}))


def _offloads(job: Job) -> Iterator[ControlValue]:
    if job.cluster.host_link is None:
        return
    present = offload_name(job.strategy.offload)
    for name, offload in OFFLOADS.items():
        yield _choice(job, "offload", name, {"offload": offload.to_dict() or None}, name, chosen=name == present)


def _trainings(job: Job, name: str) -> Iterator[ControlValue]:
    for value in job_fields()[f"training.{name}"].choices:
        yield _choice(job, name, value, {name: value}, value)


def _choice(
    job: Job, name: str, value: Any, changes: Mapping[str, Any], label: str, *, chosen: bool | None = None
) -> ControlValue:
    """The value, tried on the job; ``chosen`` is given where the job's field cannot be compared with the value."""
    noun = job.training if name in ("precision", "optimizer") else job.strategy
    is_present = getattr(noun, name, None) == value if chosen is None else chosen
    try:
        other = _with(job, changes)
    except SpecError as error:
        return ControlValue(value, label, changes, is_present, refused=_line(error))
    findings = findings_of(other)
    worst = next((finding for finding in findings if finding.status == "refused"), None)
    if worst is not None:
        return ControlValue(value, label, changes, is_present, refused=f"{worst.reason}; {worst.remedy}")
    # Findings that the present job has too are not due to this value.
    own = (
        findings if is_present or not findings else [finding for finding in findings if finding not in findings_of(job)]
    )
    lacks = f"{own[0].reason}; {own[0].remedy} runs here" if own else ""
    return ControlValue(value, label, changes, is_present, priced_only=lacks)


def _with(job: Job, changes: Mapping[str, Any]) -> Job:
    """The job with keywords changed, checked as a whole; each value by itself is valid, since it was made here."""
    named = ((name, value) for name, value in changes.items() if name not in ("cluster", "gpus"))  # the job has these
    own = {name: getattr(_USUAL, name) if value is None else value for name, value in named}
    training = {name: own.pop(name) for name in ("precision", "optimizer") if name in own}
    if isinstance(own.get("offload"), Mapping):
        own["offload"] = Offload.from_dict(own["offload"])
    strategy = job.strategy.unchecked(**own)
    strategy.check()
    other = job.unchecked(strategy=strategy, training=job.training.unchecked(**training))
    other.check()
    return other


def _line(error: SpecError) -> str:
    return str(SpecError("", error.problem, error.remedy))
