"""`auto` in a strategy: what a job leaves to the planner, written where its value would stand.

A strategy holds values alone, so that the planner and the engine always have them: `microbatch: auto` becomes the
smallest, and `run.automatic` remembers that it was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Automatic = Literal["microbatch", "optimizer", "gradients", "weights", "activations"]
AUTO = "auto"
_OFFLOADED: tuple[Automatic, ...] = ("optimizer", "gradients", "weights", "activations")


def without_auto(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a job with every `auto` of its strategy moved to `run.automatic`; others as they are."""
    strategy, run = job.get("strategy"), job.get("run", {})
    if not isinstance(strategy, Mapping) or not isinstance(run, Mapping):
        return job
    asked: list[Automatic] = []
    kept = dict(strategy)
    if strategy.get("microbatch") == AUTO:
        asked.append("microbatch")
        del kept["microbatch"]
    offload = strategy.get("offload")
    if offload == AUTO:
        asked += _OFFLOADED
        del kept["offload"]
    elif isinstance(offload, Mapping):
        asked += [kind for kind in _OFFLOADED if offload.get(kind) == AUTO]
        kept["offload"] = {name: value for name, value in offload.items() if name not in asked}
    if not asked:
        return job
    before = run.get("automatic", ())
    automatic = [*before, *(one for one in asked if one not in before)]
    return {**job, "strategy": kept, "run": {**run, "automatic": automatic}}
