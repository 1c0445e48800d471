"""Which training frameworks can run a plan, what each lacks, and the price of the plan as each of them runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from shardwise.interop.frameworks import TARGETS, as_run_by, lacking, matching_precision, own_stack, target
from shardwise.interop.frameworks.results import Lost
from shardwise.planner.advice.exported import differences
from shardwise.planner.candidate import Candidate, candidate, job_with
from shardwise.planner.constraints import FIELDS, OFFLOADS, Allowed, Constraints, field_value
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search, search
from shardwise.spec.errors import DoesNotFit, SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.schedules import PLAIN, job_schedules, schedule_record
from shardwise.spec.strategy import Strategy

# Plain data parallelism: every device holds the whole model.
_DDP = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "zero": 0, "offload": OFFLOADS["none"]}
NAMES = (*TARGETS, "ddp")
_MOST_COMBINATIONS = 12  # of values that a framework cannot express together


@dataclass(frozen=True)
class FrameworkVerdict:
    """What a framework lacks for a plan, and what it runs: the plan, or the best of the layouts near it.

    ``own`` is priced with the framework's kernels and precision; None if nothing was found that fits.
    ``differs`` says how that differs from the plan.
    """

    name: str
    lacks: tuple[Lost, ...]
    own: Candidate | None = None
    differs: tuple[str, ...] = ()
    needed_bytes: float | None = None  # by the plan, if it does not fit as the framework runs it
    searched: bool = True  # for a layout near the plan

    @property
    def runs(self) -> bool:
        """Whether it runs the plan itself, and that fits."""
        return not self.lacks and self.needed_bytes is None


def who_can_run(found: Plan, *, near: bool = True) -> tuple[FrameworkVerdict, ...]:
    """What each framework lacks to run the plan, and what it runs, with its own kernels and precision.

    ``near`` searches similar layouts for frameworks that cannot run the plan.
    """
    deadline = found.request.deadline
    return tuple(_verdict(found, name, near and not deadline.leaves_out()) for name in TARGETS)


def _verdict(found: Plan, name: str, near: bool) -> FrameworkVerdict:
    job, lacks, needed = found.best.job, tuple(lacking(found.best.job, name)), None
    if not lacks:
        own = candidate(as_run_by(job, target(name)))
        if own.memory.total <= found.request.capacity_bytes:
            return FrameworkVerdict(name, (), own, differences(job, own.job))
        needed = own.memory.total
    other = _best_near(found, name) if near else None
    return FrameworkVerdict(name, lacks, other, differences(job, other.job) if other else (), needed, near)


def _best_near(found: Plan, name: str) -> Candidate | None:
    """The best strategy that a framework can run among layouts near the plan; None if none fits."""
    if _other_than_strategy(found.best.job, name):
        return None
    best, request = found.best.job.strategy, found.request
    near = {"tp": (1, 2, 4, 8, best.tp), "cp": (1, best.cp), "pp": (1, 2, best.pp), "ep": (1, 8, best.ep)}
    constraints = request.constraints
    for field, values in near.items():
        if not constraints.names(field):
            constraints = constraints.with_allowed({field: Allowed(tuple(dict.fromkeys(values)))})
    try:
        request = expressible(in_own_way(replace(request, constraints=constraints), name), name)
    except SpecError:
        return None  # the constraints rule everything out
    for offload in (False, True)[: 1 if request.offload is False else 2]:
        space, deadline = request.space(offload=offload), request.deadline.part()
        result = search(space, memory_bytes=request.capacity_bytes, any_priced=True, deadline=deadline)
        for one in result.best:
            job = job_with(request.job, one.strategy(), one.sequences)
            if not lacking(job, name):
                own = candidate(as_run_by(job, target(name)))
                if own.memory.total <= request.capacity_bytes:
                    return own
    return None


def check_framework(name: str) -> str:
    if not isinstance(name, str) or name.lower() not in NAMES:
        raise SpecError("--for", f"{shown(name)} is not known", nearest_name(str(name), NAMES))
    return name.lower()


def in_own_way(request: Request, name: str) -> Request:
    """The request with the framework's stack, precision and selective recompute; raises SpecError if it has none.

    The framework runs the result, so our engine need not.
    """
    job, one = request.job, target(name)
    plain = job.unchecked(strategy=Strategy(dp=1), training=job.training.unchecked(global_batch=64))
    precision = matching_precision(plain, one)
    if precision is None:
        why = one.reasons.get("training.precision", "")
        raise SpecError("--for", f"{name} does not train in {job.training.precision}", f"{one.title}: {why}")
    lost = _other_than_strategy(plain, name)
    if lost:
        problem = f"{name} does not have " + ", ".join(f"{one.field} ({one.why})" for one in lost)
        raise SpecError("--for", problem, "choose another framework")
    strategy, operators = job.strategy, one.selective(job)
    if operators and strategy.recompute_operators == Strategy().recompute_operators:
        strategy = strategy.unchecked(recompute_operators=operators)
    training = job.training.unchecked(precision=precision)
    job = job.unchecked(stack=own_stack(job.stack, one), strategy=strategy, training=training)
    return replace(request, job=job, any_priced=True)


def expressible(request: Request, name: str) -> Request:
    """The request within what one framework can express; each field is tried with each of its values."""
    if check_framework(name) == "ddp":
        fixed = {field: Allowed((value,)) for field, value in _DDP.items()}
        return replace(request, constraints=request.constraints.with_allowed(fixed))
    constraints, without, stage = request.constraints, set(), 3
    for field, values in _tried(request.job):
        if any(needed in without for needed in _NEEDED.get(field, {})):
            continue  # a framework without pipelines needs no schedule
        # The first value of most fields is the default everywhere; that of these two differs between frameworks.
        said = values if field in ("sequence_parallel", "order") else values[1:]
        lost = [value for value in said if _lacks(request.job, name, field, value, stage)]
        allowed = tuple(value for value in values if value not in lost)
        if allowed == values[:1]:
            without.add(field)
        if field == "zero":
            stage = max(allowed)  # of ZeRO, with which the fields after it are tried
        if len(allowed) < len(values):
            constraints = constraints.with_allowed({field: Allowed(allowed)})
    return replace(request, constraints=constraints)


def request_for(request: Request, name: str) -> Request:
    """The request within what a framework can express, priced as it runs it."""
    return expressible(request if check_framework(name) == "ddp" else in_own_way(request, name), name)


def plan_for(request: Request, name: str) -> Plan | Search:
    """`plan` for a framework. Combinations of values that it cannot express are excluded as they come up."""
    request = request_for(request, name)
    if name == "ddp":
        return plan(request)
    for _ in range(_MOST_COMBINATIONS):
        found = plan(request)
        if not isinstance(found, Plan):
            return found
        unsaid = [one.job for one in (found.best, found.fastest) if _of_strategy(lacking(one.job, name))]
        if not unsaid:
            return _as_run(found, name)
        request = replace(request, constraints=_without(request.constraints, unsaid[0], name))
    raise SpecError("--for", f"none of the best plans can be expressed in {name}", "fix more dimensions, or drop --for")


def _as_run(found: Plan, name: str) -> Plan:
    """The candidates that the framework can express, priced as it runs them."""
    one, kept = target(name), []
    for known in found.request.deadline.until(found.candidates):
        if _of_strategy(lacking(known.job, name)):
            continue
        job = as_run_by(known.job, one)
        own = known if job is known.job else candidate(job)
        if own.memory.total <= found.request.capacity_bytes:
            kept.append(own)
    if not kept:
        problem = f"what would be best does not fit as {name} runs it"
        raise DoesNotFit("--for", problem, "give --max-memory less than the device has, or fix more dimensions")
    return found.of(kept)


def _without(constraints: Constraints, job: Job, name: str) -> Constraints:
    """The constraints without the smallest set of the strategy's values that cannot be expressed together."""
    if isinstance(job.strategy.stage_layers, tuple):
        return constraints.with_allowed({"stage_layers": Allowed(("even", "balanced"))})
    fields = {field: field_value(job.strategy, field) for field, _ in _tried(job)}
    unusual = [field for field, values in _tried(job) if fields[field] != values[0]]
    for count in range(1, len(unusual) + 1):
        for some in combinations(unusual, count):
            strategy = _plain(job.strategy).unchecked(**{field: fields[field] for field in some})
            if _of_strategy(lacking(job.unchecked(strategy=strategy), name)):
                return Constraints(constraints.allowed, (*constraints.excluded, _entry(job, name, fields, some)))
    raise SpecError("--for", f"{name} cannot express even plain data parallelism", "drop --for")


def _entry(job: Job, name: str, fields: dict[str, Any], some: tuple[str, ...]) -> dict[str, Allowed]:
    """Values that cannot be expressed together; all degrees above 1 if even degrees of 2 cannot."""
    degrees = [field for field in some if field in ("tp", "cp", "pp", "ep")]
    values = {field: 2 if field in degrees else fields[field] for field in some}
    twos = job.unchecked(strategy=_plain(job.strategy).unchecked(**values))
    wide = degrees and _of_strategy(lacking(twos, name))
    return {field: Allowed(None, 2) if wide and field in degrees else Allowed((fields[field],)) for field in some}


def _plain(strategy: Strategy) -> Strategy:
    """Plain data parallelism over as many ranks, with the same meaning of selective recompute."""
    return Strategy().unchecked(dp=strategy.dp, recompute_operators=strategy.recompute_operators)


def _other_than_strategy(job: Job, name: str) -> list[Lost]:
    """What a framework lacks of the model or the optimizer that affects the price, whatever the strategy."""
    return [one for one in lacking(job, name) if not one.within("model.numerics", "strategy")]


def _of_strategy(lost: Iterable[Lost]) -> list[Lost]:
    """What a framework lacks of the strategy; the model and the optimizer are not searched."""
    return [one for one in lost if one.within("strategy")]


def _tried(job: Job) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Fields and the values that probe what a framework can express."""
    yield from ((name, (1, 2)) for name in ("tp", "cp", "pp"))
    if job.model.moe:
        yield "ep", (1, 2)
    yield "zero", (0, 1, 2, 3)
    yield "schedule", tuple(dict.fromkeys((PLAIN, *job_schedules())))
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
    "shard_group": {"zero": None},
    "stage_layers": {"pp": 2},
    "order": {"pp": 2},
}


def _lacks(job: Job, name: str, field: str, value: Any, stage: int) -> bool:
    """Whether a framework, which has ZeRO up to ``stage``, cannot express that ``field`` has ``value``."""
    fields: dict[str, Any] = {"stage_layers": "even", "dp": 4, **_NEEDED.get(field, {}), field: value}
    fields["recompute_operators"] = job.strategy.recompute_operators
    if fields.get("zero", 0) is None:
        fields["zero"] = stage
    if field == "stage_layers":  # only a pipeline that does not divide shows the difference
        fields["pp"] = next((pp for pp in range(2, job.model.layers) if job.model.layers % pp), 2)
    if schedule_record(fields.get("schedule", PLAIN)).chooses_chunks:
        fields["interleave"] = 2
    if field == "offload" and value.weights:
        fields["zero"] = 3
    strategy = Strategy().unchecked(**fields)
    probe = job.unchecked(strategy=strategy, training=job.training.unchecked(global_batch=64))
    try:
        lost = lacking(probe, name)
    except SpecError:
        return True
    also = ("strategy.recompute_operators",) if field == "recompute" else ()
    return any(one.within(f"strategy.{field}", *also) for one in lost)


assert set(_NEEDED) <= set(FIELDS)
