"""What a framework runs of a job: its configuration read back, with its own software and precision."""

from __future__ import annotations

from dataclasses import replace

from shardwise.interop.frameworks.parts import Lost
from shardwise.interop.frameworks.said import said_by
from shardwise.interop.frameworks.target import Target
from shardwise.spec import presets
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack, stack_from
from shardwise.spec.training import RECIPES

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
