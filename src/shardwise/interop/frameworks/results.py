"""What an export and an import return: files and what they lose; fields of a job, and what was not used of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.frameworks.job_fields import fitting_run
from shardwise.interop.keys import unflatten
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.run import Run


@dataclass(frozen=True)
class Lost:
    """A field of the job that is not in the target's configuration."""

    field: str
    """Its dotted path."""
    value: Any
    """Its value in the job."""
    why: str
    """Why it is lost, or where it is set instead."""
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

    target: str
    """Name of the framework."""
    fields: Mapping[str, Any]
    """Fields by dotted path (`strategy.tp`, `model.layers`)."""
    unused: tuple[str, ...] = ()
    """Settings that a job has no field for."""
    notes: tuple[str, ...] = ()
    """How some settings were understood."""
    no_model: str = ""
    """Why the model that it names cannot be read, if so."""
    devices: int | None = None
    """Devices that it is written for, where it says so."""
    title: str = ""
    """The framework's name in full."""

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
