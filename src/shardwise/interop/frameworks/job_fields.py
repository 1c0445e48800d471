"""Which fields of a job have an effect, in a form that can be compared; and what an export and an import return.

Others (the pipeline schedule of a job without a pipeline, the expert degrees of a dense model) are left out: no
target loses anything by not having them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.keys import unflatten
from shardwise.spec import rules
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.run import Run, fitting_run
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

_DESCRIBING = ("name", "source", "published_parameters")  # fields of a model that do not affect its shape


def effective_fields(job: Job) -> dict[str, Any]:
    """The fields of strategy, training and run that have an effect, by dotted path, defaults filled in."""
    effects = effects_of(job)
    paths = [*_values(job.strategy, "strategy."), *_values(job.training, "training.")]
    paths += ["run.steps", *(f"run.schedule.{name}" for name in _schedule_fields(job))]
    return {path: comparable(path, value_at(job, path), job) for path in paths if effects.get(path, True)}


def effects_of(job: Job) -> dict[str, bool]:
    """Whether a field has an effect, of the fields of strategy and training that do not always have one."""
    strategy, experts = job.strategy, job.model.moe is not None
    tp, cp, pp, ep = strategy.tp > 1, strategy.cp > 1, strategy.pp > 1, strategy.ep > 1
    offload, zero = strategy.offload.any, comparable("strategy.zero", strategy.zero, job)
    of_strategy = {
        "ep": experts, "expert_tp": experts, "dispatch": ep, "overlap.ep": ep,
        "sequence_parallel": tp, "overlap.tp": tp,
        "context_method": cp, "overlap.cp": cp,
        "schedule": pp, "stage_layers": pp, "overlap.pp": pp,
        "interleave": pp and strategy.schedule_record.chooses_chunks,
        "shard_group": zero > 0, "accumulate": zero >= 2, "keep_parameters": zero == 3,
        "overlap.dp": strategy.gradient_group > 1,
        "recompute_operators": strategy.recompute == "selective", "recompute_layers": strategy.recompute != "none",
        "overlap.offload": offload, "offload.target": offload,
        "offload.folder": offload and strategy.offload.target == "nvme",
    }  # fmt: skip
    optimizer, scaled = job.training.optimizer, job.training.precision == "fp16"
    adam, dynamic = not optimizer.startswith("sgd"), job.training.optimization.loss_scaling.static is None
    of_training = {
        "momentum": optimizer in ("sgd-momentum", "muon"), "beta1": adam, "beta2": adam, "epsilon": adam,
        "loss_scaling.static": scaled,
        **{f"loss_scaling.{name}": scaled and dynamic for name in ("initial", "window", "hysteresis", "minimum")},
    }  # fmt: skip
    return {
        **{f"strategy.{path}": effect for path, effect in of_strategy.items()},
        **{f"training.optimization.{path}": effect for path, effect in of_training.items()},
    }


def with_schedule(job: Job, known: Collection[str]) -> Job:
    """The job as a framework runs it that knows only these pipeline schedules: others become 1f1b.

    A rank keeps its layers, as one stage instead of several. The job itself where its schedule is known.
    """
    strategy, record = job.strategy, job.strategy.schedule_record
    if strategy.pp == 1 or strategy.schedule in known:
        return job
    layers: str | tuple[int, ...] = strategy.stage_layers
    if not isinstance(layers, str) or job.model.layers % strategy.stages:
        counts = rules.stage_layer_counts(job.model, strategy)
        held = (record.stages_of(rank, strategy.pp, strategy.chunks_per_rank) for rank in range(strategy.pp))
        layers = tuple(sum(counts[stage] for stage in stages) for stages in held)
    return job.unchecked(strategy=strategy.unchecked(schedule=PLAIN, interleave=1, stage_layers=layers))


def steps_of(job: Job) -> int:
    """Optimizer steps of the run: given, or as many as its tokens take."""
    tokens = job.training.tokens
    return job.run.steps if tokens is None else -(-tokens // job.tokens_per_step)


def _schedule_fields(job: Job) -> list[str]:
    """The fields of the learning rate's schedule that have an effect."""
    kind = job.run.schedule.kind
    falls = ["final"] if kind != "constant" else []
    return ["kind", "warmup", "reference_batch", *falls, *(["decay"] if kind == "wsd" else [])]


def comparable(path: str, value: Any, job: Job) -> Any:
    """A field's value in a form in which two values are equal if they mean the same in ``job``."""
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
    """The default of a field; None for a path without one."""
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
    """The fields of a model that determine its shape, by dotted path."""
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
        shape.pop("ffn")  # there is no dense layer
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


# -- What an export and an import return: files and what they lose; fields of a job, and what was not used of a file


@dataclass(frozen=True)
class Lost:
    """A field of the job that is not in the target's configuration."""

    field: str  # its dotted path
    value: Any  # its value in the job
    why: str  # why it is lost, or where it is set instead
    elsewhere: bool = False
    """The framework takes it from the training script or the launcher. Otherwise the framework lacks it: what it would
    run differs from the job."""

    @property
    def short_field(self) -> str:
        """Its path, without the section that most are in."""
        return self.field.removeprefix("strategy.")

    def within(self, *paths: str) -> bool:
        """Whether it is one of these fields, or in one of these sections."""
        return any(self.field == path or self.field.startswith(f"{path}.") for path in paths)

    def __str__(self) -> str:
        return f"{self.field} = {plain(self.value)}: {self.why}"


@dataclass(frozen=True)
class Exported:
    """A job in a target's own format: its files by name, and the fields that they lose."""

    target: str
    version: str
    files: Mapping[str, str]
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Lost, ...]:
        """What the framework lacks for this job."""
        return tuple(lost for lost in self.lost if not lost.elsewhere)

    @property
    def elsewhere(self) -> tuple[Lost, ...]:
        """What the user's training script or launcher must set."""
        return tuple(lost for lost in self.lost if lost.elsewhere)

    def strict(self) -> Exported:
        """Itself if nothing is missing; otherwise raises SpecError with all that is."""
        if self.missing:
            what = "; ".join(f"{lost.field} = {plain(lost.value)} ({lost.why})" for lost in self.missing)
            raise SpecError(self.target, f"cannot express {what}", "change the job, or export without --strict")
        return self


@dataclass(frozen=True)
class Imported:
    """A target's configuration as fields of a job."""

    target: str  # name of the framework
    fields: Mapping[str, Any]  # fields by dotted path (`strategy.tp`, `model.layers`)
    unused: tuple[str, ...] = ()  # settings that a job has no field for
    notes: tuple[str, ...] = ()  # how some settings were understood
    no_model: str = ""  # why the model that it names cannot be read, if so
    devices: int | None = None  # devices that it is written for, where it says so
    title: str = ""  # the framework's name in full
    recognised_by: tuple[str, ...] = ()  # of its settings those that only this framework's files have

    @property
    def kind(self) -> str:
        """What it was read as, and why."""
        by = ", ".join(self.recognised_by[:3]) or "its suffix"
        return f"{'an' if self.title[:1] in 'AEIO' else 'a'} {self.title} file (recognised by {by})"

    @property
    def not_priced(self) -> tuple[str, ...]:
        """What to say of the settings that are not used."""
        return tuple(f"{setting} is known to {self.title or self.target}, not priced here" for setting in self.unused)

    def nested(self) -> dict[str, Any]:
        """The fields as the nested mapping of a job file."""
        return unflatten({path: plain(value) for path, value in self.fields.items()})

    def without_model(self) -> SpecError:
        problem = self.no_model or f"is not in a {self.target} configuration"
        return SpecError("model", problem, "name one: ⟨model=llama3-8b⟩ (`shardwise list models`), or a config.json")

    def job(self, cluster: Cluster, model: Model | None = None) -> Job:
        """The complete job: these fields on ``cluster``; ``model`` where the configuration names none."""
        tree = self.nested()
        if model is not None:
            tree["model"] = model
        elif "model" not in tree:
            raise self.without_model()
        elif isinstance(tree["model"], dict):
            tree["model"] = Model.from_dict({"name": f"from-{self.target}", **tree["model"]}, "model")
        run = tree.pop("run", {})
        job = Job.from_dict({**tree, "cluster": cluster})
        if job.training.tokens is not None:
            run = {**run, "steps": -(-job.training.tokens // job.tokens_per_step)}
        return replace(job, run=Run.from_dict(fitting_run(run)[0], "run")) if run else job


def plain(value: Any) -> Any:
    """A value as a file or a message shows it: tuples as lists."""
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value
