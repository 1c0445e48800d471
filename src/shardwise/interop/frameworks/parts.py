"""What an exporter hands out and an importer hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.run import Run


@dataclass(frozen=True)
class Lost:
    """A field of the job that the target's configuration does not carry.

    ``elsewhere``: the framework can do it, but takes it from the training script or the launcher, not from this
    configuration. Otherwise the framework lacks it: what it would run differs from the job.
    """

    field: str
    value: Any
    why: str
    elsewhere: bool = False

    @property
    def of_strategy(self) -> bool:
        return self.field.startswith("strategy.")

    @property
    def short_field(self) -> str:
        """Its path, without the section that most are in."""
        return self.field.removeprefix("strategy.")

    def within(self, *paths: str) -> bool:
        """Whether it is one of these fields, or lies in one of these sections."""
        return any(self.field == path or self.field.startswith(f"{path}.") for path in paths)

    def __str__(self) -> str:
        return f"{self.field} = {plain(self.value)}: {self.why}"


@dataclass(frozen=True)
class Exported:
    """A job in a target's own format: its files by name, and what they cannot express."""

    target: str
    version: str
    files: Mapping[str, str]
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[Lost, ...]:
        """What the framework lacks for this job."""
        return tuple(one for one in self.lost if not one.elsewhere)

    @property
    def elsewhere(self) -> tuple[Lost, ...]:
        """What the user's training script or launcher must set."""
        return tuple(one for one in self.lost if one.elsewhere)

    def strict(self) -> Exported:
        """Itself when nothing is missing; raises SpecError, naming all that is, otherwise."""
        if self.missing:
            what = "; ".join(f"{one.field} = {plain(one.value)} ({one.why})" for one in self.missing)
            raise SpecError(self.target, f"cannot express {what}", "change the job, or export without --strict")
        return self


@dataclass(frozen=True)
class Imported:
    """What a target's configuration says: fields of a job by dotted path (``strategy.tp``, ``model.layers``).

    ``unused`` are settings that the configuration makes and a job has no field for; ``notes`` say how something
    was understood.
    """

    target: str
    fields: Mapping[str, Any]
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def nested(self) -> dict[str, Any]:
        """The fields as the nested mapping of a job file."""
        tree: dict[str, Any] = {}
        for path, value in self.fields.items():
            *parents, last = path.split(".")
            place = tree
            for name in parents:
                place = place.setdefault(name, {})
            place[last] = plain(value)
        return tree

    def job(self, cluster: Cluster, model: Model | None = None, **overrides: Any) -> Job:
        """The complete job: these fields on ``cluster``; ``model`` where the configuration names none.

        ``overrides`` are further fields by dotted path with ``__`` for the dot (``training__seq=8192``).
        """
        extra = {name.replace("__", "."): value for name, value in overrides.items()}
        tree = Imported(self.target, {**self.fields, **extra}).nested()
        if model is not None:
            tree["model"] = model
        elif "model" not in tree:
            raise SpecError("model", f"is not in a {self.target} configuration", "name it: --model llama3-8b")
        elif isinstance(tree["model"], dict):
            tree["model"] = Model.from_dict({"name": f"from-{self.target}", **tree["model"]}, "model")
        run = tree.pop("run", {})
        job = Job.from_dict({**tree, "cluster": cluster})
        if job.training.tokens is not None:
            run = {**run, "steps": -(-job.training.tokens // job.tokens_per_step)}
        return replace(job, run=Run.from_dict(fitting_run(run)[0], "run")) if run else job


def fitting_run(run: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a run with a warm-up that ends before the run does, and a note where that cut it.

    Frameworks accept a longer one and cut it too.
    """
    schedule, steps = run.get("schedule"), run.get("steps", Run().steps)
    warmup = schedule.get("warmup") if isinstance(schedule, Mapping) else None
    if not isinstance(warmup, int) or not isinstance(steps, int) or warmup < steps or not isinstance(schedule, Mapping):
        return dict(run), []
    note = f"a warm-up of {warmup:,} steps does not end in a run of {steps:,}: {max(0, steps - 1):,} are taken"
    return {**run, "schedule": {**schedule, "warmup": max(0, steps - 1)}}, [note]


def plain(value: Any) -> Any:
    """A value as a file or a message shows it: tuples as lists."""
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def wrong_type(key: str, value: object, wanted: str) -> SpecError:
    return SpecError(key, f"{shown(value)} is not {wanted}", "correct that value of the configuration")
