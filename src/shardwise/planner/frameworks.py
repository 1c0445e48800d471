"""Which training frameworks can run a plan, what each lacks, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from shardwise.interop.frameworks import TARGETS, can_run
from shardwise.interop.frameworks.parts import Lost
from shardwise.planner.candidate import Candidate, candidate, job_with
from shardwise.planner.constraints import FIELDS, OFFLOADS, Allowed, Constraints, field_value
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search import Search
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.strategy import SCHEDULES, Strategy

# Plain data parallelism: every device holds the whole model.
_DDP = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "zero": 0, "offload": OFFLOADS["none"]}
NAMES = (*TARGETS, "ddp")
_MOST_COMBINATIONS = 12  # of values that a framework cannot say together


@dataclass(frozen=True)
class FrameworkVerdict:
    """What a framework lacks for a job; and the best plan that it can express, where that was searched."""

    name: str
    lacks: tuple[Lost, ...]
    own: Candidate | None = None

    @property
    def runs(self) -> bool:
        return not self.lacks


def framework_filters(request: Request) -> dict[str, dict[str, Allowed]]:
    """What each framework can say, as the values that the strategy's fields may have."""
    free = replace(request, constraints=Constraints())
    return {name: dict(expressible(free, name).constraints.allowed) for name in TARGETS}


def who_can_run(found: Plan) -> tuple[FrameworkVerdict, ...]:
    """What each framework lacks to run the plan, and the best that it can run."""
    result = []
    for name in TARGETS:
        lacks = tuple(can_run(found.best.job, name))
        other = found.search.of_filters.get(name)
        own = None
        if lacks and other is not None:
            job = job_with(found.request.job, other.strategy(), other.sequences)
            own = candidate(job) if not _of_strategy(can_run(job, name)) else None
        result.append(FrameworkVerdict(name, lacks, own))
    return tuple(result)


def check_framework(name: str) -> str:
    if name.lower() not in NAMES:
        raise SpecError("--for", f"{shown(name)} is not known", nearest_name(name, NAMES))
    return name.lower()


def expressible(request: Request, name: str) -> Request:
    """The request within what one framework can say; each field is tried with each of its values."""
    if check_framework(name) == "ddp":
        fixed = {field: Allowed((value,)) for field, value in _DDP.items()}
        return replace(request, constraints=request.constraints.with_allowed(fixed))
    constraints, without = request.constraints, set()
    for field, values in _tried(request.job):
        if any(needed in without for needed in _NEEDED.get(field, {})):
            continue  # a framework without pipelines needs no schedule
        # The first value of most fields is plain and need not be said; what these are by default differs.
        said = values if field in ("sequence_parallel", "order") else values[1:]
        lacking = [value for value in said if _lacks(request.job, name, field, value)]
        allowed = tuple(value for value in values if value not in lacking)
        if allowed == values[:1]:
            without.add(field)
        if len(allowed) < len(values):
            constraints = constraints.with_allowed({field: Allowed(allowed)})
    return replace(request, constraints=constraints)


def plan_for(request: Request, name: str) -> Plan | Search:
    """`plan` within what a framework can run; combinations that it cannot say are left out as they come up."""
    request = expressible(request, name)
    found = plan(request)
    for _ in range(_MOST_COMBINATIONS):
        if not isinstance(found, Plan) or name == "ddp" or not _of_strategy(can_run(found.best.job, name)):
            return found
        request = replace(request, constraints=_without(request.constraints, found.best.job, name))
        found = plan(request)
    raise SpecError("--for", f"none of the best plans can be said in {name}", "fix more dimensions, or drop --for")


def _without(constraints: Constraints, job: Job, name: str) -> Constraints:
    """The constraints, and besides none of the few values of the job's strategy that cannot be said together."""
    if isinstance(job.strategy.stage_layers, tuple):
        return constraints.with_allowed({"stage_layers": Allowed(("even", "balanced"))})
    fields = {field: field_value(job.strategy, field) for field, _ in _tried(job)}
    unusual = [field for field, values in _tried(job) if fields[field] != values[0]]
    for count in range(1, len(unusual) + 1):
        for some in combinations(unusual, count):
            strategy = Strategy().unchecked(**{"dp": job.strategy.dp, **{field: fields[field] for field in some}})
            if _of_strategy(can_run(job.unchecked(strategy=strategy), name)):
                entry = {field: Allowed((fields[field],)) for field in some}
                return Constraints(constraints.allowed, (*constraints.excluded, entry))
    raise SpecError("--for", f"{name} cannot say even plain data parallelism", "drop --for")


def _of_strategy(lost: Iterable[Lost]) -> list[Lost]:
    """What a framework lacks of the strategy; formats and the like are its own affair."""
    return [one for one in lost if one.field.startswith("strategy.")]


def _tried(job: Job) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Fields and the values that tell what a framework can say."""
    yield from ((name, (1, 2)) for name in ("tp", "cp", "pp"))
    if job.model.moe:
        yield "ep", (1, 2)
    yield "zero", (0, 1, 2, 3)
    yield "schedule", ("1f1b", *(name for name in SCHEDULES if name != "1f1b"))
    yield "context_method", ("ring", "all-gather", "ulysses")
    yield "recompute", ("none", "selective", "full")
    yield "recompute_layers", (None, 1)
    yield "offload", tuple(OFFLOADS.values())
    yield "keep_parameters", (False, True)
    yield "accumulate", ("sharded", "local")
    yield "sequence_parallel", (True, False)
    yield "shard_group", (None, 2)
    yield "stage_layers", ("even", "balanced")
    yield "order", (("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp"))


_NEEDED: dict[str, dict[str, Any]] = {
    "context_method": {"cp": 2},
    "sequence_parallel": {"tp": 2},
    "schedule": {"pp": 2},
    "recompute_layers": {"recompute": "full"},
    "keep_parameters": {"zero": 3},
    "accumulate": {"zero": 2},
    "shard_group": {"zero": 3},
    "stage_layers": {"pp": 2},
    "order": {"pp": 2},
}


def _lacks(job: Job, name: str, field: str, value: Any) -> bool:
    """Whether a framework cannot say that ``field`` has ``value``."""
    fields: dict[str, Any] = {"stage_layers": "even", "dp": 4, **_NEEDED.get(field, {}), field: value}
    if field == "stage_layers":  # it takes a pipeline that does not divide to tell
        fields["pp"] = next((pp for pp in range(2, job.model.layers) if job.model.layers % pp), 2)
    if fields.get("schedule") == "interleaved":
        fields["interleave"] = 2
    if field == "offload" and value.weights:
        fields["zero"] = 3
    strategy = Strategy().unchecked(**fields)
    probe = job.unchecked(strategy=strategy, training=job.training.unchecked(global_batch=64))
    try:
        lost = can_run(probe, name)
    except SpecError:
        return True
    paths = (f"strategy.{field}", *(("strategy.recompute_operators",) if field == "recompute" else ()))
    return any(one.field in paths or one.field.startswith(paths[0] + ".") for one in lost)


assert set(_NEEDED) <= set(FIELDS)
