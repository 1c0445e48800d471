"""What `train` takes besides a job: one record for the API and the command line, and a table of what excludes what."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, Self, TypedDict

from shardwise.api.given import JobArguments
from shardwise.launch.targets.registry import LaunchTarget, target_named, text_of
from shardwise.run.environment import Started
from shardwise.spec.bare import Size
from shardwise.spec.errors import SpecError
from shardwise.spec.units import parse


def _sets(path: str, metavar: str, **also: Any) -> Any:
    """An option that sets the field ``path`` of the job, and those of ``also``, as any flag does."""
    return field(default=None, metadata={"path": path, "metavar": metavar, **also})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run. Most set a field of the job."""

    run_folder: str | PathLike[str] | None = _sets("run.folder", "DIR")
    """Folder of the run (default runs/NAME of the job)."""
    go_on: bool = False
    """Resume from the folder's weights and position even if data, sequence, batch or optimizer differ."""
    steps: int | str | None = _sets("run.steps", "N")
    """Steps to train; a resumed run includes those before (default: what training.tokens needs, or 1000)."""
    data: tuple[str, ...] | str | None = _sets("run.data.shards", "SHARDS")
    """Data to train on; token shards, named without a suffix, repeated for several (default: the built-in corpus)."""
    grace: Size = field(default="30s", metadata={"metavar": "TIME"})
    """Time allowed for the final checkpoint (default 30s)."""
    emulate: str | None = _sets("run.emulate", "NODES")
    """Run on virtual nodes of this machine; 2x2,1Gbit,1ms is 2 nodes of 2 ranks (as root; docs/emulate.md)."""
    on: str | None = field(default=None, metadata={"metavar": "TARGET[,OPTION=...]"})
    """Run on other hosts; TARGET is ray or a file of hosts (`host slots=8`, over ssh); slurm, kubernetes and skypilot
    write what starts the processes: a script, manifests, a task (options: `shardwise list targets`)."""
    wait_for_resources: Size | None = _sets("run.restarts.wait", "TIME")
    """How long to wait for missing devices (default 60s; run.restarts.wait)."""
    least_devices: int | str | None = _sets("run.restarts.least_devices", "N", also={"run.restarts.shrink": True})
    """After losing devices, replan for those left, N or more, and for all when they return (run.restarts.shrink)."""
    profile: str | None = _sets("run.profile", "STEPS")
    """Record these steps for `compare`, such as steps=10:12."""
    nvtx: str | None = _sets("run.nvtx", "STEPS")
    """Mark steps, their phases and layers as NVTX ranges for nsys; such as steps=10:12."""
    metrics_port: int | str | None = _sets("run.logging.metrics_port", "PORT")
    """Serve the state of the run to Prometheus on 127.0.0.1; 0 is any free port."""
    debug: bool = False
    """Compare every collective between ranks (slow)."""

    def __post_init__(self) -> None:
        _ = self.grace_seconds  # refused before anything else is done

    @classmethod
    def taken_from(cls, values: Mapping[str, Any]) -> Self:
        """From the flags or keywords that are options, and are not None."""
        names = [item.name for item in fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @property
    def grace_seconds(self) -> float:
        return float(parse(self.grace, "seconds", "⟨grace⟩"))

    def over(self, given: JobArguments) -> JobArguments:
        """The job with the fields that the options set."""
        overrides: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if "path" in item.metadata and value not in (None, (), []):
                overrides |= {item.metadata["path"]: value, **item.metadata.get("also", {})}
        if self.data:
            overrides["run.data.shards"] = [self.data] if isinstance(self.data, str) else list(self.data)
        if self.run_folder is not None:
            overrides["run.folder"] = str(self.run_folder)
        return replace(given, overrides={**given.overrides, **overrides})


class RunKeywords(TypedDict, total=False):
    """The options as keywords of `train`; a test holds both equal."""

    run_folder: str | PathLike[str] | None
    go_on: bool
    steps: int | str | None
    data: Sequence[str]
    grace: Size
    emulate: str | None
    on: str | None
    wait_for_resources: Size | None
    least_devices: int | str | None
    profile: str | None
    nvtx: str | None
    metrics_port: int | str | None
    debug: bool


def option_paths() -> dict[str, str]:
    """The path of the field that an option sets, for those that do."""
    return {item.name: item.metadata["path"] for item in fields(RunOptions) if "path" in item.metadata}


def on_with_address(on: str | None, ray_address: str | None) -> str | None:
    """Until version 1.0: ``ray_address``, which is an option of the target now."""
    if ray_address is None:
        return on
    if on != "ray":
        raise SpecError("⟨ray_address⟩", "is for ⟨on=ray⟩", "leave it out")
    new = f"{on},{text_of([f'address={ray_address}'])}"
    warnings.warn(f'ray_address will go in shardwise 1.0: on="{new}"', DeprecationWarning, stacklevel=4)
    return new


@dataclass(frozen=True)
class RunPlace:
    """Where the ranks of a run are, and who starts them; by default this process, here."""

    started_as: Started | None = None
    """The rank that this process was started as."""
    target: LaunchTarget | None = None
    """Other hosts, or what writes a file that starts the ranks."""
    printed: bool = False
    """Commands that are printed start the ranks."""

    @classmethod
    def of(cls, on: str | None, started_as: Started | None = None, *, printed: bool = False) -> Self:
        return cls(started_as, None if on is None else target_named(on), printed)

    def host_names(self) -> list[str] | None:
        return None if self.target is None else self.target.host_names()

    @property
    def other_launcher(self) -> str | None:
        """Who starts the ranks instead of this process."""
        if self.started_as is not None:
            return self.started_as.launcher
        if self.target is not None and self.target.kind != "starts":
            return self.target.name
        return "torchrun" if self.printed else None

    @property
    def is_here(self) -> bool:
        """Whether the ranks are on this machine alone, and started by this process or beside it."""
        alone = self.started_as is None or self.started_as.hosts == 1
        return self.target is None and not self.printed and alone

    @property
    def facts(self) -> set[str]:
        """The words for it in the table below."""
        target = self.target
        facts = set() if self.started_as is None else {"a rank"}
        if target is None:
            return facts
        if target.kind == "writes" and "submit" not in target.given:
            facts.add("writes only")
        return {*facts, target.kind, *(["printed"] if target.option("out") == "-" else [])}


_WITH = "cannot be combined with ⟨{other}⟩"
_RANK = "{launcher} has started this as a rank"
_NOT_FOR = "is not for ⟨on={target}⟩"
# An option, what it cannot be combined with (an option, or a fact of a `RunPlace`), why not, and what to do.
EXCLUDED = (
    ("json", "print_torchrun", _WITH, "leave it out"),
    ("markdown", "print_torchrun", _WITH, "leave it out"),
    ("csv", "print_torchrun", _WITH, "leave it out"),
    ("debug", "print_torchrun", _WITH, "leave it out"),
    ("on", "print_torchrun", _WITH, "leave one of them out"),
    ("on", "rehearse", _WITH, "leave one of them out"),
    ("on", "emulate", _WITH, "leave one of them out"),
    ("on", "a rank", _RANK, "leave it out, or start it alone"),
    ("emulate", "a rank", _RANK, "leave it out, or start it alone"),
    ("rehearse", "a rank", _RANK, "rehearse without it"),
    ("metrics_port", "rehearse", _WITH, "leave it out"),
    ("debug", "renders", _NOT_FOR, "leave it out"),
    ("go_on", "renders", _NOT_FOR, "leave it out"),
    ("markdown", "renders", _NOT_FOR, "leave it out"),
    ("csv", "renders", _NOT_FOR, "leave it out"),
    ("markdown", "writes only", f"{_NOT_FOR} without submit", "leave it out"),
    ("csv", "writes only", f"{_NOT_FOR} without submit", "leave it out"),
    ("json", "printed", "cannot be combined with out=-", "leave one of them out"),
)


def require_compatible(given: Collection[str], place: RunPlace) -> None:
    """Raises SpecError for the first of the ``given`` options that the place, or another option, rules out."""
    true = {*given, *place.facts}
    words = {
        "launcher": "" if place.started_as is None else place.started_as.launcher,
        "target": "" if place.target is None else place.target.name,
    }
    for option, other, why, remedy in EXCLUDED:
        if option in given and other in true:
            raise SpecError(f"⟨{option}⟩", why.format(other=other, **words), remedy)
