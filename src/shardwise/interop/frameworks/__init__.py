"""Jobs in the configuration formats of other training frameworks, and back; and what each framework runs of a job.

`TARGETS` has one entry per framework: ``export(job)`` writes its configuration and lists what is lost, ``read(text)``
understands one. A new framework is one file with a table, its option names under ``options/``, and a line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.interop.edits import edited
from shardwise.interop.frameworks.accelerate import ACCELERATE
from shardwise.interop.frameworks.automodel import AUTOMODEL
from shardwise.interop.frameworks.axolotl import AXOLOTL
from shardwise.interop.frameworks.colossalai import COLOSSALAI
from shardwise.interop.frameworks.deepspeed import DEEPSPEED
from shardwise.interop.frameworks.documents import Settings, command_words, with_settings
from shardwise.interop.frameworks.gpt_neox import GPT_NEOX
from shardwise.interop.frameworks.job_fields import Exported, Imported, Lost, effective_fields
from shardwise.interop.frameworks.levanter import LEVANTER
from shardwise.interop.frameworks.litgpt import LITGPT
from shardwise.interop.frameworks.llamafactory import LLAMAFACTORY
from shardwise.interop.frameworks.maxtext import MAXTEXT
from shardwise.interop.frameworks.megatron import MEGATRON
from shardwise.interop.frameworks.nanotron import NANOTRON
from shardwise.interop.frameworks.openrlhf import OPENRLHF
from shardwise.interop.frameworks.primus import BRIDGE, PRIMUS
from shardwise.interop.frameworks.target import Target
from shardwise.interop.frameworks.torchtitan import TORCHTITAN
from shardwise.interop.frameworks.torchtune import TORCHTUNE
from shardwise.interop.frameworks.trl import TRL
from shardwise.interop.frameworks.verl import VERL
from shardwise.interop.launches import ScriptLaunch, launch_of
from shardwise.interop.recognise import own_kind, suffix_of
from shardwise.spec import files, presets
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack, stack_from
from shardwise.spec.training import RECIPES

__all__ = ["READERS", "TARGETS", "Configuration", "Exported", "Imported", "Lost", "Target", "as_run_by", "can_run",
           "configuration_in", "configuration_of", "export", "framework_of", "lacking", "matching_precision",
           "own_stack", "read", "recognised", "started_by", "starts_another", "target"]  # fmt: skip

TARGETS: dict[str, Target] = {
    framework.name: framework for framework in (DEEPSPEED, MEGATRON, TORCHTITAN, ACCELERATE, NANOTRON, COLOSSALAI)
}
# Those whose configurations are read, which are not all written.
_RECIPES = (
    LEVANTER,
    BRIDGE,
    PRIMUS,
    AXOLOTL,
    LLAMAFACTORY,
    TORCHTUNE,
    LITGPT,
    GPT_NEOX,
    MAXTEXT,
    AUTOMODEL,
    VERL,
    OPENRLHF,
    TRL,
)
READERS: dict[str, Target] = {**TARGETS, **{framework.name: framework for framework in _RECIPES}}


def target(name: str) -> Target:
    """A target by name; raises SpecError with the nearest one for another name."""
    if name.lower() not in TARGETS:
        raise SpecError("target", f"{shown(name)} is not known", nearest_name(name, TARGETS))
    return TARGETS[name.lower()]


def export(job: Job, to: str) -> Exported:
    """The job as a configuration of the framework ``to``."""
    return target(to).export(job)


# -- configuration files -----------------------------------------------------------------------------


def read(
    path: Path | str,
    name: str | None = None,
    model: Model | None = None,
    cluster: Cluster | None = None,
    given: Mapping[str, Any] | None = None,
) -> Imported:
    """What a framework's configuration file says about a job.

    ``name`` is the framework (default: recognised by the file's settings); for the others see `Configuration.read`.
    """
    name = name or framework_of(path)
    if name is None:
        problem = f"{shown(str(path))} looks like none of {', '.join(READERS)}"
        raise SpecError("configuration", problem, "name the framework")
    if name.lower() not in READERS:
        raise SpecError("configuration", f"{shown(name)} is not known", nearest_name(name, READERS))
    return configuration_in(path, name.lower()).read(model, cluster, given)


@dataclass(frozen=True)
class Configuration:
    """The configuration of a framework, as text."""

    file: str  # name of its file, for error messages
    framework: str
    text: str
    folder: Path | None = None  # where other files that it names are read from
    settings: Settings = field(default_factory=dict)  # over those of the text, by dotted path
    launch: ScriptLaunch | None = None  # of the script that starts it, or that it is

    def read(
        self, model: Model | None = None, cluster: Cluster | None = None, given: Mapping[str, Any] | None = None
    ) -> Imported:
        """What it says about a job; raises SpecError if it is malformed, unknown or contradictory.

        ``model``, ``cluster`` and ``given`` (fields by dotted path: ``{"strategy.pp": 4}``) are known beside it.
        """
        sharding = self._sharding_of_accelerate(cluster)
        text = with_settings(self.text, self.file, self.settings) if self.settings else self.text
        try:
            read = READERS[self.framework].read(text, model, cluster, {**(given or {}), **sharding}, self._beside)
        except SpecError as error:
            raise SpecError(f"{self.file}: {error.field}".rstrip(": "), error.problem, error.remedy) from None
        return self._as_launched(read, sharding)

    def edited(self, settings: Mapping[str, Any]) -> Configuration:
        """The same with settings changed in its text (None: removed)."""
        return replace(self, text=edited(self.text, self.file, settings))

    def edits(self, job: Job, neighbours: Iterable[Job]) -> list[Settings]:
        """Changes of its settings that advice may try for ``job``, which it is."""
        framework = READERS[self.framework]
        own = framework.format.parse(self.text, self.file, framework.names) if self.text else {}

        def is_news(key: str, value: Any) -> bool:
            there = any(path == key or path.startswith(f"{key}.") for path in own)
            return there if value is None else own.get(key) != value

        found = framework.edits(own, job, neighbours) if own else ()
        kept = ({key: value for key, value in one.items() if is_news(key, value)} for one in found)
        return [settings for settings in kept if settings]

    def _sharding_of_accelerate(self, cluster: Cluster | None) -> dict[str, Any]:
        """What the file says that ``accelerate launch`` is given, where it is there."""
        text = self._beside(self.launch.accelerate) if self.launch is not None and self.launch.accelerate else None
        if text is None or self.launch is None:
            return {}
        size = {} if cluster is None else {"num_processes": cluster.devices}
        read = replace(self, file=self.launch.accelerate, framework=ACCELERATE.name, text=text, settings=size,
                       launch=None).read(cluster=cluster)  # fmt: skip
        unset = {"strategy.tp": 1, "strategy.cp": 1, "strategy.zero": 0}  # said by the other file, if at all
        strategy = {
            path: value for path, value in read.fields.items()
            if path.startswith("strategy.") and unset.get(path) != value
        }  # fmt: skip
        return {**strategy, DEVICES: read.devices}

    def _as_launched(self, read: Imported, sharding: Mapping[str, Any]) -> Imported:
        launch, notes, fields = self.launch, list(read.notes), dict(read.fields)
        if launch is None:
            return read
        if sharding:
            fields |= {path: value for path, value in sharding.items() if path != DEVICES}
            notes.append(f"{launch.accelerate} is read as the configuration of Accelerate")
        elif launch.accelerate:
            notes.append(f"{launch.accelerate} is not beside the script: how Accelerate shards is not known")
        notes += [f"{name} is set outside the script: left out" for name in launch.outside if self.settings]
        return replace(
            read, fields=fields, notes=tuple(notes), devices=launch.devices or sharding.get(DEVICES) or read.devices
        )

    def _beside(self, name: str) -> str | None:
        return None if self.folder is None else _text_beside(self.folder, name)


DEVICES, PROGRAM = "devices", "program"
_FOLDERS_ABOVE = 4  # paths are often from the root of a repository, and files in a folder below it


def _text_beside(folder: Path, name: str) -> str | None:
    """The text of a file that another in ``folder`` names: from there, or from a folder above; or beside it."""
    places = [folder / name, *(above / name for above in list(folder.absolute().parents)[:_FOLDERS_ABOVE])]
    inside = folder / Path(*Path(name).parts[-2:])
    try:
        path = next((path for path in (*places, folder / Path(name).name, inside) if path.is_file()), None)
    except (OSError, ValueError):  # not the name of a file
        return None
    return None if path is None else read_text(path)


def configuration_in(path: Path | str, framework: str) -> Configuration:
    """A file of the framework; raises SpecError if it cannot be read."""
    return _as_script(Configuration(Path(path).name, framework, read_text(path), Path(path).parent))


def configuration_of(text: str, name: str, folder: Path | None = None) -> Configuration | None:
    """The configuration of another framework that a text is, or that is started by it if it is a script."""
    suffix = suffix_of(text, name)
    framework = recognised(text, suffix)
    if framework is not None:
        return _as_script(Configuration(name, framework, text, folder))
    return started_by(text, name, folder) if suffix == ".sh" else None


def _as_script(configuration: Configuration) -> Configuration:
    """The configuration with its size, where it is a script that starts its framework itself."""
    if suffix_of(configuration.text, configuration.file) != ".sh":
        return configuration
    return replace(configuration, launch=launch_of(configuration.text, _programs(), configuration._beside))


def started_by(text: str, name: str, folder: Path | None = None) -> Configuration | None:
    """The configuration that a script starts: in the file that it names, or in its own options."""

    def beside(file: str) -> str | None:
        return None if folder is None else _text_beside(folder, file)

    launch = launch_of(text, _programs(), beside)
    if launch is None:
        return None
    framework = _of_program(launch)
    defaults = READERS[framework].defaults_in if framework is not None else ()
    named = [file for file in launch.files if Path(file).name not in defaults]
    for file in [*launch.files, *(f"{file}.yaml" for file in launch.files)]:  # whose suffix torchtune leaves out
        content = beside(file)
        if content is None:
            continue
        kind = framework or recognised(content, suffix_of(content, file))
        if kind is not None:
            above = None if folder is None else folder / Path(file).parent
            above = above if above is not None and above.is_dir() else folder
            return Configuration(Path(file).name, kind, content, above, launch.settings, launch)
    if named or framework is None:
        return None
    # Of some it is the program that says what is trained.
    said = {PROGRAM: launch.program} if PROGRAM in READERS[framework].names else {}
    return Configuration(name, framework, "", folder, {**launch.settings, **said}, launch)


def _programs() -> dict[str, str]:
    """Frameworks by the commands, or modules of Python, that start them."""
    return {program: framework.name for framework in READERS.values() for program in framework.programs}


def _of_program(launch: ScriptLaunch | None) -> str | None:
    if launch is None:
        return None
    *folders, last = launch.program.split("/")
    names = (last.partition(".")[0], *folders)
    return next((framework for name in names if (framework := _programs().get(name.lower()))), None)


def framework_of(path: Path | str) -> str | None:
    """The name of the framework whose configuration the file looks like; None for other and unreadable files."""
    try:
        text = read_text(path)
    except SpecError:
        return None
    return None if own_kind(text, str(path)) else recognised(text, suffix_of(text, str(path)))


def recognised(text: str, suffix: str) -> str | None:
    """The framework whose configuration a text looks like, if any; ``suffix`` is that of files in its format."""
    if suffix == ".sh" and _of_program(launch_of(text, _programs())) is not None:
        return None  # it has options, but its settings are in another file
    for framework in READERS.values():
        if suffix not in framework.format.suffixes:
            continue
        try:
            settings = framework.format.parse(text, framework.title, framework.names)
        except SpecError:
            # A DeepSpeed file or a command line that does not parse should be reported as one.
            words = (key if key.startswith("--") else f'"{key.partition(".")[0]}"' for key in framework.signature)
            if any(word in text for word in words) and framework is not COLOSSALAI:
                return framework.name
            continue
        if any(key in settings for key in framework.signature):
            return framework.name
    # Only these have such files: they are read as theirs, so that the user learns what is missing.
    if suffix == ".sh":
        return None if starts_another(text) else MEGATRON.name
    return TORCHTITAN.name if suffix == ".toml" else None


def starts_another(text: str) -> ScriptLaunch | None:
    """What a script starts where that is plainly not Megatron-LM; None if it may be, or if it cannot be read."""
    launch = launch_of(text, _programs())
    if launch is None:
        return None
    program = launch.program.rpartition("/")[2]
    if program.startswith("pretrain") or "megatron" in launch.program.lower():
        return None
    try:
        words = command_words(text, MEGATRON.title)
    except SpecError:
        return launch
    theirs = any(word.partition("=")[0] in MEGATRON.signature for word in words)
    return None if theirs else launch


def read_text(path: Path | str) -> str:
    """The text of a configuration file; raises SpecError if it cannot be read."""
    return files.read_text(path, "configuration", files.MOST_IN_CONFIGURATION)


# -- what a framework lacks, and what it runs instead ------------------------------------------------

# Fields that have no meaning without one that is lost.
_FOLLOWING = {
    "strategy.tp": ("strategy.sequence_parallel", "strategy.overlap.tp"),
    "strategy.cp": ("strategy.context_method", "strategy.overlap.cp"),
    "strategy.pp": ("strategy.schedule", "strategy.interleave", "strategy.stage_layers", "strategy.overlap.pp"),
    "strategy.ep": ("strategy.expert_tp", "strategy.dispatch", "strategy.overlap.ep"),
    "strategy.schedule": ("strategy.interleave", "strategy.overlap.pp"),
    "strategy.zero": ("strategy.shard_group", "strategy.keep_parameters", "strategy.accumulate"),
}
# Fields that neither layout, shape nor number format depends on: a framework with other values still runs the job.
_INDEPENDENT = ("training.optimization.", "training.tokens", "training.attention", "run.", "model.numerics.")


def can_run(job: Job, name: str) -> list[Lost]:
    """What the framework lacks to run the job as it is; empty if it can.

    The list is short: what follows from another entry is left out (no pipeline, so no schedule either), and the fields
    of one noun of the model are one entry.
    """
    missing = {lost.field: lost for lost in target(name).export(job).missing}
    implied = {path for name in missing for path in _FOLLOWING.get(name, ())}
    short: dict[str, Lost] = {}
    for path, lost in missing.items():
        noun, _, inner = path.rpartition(".")
        if noun in ("model.mla", "model.moe"):
            names = [*(short[noun].value if noun in short else []), inner]
            short[noun] = Lost(noun, names, lost.why)
        elif path not in implied:
            short[path] = lost
    return list(short.values())


def lacking(job: Job, name: str) -> list[Lost]:
    """`can_run` without what the framework does in its own way (overlap, the format of gradients): that is priced."""
    framework = target(name)

    def decides(lost: Lost) -> bool:
        if lost.field == "training.precision":
            return matching_precision(job, framework) is not None
        return lost.field.startswith((*framework.own_way, *_INDEPENDENT))

    return [lost for lost in can_run(job, name) if not decides(lost)]


def matching_precision(job: Job, framework: Target) -> str | None:
    """The framework's precision that computes in the job's format, whatever it accumulates in; None if it has none."""
    written = str(framework.read_back(job, framework.text(job)).fields.get("training.precision"))
    computed = RECIPES[job.training.precision].compute
    return written if written in RECIPES and RECIPES[written].compute == computed else None


def as_run_by(job: Job, framework: Target) -> Job:
    """The job that the framework's configuration of ``job`` describes, on the framework's own stack.

    What the configuration leaves to the training script is as in ``job``. Raises SpecError if the fields make no job.
    """
    exported = framework.export(job)
    (text,) = exported.files.values()
    back = framework.read_back(job, text, job.cluster)
    fields = {**back.fields, **{lost.field: lost.value for lost in exported.elsewhere}}
    kept = {path: value for path, value in fields.items() if not path.startswith("model")}
    stack = own_stack(job.stack, framework, fields["stack"])
    made = replace(back, fields={**kept, "stack": stack}).job(job.cluster, job.model)
    made = replace(made, run=replace(job.run, steps=made.run.steps, schedule=made.run.schedule))
    return job if made.stack == job.stack and effective_fields(made) == effective_fields(job) else made


def own_stack(stack: Stack, framework: Target, usual: Any = None) -> Stack:
    """``stack`` if it describes the framework's software or is not a preset; else the ``usual`` one."""
    other = stack_from(usual or framework.stacks[0])
    known = other.base == framework.software[0] and stack.base in framework.software
    return stack if known or not presets.is_preset("stack", stack.name) else other
