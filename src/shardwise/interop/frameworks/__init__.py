"""Jobs in the configuration formats of other training frameworks, and back; and what each framework runs of a job.

`TARGETS` has one entry per framework: ``export(job)`` writes its configuration and lists what is lost, ``read(text)``
understands one. A new framework is one file with a table, its option names under ``options/``, and a line here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.interop.frameworks.accelerate import ACCELERATE
from shardwise.interop.frameworks.axolotl import AXOLOTL
from shardwise.interop.frameworks.colossalai import COLOSSALAI
from shardwise.interop.frameworks.deepspeed import DEEPSPEED
from shardwise.interop.frameworks.documents import command_words
from shardwise.interop.frameworks.gpt_neox import GPT_NEOX
from shardwise.interop.frameworks.job_fields import Exported, Imported, Lost, effective_fields
from shardwise.interop.frameworks.litgpt import LITGPT
from shardwise.interop.frameworks.llamafactory import LLAMAFACTORY
from shardwise.interop.frameworks.maxtext import MAXTEXT
from shardwise.interop.frameworks.megatron import MEGATRON
from shardwise.interop.frameworks.nanotron import NANOTRON
from shardwise.interop.frameworks.target import Target
from shardwise.interop.frameworks.torchtitan import TORCHTITAN
from shardwise.interop.frameworks.torchtune import TORCHTUNE
from shardwise.interop.frameworks.trl import TRL
from shardwise.interop.recognise import own_kind, suffix_of
from shardwise.spec import files, presets
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack, stack_from
from shardwise.spec.training import RECIPES

__all__ = ["READERS", "TARGETS", "Configuration", "Exported", "Imported", "Lost", "Target", "as_run_by", "can_run",
           "configuration_in", "export", "framework_of", "lacking", "matching_precision", "own_stack", "read",
           "recognised", "starts_another", "target"]  # fmt: skip

TARGETS: dict[str, Target] = {
    framework.name: framework for framework in (DEEPSPEED, MEGATRON, TORCHTITAN, ACCELERATE, NANOTRON, COLOSSALAI)
}
# Those whose configurations are read, which are not all written.
_RECIPES = (AXOLOTL, LLAMAFACTORY, TORCHTUNE, LITGPT, GPT_NEOX, MAXTEXT, TRL)
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

    def read(
        self, model: Model | None = None, cluster: Cluster | None = None, given: Mapping[str, Any] | None = None
    ) -> Imported:
        """What it says about a job; raises SpecError if it is malformed, unknown or contradictory.

        ``model``, ``cluster`` and ``given`` (fields by dotted path: ``{"strategy.pp": 4}``) are known beside it.
        """
        try:
            return READERS[self.framework].read(self.text, model, cluster, given, self._beside)
        except SpecError as error:
            raise SpecError(f"{self.file}: {error.field}".rstrip(": "), error.problem, error.remedy) from None

    def _beside(self, name: str) -> str | None:
        path = None if self.folder is None else self.folder / name
        return read_text(path) if path is not None and path.is_file() else None


def configuration_in(path: Path | str, framework: str) -> Configuration:
    """A file of the framework; raises SpecError if it cannot be read."""
    return Configuration(Path(path).name, framework, read_text(path), Path(path).parent)


def framework_of(path: Path | str) -> str | None:
    """The name of the framework whose configuration the file looks like; None for other and unreadable files."""
    try:
        text = read_text(path)
    except SpecError:
        return None
    return None if own_kind(text, str(path)) else recognised(text, suffix_of(text, str(path)))


def recognised(text: str, suffix: str) -> str | None:
    """The framework whose configuration a text looks like, if any; ``suffix`` is that of files in its format."""
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


_COMMANDS = re.compile(
    r"^\s*(axolotl|llamafactory-cli|tune|litgpt|trl|torchrun|deepspeed|accelerate|ray)\s", re.MULTILINE
)


def starts_another(text: str) -> str | None:
    """What a script starts where that is plainly not Megatron-LM; None if it may be, or if it cannot be read."""
    try:
        words = command_words(text, MEGATRON.title)
    except SpecError:
        other = _COMMANDS.search(text)
        return other[1] if other else None
    script = words[0].rpartition("/")[2] if words and words[0].endswith(".py") else ""
    if not script or script.startswith("pretrain") or "megatron" in words[0].lower():
        return None
    theirs = any(word.partition("=")[0] in MEGATRON.signature for word in words)
    return None if theirs else script


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
    implied = {path for field in missing for path in _FOLLOWING.get(field, ())}
    short: dict[str, Lost] = {}
    for field, lost in missing.items():
        noun, _, inner = field.rpartition(".")
        if noun in ("model.mla", "model.moe"):
            names = [*(short[noun].value if noun in short else []), inner]
            short[noun] = Lost(noun, names, lost.why)
        elif field not in implied:
            short[field] = lost
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
