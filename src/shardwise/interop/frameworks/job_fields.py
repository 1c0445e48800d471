"""Which fields of a job matter, in one comparable form.

A field that has no effect (the pipeline schedule of a job without a pipeline, the expert degrees of a dense
model) is left out, so that no target is blamed for not carrying it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from shardwise.spec import rules
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.run import Run
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

_DESCRIBING = ("name", "source", "published_parameters")  # of a model, no part of its shape


def said_by(job: Job) -> dict[str, Any]:
    """The fields of strategy and training that matter, by dotted path, defaults filled in."""
    strategy, experts = job.strategy, job.model.moe is not None
    many = {name: strategy.degree(name) > 1 for name in ("tp", "cp", "dp", "pp")}
    recompute, offload = strategy.recompute, strategy.offload.any
    zero = comparable("strategy.zero", strategy.zero, job)
    matters = {
        "ep": experts,
        "expert_tp": experts,
        "sequence_parallel": many["tp"],
        "shard_group": zero > 0,
        "keep_parameters": zero == 3,
        "accumulate": zero >= 2,
        "schedule": many["pp"],
        "interleave": many["pp"] and strategy.schedule_record.chooses_chunks,
        "stage_layers": many["pp"],
        "recompute_operators": recompute == "selective",
        "recompute_layers": recompute != "none",
        "context_method": many["cp"],
        "dispatch": strategy.ep > 1,
        "overlap.dp": strategy.gradient_group > 1,
        "overlap.tp": many["tp"],
        "overlap.pp": many["pp"],
        "overlap.cp": many["cp"],
        "overlap.ep": strategy.ep > 1,
        "overlap.offload": offload,
        "offload.target": offload,
    }
    paths = [f"strategy.{path}" for path in _paths(strategy) if matters.get(path, True)]
    paths += [f"training.{path}" for path in _paths(job.training) if _optimization_matters(path, job)]
    paths += ["run.steps", *(f"run.schedule.{name}" for name in _schedule_that_matters(job))]
    return {path: comparable(path, value_at(job, path), job) for path in paths}


def steps_of(job: Job) -> int:
    """Optimizer steps of the run: as many as its tokens take, where it counts these."""
    tokens = job.training.tokens
    return job.run.steps if tokens is None else -(-tokens // job.tokens_per_step)


def _optimization_matters(path: str, job: Job) -> bool:
    """Whether a field below ``training`` has an effect: constants of other optimizers and formats have none."""
    optimizer, scaling = job.training.optimizer, job.training.optimization.loss_scaling
    name = path.removeprefix("optimization.")
    if name == path:
        return True
    if name.startswith("loss_scaling."):
        used = name == "loss_scaling.static" or scaling.static is None
        return job.training.precision == "fp16" and used
    if name == "momentum":
        return optimizer in ("sgd-momentum", "muon")
    return name not in ("beta1", "beta2", "epsilon") or not optimizer.startswith("sgd")


def _schedule_that_matters(job: Job) -> list[str]:
    kind = job.run.schedule.kind
    falls = ["final"] if kind != "constant" else []
    return ["kind", "warmup", "reference_batch", *falls, *(["decay"] if kind == "wsd" else [])]


def comparable(path: str, value: Any, job: Job) -> Any:
    """A field's value in the form in which two of them are equal when they mean the same for ``job``."""
    strategy = job.strategy
    if path == "strategy.zero":
        return value if strategy.sharding_group > 1 else 0  # one rank shards nothing
    if path == "strategy.order":
        return tuple(name for name in value if strategy.degree(name) > 1)
    if path == "strategy.shard_group":
        return value or strategy.gradient_group
    if path == "strategy.expert_tp":
        return value or strategy.tp
    if path == "strategy.stage_layers":
        counts = rules.stage_layer_counts(job.model, strategy) if isinstance(value, str) else tuple(value)
        return "even" if len(set(counts)) == 1 or value == "even" else counts
    if path == "strategy.recompute_operators":
        own = job.unchecked(strategy=strategy.unchecked(recompute_operators=tuple(value)))
        return tuple(sorted(set(own.selective_operators)))
    if path == "run.steps":
        return value if job.training.tokens is None else steps_of(job)
    if path == "run.schedule.decay":
        return math.ceil(round(value * steps_of(job), 6))
    if path == "training.global_batch":
        return job.sequences if isinstance(value, str) else value
    return value


@functools.cache
def default_of(path: str) -> Any:
    """What a field is when nothing says it; None for a path without a default."""
    noun, _, rest = path.partition(".")
    owner: Any = {"strategy": Strategy(), "training": Training(), "run": Run()}.get(noun)
    for name in rest.split("."):
        owner = getattr(owner, name, None)
    return owner


def value_at(job: Job, path: str) -> Any:
    owner: Any = job
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner


def shape_of(model: Model) -> dict[str, Any]:
    """The fields of a model that make its shape, by dotted path below ``model``."""
    shape = {path: value for path, value in _values(model).items() if path not in _DESCRIBING}
    if model.mla is not None:
        # The projections follow from the latent sizes; these two only repeat them.
        shape.pop("head_dim"), shape.pop("kv_heads")
    if model.positions != "learned":
        shape.pop("max_seq")  # a limit, without parameters
    if model.norm == "rmsnorm":
        shape.pop("norm_bias")
    if model.sliding_window is None:
        shape.pop("sliding_window_every")
    if model.moe is not None and model.moe_layers == model.layers:
        shape.pop("ffn")  # no dense layer has it
    return {f"model.{path}": value for path, value in shape.items()}


def _values(noun: Any, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(noun):
        value = getattr(noun, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
            values.update(_values(value, f"{prefix}{field.name}."))
        else:
            values[prefix + field.name] = value
    return values


def _paths(noun: Any) -> list[str]:
    return list(_values(noun))
