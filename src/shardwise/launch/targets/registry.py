"""The launch targets by name. A target that `starts` ranks supervises them; the others write a file to submit.

A target that `writes` shares this machine's storage, where the run is prepared; one that `renders` a manifest does not,
and puts the job file into it. A new target is a row here and a module with its `OPTIONS` and `start_on(request)`, or
`write_for(request, ...)` and, if its file can be submitted from here, `submitted(written)` and
`run_command(request, command)`.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from shardwise.launch.local import Layouts, StartRanks
from shardwise.launch.targets.hosts import Host, read_hosts
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import read_text
from shardwise.spec.job import Job


@dataclass(frozen=True)
class LaunchTarget:
    """Where ranks can be started. `target_named` adds what the user has said of it."""

    name: str
    what: str
    kind: Literal["starts", "writes", "renders"]
    module: str
    """Imported when the target is chosen."""
    file: str = ""
    """The file of hosts."""
    given: OptionValues = field(default_factory=dict)
    """Its options that were given."""

    @property
    def options(self) -> Mapping[str, TargetOption]:
        options: Mapping[str, TargetOption] = importlib.import_module(self.module).OPTIONS
        return options

    def option(self, name: str) -> str | None:
        """The value of an option; None if it was not given."""
        values = self.given.get(name)
        return None if values is None else values[-1]

    def hosts(self) -> list[Host] | None:
        """The hosts of a host file, in its order; None if a manager chooses the hosts."""
        if not self.file:
            return None
        return read_hosts(read_text(self.file, "file of hosts", errors="replace"), self.file)

    def host_names(self) -> list[str] | None:
        hosts = self.hosts()
        return None if hosts is None else [host.address for host in hosts]


HOSTS = LaunchTarget(
    "FILE", "hosts over ssh, one in a line: `host slots=8`", "starts", "shardwise.launch.targets.host_target"
)
TARGETS = {
    target.name: target
    for target in (
        LaunchTarget(
            "slurm", "a script for sbatch; other verbs than train: srun", "writes", "shardwise.launch.targets.slurm"
        ),
        LaunchTarget("ray", "a Ray cluster, or one of this machine", "starts", "shardwise.launch.ray.target"),
        LaunchTarget(
            "kubernetes", "manifests for Kubeflow Trainer or JobSet", "renders", "shardwise.launch.targets.kubernetes"
        ),
        LaunchTarget("skypilot", "a task for SkyPilot", "renders", "shardwise.launch.targets.skypilot"),
    )
}
_DEVICES = ("cpu", "cuda")  # the meaning of `--on` in earlier versions


@dataclass(frozen=True)
class TargetRequest:
    target: LaunchTarget
    job: Job
    folder: Path | None = None  # of a run; None for other commands


class SubmittedJob(Protocol):
    number: str

    def wait(self) -> int:
        """Its exit status, once it has ended."""


class StartsRanks(Layouts, Protocol):
    """A target that starts ranks: `start` starts one attempt; ``notes`` are for the user."""

    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def start(self) -> StartRanks: ...


@dataclass(frozen=True)
class Written:
    """A file to submit by ``command``."""

    path: Path
    command: tuple[str, ...]


def target_named(text: str) -> LaunchTarget:
    """The target with its options, or a file of hosts; raises SpecError for any other text."""
    if not isinstance(text, str):
        raise SpecError("⟨on⟩", f"{shown(text)} is not a launch target", f"use {', '.join(TARGETS)}")
    name, *words = [text] if _is_file(text) else words_of(text) or [""]
    if name in TARGETS:
        target = TARGETS[name]
    elif _is_file(name):
        target = replace(HOSTS, file=name)
    else:
        raise _unknown(name)
    if not words:
        return target
    return replace(target, given=checked_options(name, words, target.options))


def _is_file(text: str) -> bool:
    return "\0" not in text and Path(text).is_file()


def _unknown(name: str) -> SpecError:
    if name in _DEVICES:
        remedy = f"say ⟨run_device={name}⟩; `train` takes its device from the job (⟨run.device={name}⟩)"
        return SpecError("⟨on⟩", f"{name} is a device, not a launch target", remedy)
    if "/" in name or "." in name:
        return SpecError("⟨on⟩", f"there is no file of hosts {shown(name)}", "write one host in a line: `host slots=8`")
    remedy = f"name a file of hosts, or {', '.join(TARGETS)}"
    return SpecError("⟨on⟩", f"{shown(name)} is not a launch target", remedy)


def started_on(request: TargetRequest) -> AbstractContextManager[StartsRanks]:
    """Checks the hosts of a target that `starts`, before any rank starts."""
    started: AbstractContextManager[StartsRanks] = importlib.import_module(request.target.module).start_on(request)
    return started


def submitted(target: LaunchTarget, written: Written) -> SubmittedJob:
    job: SubmittedJob = importlib.import_module(target.module).submitted(written)
    return job


def command_status(request: TargetRequest, command: Sequence[str]) -> int:
    """Runs a command as the job's ranks, on a target that `writes` but can also run one; its exit status."""
    run = getattr(importlib.import_module(request.target.module), "run_command", None)
    if run is None:
        problem = f"{request.target.name} only writes a file for `train`"
        raise SpecError("⟨on⟩", problem, "name a file of hosts, or slurm")
    status: int = run(request, command)
    return status


def written_for(request: TargetRequest, **more: Any) -> Written:
    name, run = request.target.name, request.job.run
    if run.restarts.shrink:
        problem = f"a script for {name} starts as many ranks as the job has"
        raise SpecError("run.restarts.shrink", problem, "leave it out")
    if run.checkpoints.memory is not None:
        problem = f"a script for {name} starts ranks, and no process beside them that keeps the copies"
        raise SpecError("run.checkpoints.memory", problem, "leave it out")
    if run.recut is not None:
        raise SpecError("run.recut", f"a script for {name} has no launcher to re-cut the stages", "leave it out")
    written: Written = importlib.import_module(request.target.module).write_for(request, **more)
    return written


# -- options of a target, behind its name: `slurm,time=4:00:00,submit` -------------------------------
# Commas separate them. A comma that belongs to a value is escaped (`comment=a\, b`) or in quotes (`comment="a, b"`).

OptionValues = Mapping[str, tuple[str, ...]]
"""The values of each option that was given; an option without one has an empty text."""


def any_line(text: str) -> bool:
    return text.strip() != "" and "\n" not in text


@dataclass(frozen=True)
class TargetOption:
    what: str
    """Its value, in the words of an error and of `shardwise list targets`."""
    accepts: Callable[[str], object] | None = any_line
    """Whether a text is such a value. None: the job decides, and the option is refused."""
    several: bool = False
    """It may be given several times."""
    alone: bool = False
    """It may be given without a value."""
    names: tuple[str, ...] = ()
    """Names of options that are all like this one; without them its key in the table is its name."""


def words_of(text: str) -> list[str]:
    """The target's name and its options."""
    words = shlex.shlex(text, posix=True)
    words.whitespace, words.whitespace_split, words.commenters = ",", True, ""
    try:
        return [word.strip() for word in words]
    except ValueError as error:  # a quotation or an escape without its end
        raise SpecError("⟨on⟩", f"{shown(text)}: {str(error).lower()}", "write it like slurm,time=4:00:00") from None


def text_of(words: Sequence[str]) -> str:
    """The text that has these words."""
    return ",".join(re.sub(r"([\\,'\"])", r"\\\1", word) for word in words)


def checked_options(target: str, words: Sequence[str], table: Mapping[str, TargetOption]) -> OptionValues:
    """Raises SpecError for the first option that is unknown, malformed or given twice.

    Dashes before a name are optional, but let the table's option "--" pass on names that it does not know.
    """
    known = {name: option for key, option in table.items() for name in option.names or (key,)}
    values: dict[str, tuple[str, ...]] = {}
    for word in words:
        dashed, equals, value = word.partition("=")
        name = dashed.removeprefix("--")
        option = known.get(name) or (known.get("--") if dashed != name else None)
        if option is None:
            raise SpecError("⟨on⟩", f"{shown(dashed)} is not an option of {target}", _remedy(name, known))
        if option.accepts is None:
            raise SpecError("⟨on⟩", f"{name} follows from the job", "leave it out")
        if not (option.accepts(value) if equals else option.alone):
            remedy = f"write it like {name}{'' if option.alone else '=...'}"
            raise SpecError("⟨on⟩", f"{shown(word)}: {name} is {option.what}", remedy)
        if name in values and not option.several:
            raise SpecError("⟨on⟩", f"{name} is given twice", "give it once")
        values[name] = (*values.get(name, ()), value)
    return values


def _remedy(name: str, known: Mapping[str, TargetOption]) -> str:
    if elsewhere := next((other for other, target in TARGETS.items() if name in target.options), ""):
        return f"it is for ⟨on={elsewhere}⟩"
    return nearest_name(name, known) or "`shardwise list targets` has them" if known else "leave it out"
