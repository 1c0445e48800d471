"""Which framework a configuration file is of, its content, and what that framework runs of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.interop.frameworks.documents import MOST_CHARACTERS
from shardwise.interop.frameworks.job_fields import said_by
from shardwise.interop.frameworks.target import Imported, Lost, Target
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import bounded_text
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack, stack_from
from shardwise.spec.training import RECIPES

# -- Which framework a configuration file is of, and its content -------------------------------------

# Settings that only one framework has; a file that holds any of them is taken to be its.
_TELLING = {
    "megatron": ("--num-layers", "--micro-batch-size", "--tensor-model-parallel-size", "--global-batch-size"),
    "colossalai": ("plugin", "arguments.tp_size", "arguments.pp_size"),
    "deepspeed": ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization.stage", "bf16.enabled",
                  "fp16.enabled", "optimizer.type", "gradient_accumulation_steps"),
    "accelerate": ("distributed_type",),
    "nanotron": ("parallelism.dp", "parallelism.tp", "tokens.micro_batch_size"),
    "torchtitan": ("model.flavor", "parallelism.tensor_parallel_degree", "training.local_batch_size",
                   "parallelism.data_parallel_shard_degree", "training.seq_len"),
}  # fmt: skip
_SUFFIXES = {
    ".json": ("colossalai", "deepspeed"),
    ".yaml": ("accelerate", "nanotron"),
    ".yml": ("accelerate", "nanotron"),
    ".toml": ("torchtitan",),
    ".args": ("megatron",),
    ".sh": ("megatron",),
    ".txt": ("megatron",),
}


def read_text(path: Path | str) -> str:
    """The text of a configuration file; raises SpecError when it cannot be had."""
    path = Path(path)
    try:
        if path.is_dir():
            raise SpecError("configuration", f"{shown(str(path))} is a folder", "name the file inside it")
        text = bounded_text(path, MOST_CHARACTERS)
        if text is None:
            raise SpecError("configuration", f"{shown(str(path))} is too large", "is it a configuration?")
        return text
    except FileNotFoundError:
        raise SpecError("configuration", f"{shown(str(path))} is not there", "check the path") from None
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        raise SpecError("configuration", f"{shown(str(path))} cannot be read ({reason})", "check the file") from None


def recognise(path: Path | str, targets: Mapping[str, Target]) -> Target | None:
    """The framework whose configuration the file looks like; None for any other file, also an unreadable one."""
    names = _SUFFIXES.get(Path(path).suffix.lower(), ())
    if not names:
        return None
    try:
        text = read_text(path)
    except SpecError:
        return None
    for name in names:
        one = targets[name]
        try:
            settings = one.format.parse(text, str(path), one.names)
        except SpecError:
            # A DeepSpeed file that does not parse should be reported as one.
            if any(f'"{key.partition(".")[0]}"' in text for key in _TELLING[name]) and name != "colossalai":
                return one
            continue
        if any(key in settings for key in _TELLING[name]):
            return one
    return None


def read_file(
    path: Path | str,
    one: Target,
    model: Model | None = None,
    cluster: Cluster | None = None,
    given: Mapping[str, Any] | None = None,
) -> Imported:
    """What the configuration in a file says, as `Target.read`; errors name the file."""
    text = read_text(path)
    try:
        return one.read(text, model, cluster, given)
    except SpecError as error:
        raise SpecError(f"{Path(path).name}: {error.field}".rstrip(": "), error.problem, error.remedy) from None


# -- What a framework runs of a job: its configuration read back, with its own software and precision

# Fields of a job that no layout, model or number format depends on: a framework that has others still runs the job.
_BESIDE = ("training.optimization.", "training.tokens", "training.attention", "run.")


def as_run_by(job: Job, one: Target) -> Job:
    """The job that the target's configuration of ``job`` describes, on the target's own stack.

    What the configuration leaves to the training script is as in ``job``. Raises SpecError if the rest makes no job.
    """
    exported = one.export(job)
    (text,) = exported.files.values()
    given = {"strategy.pp": job.strategy.pp, "strategy.dp": job.strategy.data_parallel}
    back = one.read(text, job.model, job.cluster, given)
    fields = {**back.fields, **{lost.field: lost.value for lost in exported.elsewhere}}
    kept = {path: value for path, value in fields.items() if not path.startswith("model")}
    stack = own_stack(job.stack, one, str(fields["stack"]))
    made = replace(back, fields={**kept, "stack": stack}).job(job.cluster, job.model)
    made = replace(made, run=replace(job.run, steps=made.run.steps, schedule=made.run.schedule))
    return job if made.stack == job.stack and said_by(made) == said_by(job) else made


def own_stack(asked: Stack, one: Target, usual: str | None = None) -> Stack:
    """``asked`` where it describes the target's software, or is no preset; else the target's ``usual`` one."""
    usual = usual or one.stacks[0]
    known = usual == one.stacks[0] and asked.name in one.stacks
    return asked if known or asked.name not in presets.names("stack") else stack_from(usual)


def decides(job: Job, one: Target, lost: Lost) -> bool:
    """Whether the target runs the job all the same, in its own way: overlap, the format of gradients, and the like."""
    if lost.field == "training.precision":
        return same_products(job, one) is not None
    return lost.field.startswith((*one.own_way, *_BESIDE))


def same_products(job: Job, one: Target) -> str | None:
    """The target's recipe that computes in the job's format, whatever it accumulates in; None if it has none."""
    (text,) = one.export(job).files.values()
    given = {"strategy.pp": job.strategy.pp, "strategy.dp": job.strategy.data_parallel}
    made = str(one.read(text, job.model, None, given).fields.get("training.precision"))
    asked = job.training.precision
    return made if made in RECIPES and RECIPES[made].compute == RECIPES[asked].compute else None
