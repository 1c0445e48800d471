"""Jobs in the configuration formats of other training frameworks, and back.

`TARGETS` holds one entry per framework: ``export(job)`` writes its configuration and lists what that cannot express,
``read(text, ...)`` understands one. A new framework is one file with a table, its option names under ``options/``,
and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.interop.frameworks.accelerate import ACCELERATE
from shardwise.interop.frameworks.colossalai import COLOSSALAI
from shardwise.interop.frameworks.deepspeed import DEEPSPEED
from shardwise.interop.frameworks.megatron import MEGATRON
from shardwise.interop.frameworks.nanotron import NANOTRON
from shardwise.interop.frameworks.reading import as_run_by, decides, own_stack, read_file, recognise, same_products
from shardwise.interop.frameworks.target import Exported, Imported, Lost, Target
from shardwise.interop.frameworks.torchtitan import TORCHTITAN
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model

__all__ = ["TARGETS", "Exported", "Imported", "Lost", "Target", "as_run_by", "can_run", "export", "framework_of",
           "lacking", "own_stack", "read", "same_products", "target"]  # fmt: skip

TARGETS: dict[str, Target] = {
    one.name: one for one in (DEEPSPEED, MEGATRON, TORCHTITAN, ACCELERATE, NANOTRON, COLOSSALAI)
}


# What has no meaning without a field that is lost.
_FOLLOWING = {
    "strategy.tp": ("strategy.sequence_parallel", "strategy.overlap.tp"),
    "strategy.cp": ("strategy.context_method", "strategy.overlap.cp"),
    "strategy.pp": ("strategy.schedule", "strategy.interleave", "strategy.stage_layers", "strategy.overlap.pp"),
    "strategy.ep": ("strategy.expert_tp", "strategy.dispatch", "strategy.overlap.ep"),
    "strategy.schedule": ("strategy.interleave", "strategy.overlap.pp"),
    "strategy.zero": ("strategy.shard_group", "strategy.keep_parameters", "strategy.accumulate"),
}


def target(name: str) -> Target:
    """A target by name; raises SpecError with the nearest one for another name."""
    if name.lower() not in TARGETS:
        raise SpecError("target", f"{shown(name)} is not known", nearest_name(name, TARGETS))
    return TARGETS[name.lower()]


def export(job: Job, to: str) -> Exported:
    """The job as a configuration of the framework ``to``."""
    return target(to).export(job)


def can_run(job: Job, name: str) -> list[Lost]:
    """What the framework lacks to run the job as it is; empty when it can.

    The list is in short: what follows from a lack is left out (no pipeline, so no schedule either), and the parts of
    one noun of the model are one entry.
    """
    missing = {one.field: one for one in target(name).export(job).missing}
    implied = {path for field in missing for path in _FOLLOWING.get(field, ())}
    short: dict[str, Lost] = {}
    for field, one in missing.items():
        noun, _, inner = field.rpartition(".")
        if noun in ("model.mla", "model.moe"):
            names = [*(short[noun].value if noun in short else []), inner]
            short[noun] = Lost(noun, names, one.why)
        elif field not in implied:
            short[field] = one
    return list(short.values())


def lacking(job: Job, name: str) -> list[Lost]:
    """What the framework cannot do of the job, in short; not what it does in its own way, whose price follows."""
    one = target(name)
    return [lost for lost in can_run(job, name) if not decides(job, one, lost)]


def framework_of(path: Path | str) -> str | None:
    """The name of the framework whose configuration the file looks like; None for any other file."""
    one = recognise(path, TARGETS)
    return one.name if one else None


def read(
    path: Path | str,
    name: str | None = None,
    model: Model | None = None,
    cluster: Cluster | None = None,
    given: Mapping[str, Any] | None = None,
) -> Imported:
    """What a framework's configuration file says about a job.

    ``name`` is the framework (default: the one the file looks like); ``model``, ``cluster`` and ``given`` (fields by
    dotted path, such as ``{"strategy.pp": 4}``) are what is known beside the file. Raises SpecError for what is
    malformed, unknown or contradictory.
    """
    one = recognise(path, TARGETS) if name is None else target(name)
    if one is None:
        known = ", ".join(TARGETS)
        raise SpecError("configuration", f"{shown(str(path))} looks like none of {known}", "name the framework")
    return read_file(path, one, model, cluster, given)
