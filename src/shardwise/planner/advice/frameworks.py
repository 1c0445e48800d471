"""Which training frameworks can run a plan: what each can express, and the price of the plan as each runs it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from shardwise.interop.frameworks import TARGETS, Target, as_run_by, lacking, own_stack, target
from shardwise.interop.frameworks.job_fields import Lost
from shardwise.planner.advice.exported import differences
from shardwise.planner.candidate import Candidate, candidate, job_with
from shardwise.planner.constraints import ACTS, OFFLOADS, Allowed, Constraints, field_value
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search, search
from shardwise.spec.errors import DoesNotFit, SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.schedules import PLAIN, job_schedules, schedule_record
from shardwise.spec.stack import stack_from
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import RECIPES

_STAGES = (0, 1, 2, 3)
_METHODS = ("ring", "all-gather", "ulysses")
_DEGREES = ("tp", "cp", "pp", "ep")
# Values of other fields that a value of this field may need. Every field is also tried with each ZeRO stage.
_BESIDE: dict[str, dict[str, tuple[Any, ...]]] = {
    "tp": {"sequence_parallel": (True, False)},
    "cp": {"context_method": _METHODS},
    "zero": {"cp": (1, 2), "context_method": ("ring", "ulysses"), "offload": (OFFLOADS["none"], OFFLOADS["gradients"])},
    "context_method": {"cp": (2,)},
    "schedule": {"pp": (2,)},
    "recompute_layers": {"recompute": ("full",), "pp": (1, 2)},
    "offload": {"recompute": ("none", "full")},
    "keep_parameters": {"zero": (3,)},
    "accumulate": {"zero": (2, 3), "pp": (1, 2)},
    "sequence_parallel": {"tp": (2,)},
    "shard_group": {"zero": (1, 2, 3)},
    "stage_layers": {"pp": (2,)},
    "order": {"pp": (2,), "tp": (2,), "cp": (2,), "context_method": _METHODS},
}
_OF_PIPELINES = ("schedule", "stage_layers", "order")  # whether a framework has these does not depend on ZeRO


def _tried(job: Job) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Fields, and the values with which a framework is probed; 2 stands for every higher degree."""
    yield "zero", _STAGES
    yield from ((name, (1, 2)) for name in ("tp", "cp", "pp"))
    if job.model.moe:
        yield "ep", (1, 2)
    yield "schedule", tuple(dict.fromkeys((PLAIN, *job_schedules())))
    yield "context_method", _METHODS
    yield "recompute", ("none", "selective", "full")
    yield "recompute_layers", (None, 1)
    yield "offload", tuple(OFFLOADS.values())
    yield "keep_parameters", (False, True)
    yield "accumulate", ("sharded", "local")
    yield "sequence_parallel", (True, False)
    yield "shard_group", (None, 2)
    yield "stage_layers", ("even", "balanced")
    inner = (("tp", "cp"), ("cp", "tp"))
    yield "order", tuple((*first, *last) for first in inner for last in (("dp", "pp"), ("pp", "dp")))


@dataclass(frozen=True)
class Way:
    """A mode of a framework with a price of its own: it runs with this stack and precision."""

    name: str  # the framework
    stack: str
    precision: str
    alone: bool = dataclasses.field(default=False, compare=False)  # whether the framework has no other mode

    def request(self, request: Request) -> Request:
        """The request as the framework runs it in this way; our engine need not be able to run the result."""
        job, framework = request.job, target(self.name)
        strategy, operators = job.strategy, framework.selective(job)
        if operators and strategy.recompute_operators == Strategy().recompute_operators:
            strategy = strategy.unchecked(recompute_operators=operators)
        training = job.training.unchecked(precision=self.precision)
        job = job.unchecked(stack=own_stack(job.stack, framework, self.stack), strategy=strategy, training=training)
        return replace(request, job=job, any_priced=True)

    def is_of(self, job: Job) -> bool:
        """Whether the framework runs the job in this way."""
        return self.alone or _way(job, target(self.name)) == self


def ways_of(job: Job, name: str) -> list[Way]:
    """The ways in which a framework trains the job's model, the usual one first; raises SpecError if there is none."""
    framework = target(name)
    plain = job.unchecked(strategy=Strategy(dp=1), training=job.training.unchecked(global_batch=64))
    probes = [plain.unchecked(strategy=Strategy().unchecked(dp=4, zero=stage)) for stage in _STAGES]
    computed = RECIPES[job.training.precision].compute
    all_ways = dict.fromkeys(_way(probe, framework) for probe in (plain, *probes))
    ways = [way for way in all_ways if way.precision in RECIPES and RECIPES[way.precision].compute == computed]
    if not ways:
        why = framework.reasons.get("training.precision", "")
        raise SpecError(
            "⟨framework⟩", f"{name} does not train in {job.training.precision}", f"{framework.title}: {why}"
        )
    lost = other_than_strategy(plain, name)
    if lost:
        problem = f"{name} does not have " + ", ".join(f"{missing.field} ({missing.why})" for missing in lost)
        raise SpecError("⟨framework⟩", problem, "choose another framework")
    return ways if len(all_ways) > 1 else [replace(way, alone=True) for way in ways]


def _way(job: Job, framework: Target) -> Way:
    fields = framework.read_back(job, framework.text(job)).fields
    return Way(framework.name, stack_from(fields["stack"]).version, str(fields.get("training.precision")))


def other_than_strategy(job: Job, name: str) -> list[Lost]:
    """What a framework lacks whatever the strategy: parts of the model or the optimizer that affect the price."""
    return [missing for missing in lacking(job, name) if not missing.within("model.numerics", "strategy")]


@dataclass(frozen=True)
class Probe:
    """Asks whether a framework, in one of its ways, has certain values of a job's strategy."""

    job: Job
    way: Way

    def has(self, field: str, value: Any, beside: Mapping[str, Any]) -> bool:
        """Whether the framework has this value of a field together with the values ``beside`` it."""
        fields: dict[str, Any] = {"stage_layers": "even", "dp": 4, **beside, field: value}
        fields["recompute_operators"] = self.job.strategy.recompute_operators
        if field == "stage_layers":  # shows only in a pipeline that does not divide the layers evenly
            fields["pp"] = next((pp for pp in range(2, self.job.model.layers) if self.job.model.layers % pp), 2)
        if field == "shard_group" and value is not None:
            fields["dp"] = 2 * value
        strategy, training = _with(Strategy(), fields), self.job.training.unchecked(global_batch=64)
        names = [field] if field in _OF_PIPELINES else [field, *beside]
        names += ["recompute_operators"] if field == "recompute" else []
        probe = self.job.unchecked(strategy=strategy, training=training)
        return self._runs(probe, *(f"strategy.{name}" for name in names))

    def runs(self, job: Job) -> bool:
        """Whether the framework runs the whole strategy of a job."""
        return self._runs(job, "strategy")

    def _runs(self, job: Job, *paths: str) -> bool:
        try:
            return self.way.is_of(job) and not any(missing.within(*paths) for missing in lacking(job, self.way.name))
        except SpecError:
            return False


def _with(strategy: Strategy, fields: Mapping[str, Any]) -> Strategy:
    """The strategy with other values, and with the chunks per rank that its schedule then needs."""
    changed = strategy.unchecked(**fields)
    chunks = max(2, changed.interleave) if schedule_record(changed.schedule).chooses_chunks else 1
    return changed.unchecked(interleave=chunks)


# -- the constraints of a framework -------------------------------------------------------------------


def within_framework(request: Request, way: Way) -> Request:
    """The request priced in the framework's way, restricted to what the framework has.

    A value is tried with the values of other fields that it may need. If the framework has it with none of them, it
    is left out; if with some, its combinations with the others are excluded.
    """
    request = way.request(request)
    probe, constraints = Probe(request.job, way), request.constraints
    had: dict[str, tuple[Any, ...]] = {}
    for field, usual in _tried(request.job):
        beside = _beside(field, had)
        if not all(beside.values()):
            continue  # a framework without pipelines needs no schedule
        asked, kept = _asked(constraints, field, usual), []
        for value in asked:
            # The first value of a field is the default of every framework, except for these three.
            plain = value == usual[0] and field not in ("zero", "sequence_parallel", "order")
            unsaid = () if plain else _combinations(probe, field, value, beside)
            if unsaid is not None:
                kept.append(value)
                constraints = Constraints(constraints.allowed, (*constraints.excluded, *unsaid))
        if not kept:
            why = _reason(request.job, field, asked[0], way)
            raise SpecError("⟨framework⟩", f"{way.name} does not have {field} {Allowed(asked)}", why)
        if len(kept) < len(asked):
            constraints = constraints.with_allowed({field: Allowed(tuple(kept))})
        had[field] = tuple(kept)
    return replace(request, constraints=constraints)


def _beside(field: str, had: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """The values of other fields to try beside a field, as far as the framework has them."""
    stages = had.get("zero", _STAGES)[: 1 if field in _OF_PIPELINES else None]
    tried: dict[str, tuple[Any, ...]] = {}
    for other, values in {"zero": stages, **_BESIDE.get(field, {})}.items():
        known = values if other not in had or (field == "order" and other != "pp") else had[other]
        tried[other] = tuple(value for value in values if value in known or (other in _DEGREES and known[-1:] > (1,)))
    tried.pop(field, None)
    return tried


def _reason(job: Job, field: str, value: Any, way: Way) -> str:
    """Why a framework does not have a value."""
    asked = job.unchecked(strategy=_with(Strategy(), {"dp": 4, field: value}))
    why = target(way.name).reasons.get(f"strategy.{field}", "drop ⟨framework⟩, or that value")
    return why if isinstance(why, str) else why(asked)


def _asked(constraints: Constraints, field: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values to try: those that the user lists, else the usual ones within the user's bounds."""
    if field not in constraints.allowed:
        return usual
    allowed = constraints.allowed[field]
    return allowed.values or tuple(value for value in usual if value in allowed) or (allowed.low,)


Entry = dict[str, Allowed]


def _combinations(
    probe: Probe, field: str, value: Any, beside: Mapping[str, tuple[Any, ...]]
) -> Iterable[Entry] | None:
    """Entries to exclude: the values beside which a framework lacks this one; None if it lacks it beside all."""
    tries = [others for others in _products(beside) if _is_plain({field: value, **others}, beside)]
    if probe.has(field, value, tries[0]):
        return ()  # other combinations that it lacks come up in the search
    had = [others for others in tries[1:] if probe.has(field, value, others)]
    if not had:
        return None
    entries: list[dict[str, Any]] = []
    for count in (1, 2):
        for some in combinations(beside, count):
            for entry in _products({other: beside[other] for other in some}):
                known = any(earlier.items() <= entry.items() for earlier in entries)
                if not known and not any(entry.items() <= others.items() for others in had):
                    entries.append(entry)
    fixed = {field: value, **({"tp": 2, "cp": 2} if field == "order" else {})}  # of one dimension there is one order
    return [{name: _every(name, value) for name, value in {**fixed, **entry}.items()} for entry in entries]


def _products(values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(values, chosen)) for chosen in product(*values.values()))


def _is_plain(fields: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether all fields without effect have their first value."""
    strategy = Strategy().unchecked(**fields)
    return all(fields[name] == usual[0] or name not in ACTS or ACTS[name](strategy) for name, usual in values.items())


def _every(field: str, value: Any) -> Allowed:
    """All values that ``value`` stands for: 2 for every higher degree."""
    return Allowed(None, 2) if field in _DEGREES and value > 1 else Allowed((value,))


def without(constraints: Constraints, job: Job, way: Way) -> Constraints:
    """The constraints that also exclude the strategy of ``job``, which the framework does not have in this way.

    Similar strategies are excluded with it: the entry names only fields of which some other value would be had.
    """
    strategy, probe = job.strategy, Probe(job, way)
    if isinstance(strategy.stage_layers, tuple):
        return constraints.with_allowed({"stage_layers": Allowed(("even", "balanced"))})
    entry: Entry = {}
    experts = [("expert_tp", (1, strategy.tp))] if strategy.ep > 1 else []
    for field, usual in (*_tried(job), *experts):
        value = field_value(strategy, field)
        if field in ACTS and not ACTS[field](strategy):
            continue
        had = [other for other in usual if other != value and any(map(probe.runs, _varied(job, field, other)))]
        if had:
            wide = field in _DEGREES and had == [1]
            entry[field] = _every(field, value) if wide else Allowed((value,))
    if not entry:
        raise SpecError("⟨framework⟩", f"{way.name} cannot express even plain data parallelism", "drop ⟨framework⟩")
    return Constraints(constraints.allowed, (*constraints.excluded, entry))


def _varied(job: Job, field: str, value: Any) -> Iterator[Job]:
    """The job with another value of a field, in every variant that the value brings along (`_BESIDE`)."""
    beside = _BESIDE[field] if field in ("tp", "cp") and value > 1 else {}
    for fields in _products(beside):
        yield job.unchecked(strategy=_with(job.strategy, {**fields, field: value}))


# -- Plans as frameworks run them ---------------------------------------------------------------------


# Plain data parallelism: every device holds the whole model.
_DDP = {field: Allowed((value,)) for field, value in
        {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "zero": 0, "offload": OFFLOADS["none"]}.items()}  # fmt: skip
NAMES = (*TARGETS, "ddp")
_MOST_COMBINATIONS = 12  # of values that a framework cannot express together: as many are excluded one by one


@dataclass(frozen=True)
class FrameworkVerdict:
    """What a framework lacks for a plan, and what it runs instead."""

    name: str
    lacks: tuple[Lost, ...]
    own: Candidate | None = None
    """The plan, or the best layout near it, with the framework's kernels and precision; None if nothing fits."""
    differs: tuple[str, ...] = ()  # how ``own`` differs from the plan
    needed_bytes: float | None = None  # memory of the plan as the framework runs it, if it does not fit
    searched: bool = True  # whether layouts near the plan were searched

    @property
    def runs(self) -> bool:
        """Whether it runs the plan itself, and that fits."""
        return not self.lacks and self.needed_bytes is None


def who_can_run(plan: Plan, *, near: bool = True) -> tuple[FrameworkVerdict, ...]:
    """A verdict for each framework; ``near`` searches similar layouts for those that cannot run the plan."""
    deadline = plan.request.deadline
    return tuple(_verdict(plan, name, near and not deadline.leaves_out()) for name in TARGETS)


def _verdict(plan: Plan, name: str, near: bool) -> FrameworkVerdict:
    job, lacks, needed = plan.best.job, tuple(lacking(plan.best.job, name)), None
    if not lacks:
        own = candidate(as_run_by(job, target(name)))
        if own.memory.total <= plan.request.capacity_bytes:
            return FrameworkVerdict(name, (), own, differences(job, own.job))
        needed = own.memory.total
    other = _best_near(plan, name) if near else None
    return FrameworkVerdict(name, lacks, other, differences(job, other.job) if other else (), needed, near)


def _best_near(plan: Plan, name: str) -> Candidate | None:
    """The best strategy that a framework can run among layouts near the plan; None if none fits."""
    if other_than_strategy(plan.best.job, name):
        return None
    best, request = plan.best.job.strategy, plan.request
    near = {"tp": (1, 2, 4, 8, best.tp), "cp": (1, best.cp), "pp": (1, 2, best.pp), "ep": (1, 8, best.ep)}
    constraints = request.constraints
    for field, values in near.items():
        if not constraints.names(field):
            constraints = constraints.with_allowed({field: Allowed(tuple(dict.fromkeys(values)))})
    try:
        ways = requests_for(replace(request, constraints=constraints), name)
    except SpecError:
        return None  # the constraints rule everything out
    fitting = [nearest for nearest in (_first_near(way, name) for way in ways.values()) if nearest is not None]
    return min(fitting, key=lambda nearest: nearest.seconds_per_token, default=None)


def _first_near(request: Request, name: str) -> Candidate | None:
    for offload in (False, True)[: 1 if request.offload is False else 2]:
        space, deadline = request.space(offload=offload), request.deadline.part()
        result = search(space, memory_bytes=request.capacity_bytes, any_priced=True, deadline=deadline)
        for priced in result.best:
            job = job_with(request.job, priced.strategy(), priced.sequences)
            if not lacking(job, name):
                own = candidate(as_run_by(job, target(name)))
                if own.memory.total <= request.capacity_bytes:
                    return own
    return None


def check_framework(name: str) -> str:
    if not isinstance(name, str) or name.lower() not in NAMES:
        raise SpecError("⟨framework⟩", f"{shown(name)} is not known", nearest_name(str(name), NAMES))
    return name.lower()


def requests_for(request: Request, name: str) -> dict[Way, Request]:
    """A request for each way of a framework: restricted to what it can express, and priced as it runs it.

    Raises SpecError if the framework has no way.
    """
    requests: dict[Way, Request] = {}
    refused: SpecError | None = None
    for way in ways_of(request.job, name):
        try:
            requests[way] = within_framework(request, way)
        except SpecError as error:
            refused = refused or error
    if refused is not None and not requests:
        raise refused
    return requests


def searched_for(request: Request, name: str) -> tuple[Plan | Search, Request]:
    """The plan for a framework, and the request it answers; if nothing fits, the search that needed least memory."""
    if check_framework(name) == "ddp":
        request = replace(request, constraints=request.constraints.with_allowed(_DDP))
        return plan(request), request
    results: list[tuple[Plan | Search, Request]] = []
    refused: DoesNotFit | None = None
    for way, own in requests_for(request.started(), name).items():
        try:
            results.append((_plan_in(way, own), own))
        except DoesNotFit as error:
            refused = error
    plans = [result for result, _ in results if isinstance(result, Plan)]
    if refused is not None and not plans:
        raise refused
    if not plans:
        return min(results, key=lambda result: _least_bytes(result[0]))
    first = min(plans, key=lambda option: option.best.seconds_per_token)
    return first.with_candidates(
        candidate for other in plans if other is not first for candidate in other.candidates
    ), first.request


def _least_bytes(result: Plan | Search) -> float:
    least = result.least_memory if isinstance(result, Search) else None
    return math.inf if least is None else least.memory_bytes


def _plan_in(way: Way, request: Request) -> Plan | Search:
    """The plan in one way of a framework; values that it cannot express together are excluded as they come up."""
    probe, result = Probe(request.job, way), plan(request)
    for _ in range(_MOST_COMBINATIONS):
        firsts = (result.best, result.fastest) if isinstance(result, Plan) else ()
        unsaid = [candidate.job for candidate in firsts if not probe.runs(candidate.job)]
        if not unsaid:
            break
        request = replace(request, constraints=without(request.constraints, unsaid[0], way))
        result = plan(request)
    return _as_run(result, way) if isinstance(result, Plan) else result


def _as_run(plan: Plan, way: Way) -> Plan:
    """The candidates that the framework can express, priced as it runs them."""
    framework, probe, kept = target(way.name), Probe(plan.request.job, way), []
    for known in plan.request.deadline.until(plan.candidates):
        if not probe.runs(known.job):
            continue
        job = as_run_by(known.job, framework)
        own = known if job is known.job else candidate(job)
        if own.memory.total <= plan.request.capacity_bytes:
            kept.append(own)
    if not kept:
        problem = f"what would be best does not fit as {way.name} runs it, or it has no words for it"
        raise DoesNotFit("⟨framework⟩", problem, "give ⟨max_memory⟩ less than the device has, or fix more dimensions")
    return plan.of(kept)
