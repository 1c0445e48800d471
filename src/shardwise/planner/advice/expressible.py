"""What a framework can express of the search space: each value of a field, tried with the others that it may need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from shardwise.interop.frameworks import Target, lacking, own_stack, target
from shardwise.interop.frameworks.results import Lost
from shardwise.planner.constraints import ACTS, OFFLOADS, Allowed, Constraints, field_value
from shardwise.planner.request import Request
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import PLAIN, job_schedules, schedule_record
from shardwise.spec.stack import stack_from
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import RECIPES

_STAGES = (0, 1, 2, 3)
_METHODS = ("ring", "all-gather", "ulysses")
_DEGREES = ("tp", "cp", "pp", "ep")
# Values of other fields that a value may need. Every field is also tried with each ZeRO stage of the framework.
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
_OF_PIPELINES = ("schedule", "stage_layers", "order")  # what the ZeRO stage does not change


def _tried(job: Job) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Fields and the values that probe what a framework can express; 2 stands for every higher degree."""
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
    """A mode of a framework that is priced by itself: the stack and the precision of what it runs."""

    name: str  # of the framework
    stack: str
    precision: str
    alone: bool = dataclasses.field(default=False, compare=False)  # it has no other

    def request(self, request: Request) -> Request:
        """The request as the framework runs it in this way; the framework runs the result, so our engine need not."""
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
    """In which ways a framework trains the job's model, the usual one first; raises SpecError if in none."""
    framework = target(name)
    plain = job.unchecked(strategy=Strategy(dp=1), training=job.training.unchecked(global_batch=64))
    probes = [plain.unchecked(strategy=Strategy().unchecked(dp=4, zero=stage)) for stage in _STAGES]
    computed = RECIPES[job.training.precision].compute
    all_ways = dict.fromkeys(_way(probe, framework) for probe in (plain, *probes))
    ways = [way for way in all_ways if way.precision in RECIPES and RECIPES[way.precision].compute == computed]
    if not ways:
        why = framework.reasons.get("training.precision", "")
        raise SpecError("--for", f"{name} does not train in {job.training.precision}", f"{framework.title}: {why}")
    lost = other_than_strategy(plain, name)
    if lost:
        problem = f"{name} does not have " + ", ".join(f"{missing.field} ({missing.why})" for missing in lost)
        raise SpecError("--for", problem, "choose another framework")
    return ways if len(all_ways) > 1 else [replace(way, alone=True) for way in ways]


def _way(job: Job, framework: Target) -> Way:
    fields = framework.read_back(job, framework.text(job)).fields
    return Way(framework.name, stack_from(fields["stack"]).base, str(fields.get("training.precision")))


def other_than_strategy(job: Job, name: str) -> list[Lost]:
    """What a framework lacks of the model or the optimizer that affects the price, whatever the strategy."""
    return [missing for missing in lacking(job, name) if not missing.within("model.numerics", "strategy")]


@dataclass(frozen=True)
class Probe:
    """Asks whether a framework has values of a job's strategy, in one of its ways."""

    job: Job
    way: Way

    def has(self, field: str, value: Any, beside: Mapping[str, Any]) -> bool:
        """Whether it has the value together with those ``beside`` it."""
        fields: dict[str, Any] = {"stage_layers": "even", "dp": 4, **beside, field: value}
        fields["recompute_operators"] = self.job.strategy.recompute_operators
        if field == "stage_layers":  # only a pipeline that does not divide shows the difference
            fields["pp"] = next((pp for pp in range(2, self.job.model.layers) if self.job.model.layers % pp), 2)
        if field == "shard_group" and value is not None:
            fields["dp"] = 2 * value
        strategy, training = _with(Strategy(), fields), self.job.training.unchecked(global_batch=64)
        names = [field] if field in _OF_PIPELINES else [field, *beside]
        names += ["recompute_operators"] if field == "recompute" else []
        probe = self.job.unchecked(strategy=strategy, training=training)
        return self._runs(probe, *(f"strategy.{name}" for name in names))

    def runs(self, job: Job) -> bool:
        """Whether it runs a whole strategy."""
        return self._runs(job, "strategy")

    def _runs(self, job: Job, *paths: str) -> bool:
        try:
            return self.way.is_of(job) and not any(missing.within(*paths) for missing in lacking(job, self.way.name))
        except SpecError:
            return False


def _with(strategy: Strategy, fields: Mapping[str, Any]) -> Strategy:
    """The strategy with other values, and as many chunks per rank as its schedule then has."""
    changed = strategy.unchecked(**fields)
    chunks = max(2, changed.interleave) if schedule_record(changed.schedule).chooses_chunks else 1
    return changed.unchecked(interleave=chunks)


# -- the constraints of a framework -------------------------------------------------------------------


def within_framework(request: Request, way: Way) -> Request:
    """The request, priced in the framework's way, without what the framework does not have in it.

    A value is left out if the framework has it with none of the others that it may need; if it has it with some, the
    combinations with the rest are excluded.
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
            # The first value of most fields is the default everywhere; that of these differs.
            plain = value == usual[0] and field not in ("zero", "sequence_parallel", "order")
            unsaid = () if plain else _combinations(probe, field, value, beside)
            if unsaid is not None:
                kept.append(value)
                constraints = Constraints(constraints.allowed, (*constraints.excluded, *unsaid))
        if not kept:
            why = _reason(request.job, field, asked[0], way)
            raise SpecError("--for", f"{way.name} does not have {field} {Allowed(asked)}", why)
        if len(kept) < len(asked):
            constraints = constraints.with_allowed({field: Allowed(tuple(kept))})
        had[field] = tuple(kept)
    return replace(request, constraints=constraints)


def _beside(field: str, had: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """The values to try beside those of a field, of those that the framework has."""
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
    why = target(way.name).reasons.get(f"strategy.{field}", "drop --for, or that value")
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
    """The values beside which a framework does not have this one; None if it has it beside none."""
    tries = [others for others in _products(beside) if _is_plain({field: value, **others}, beside)]
    if probe.has(field, value, tries[0]):
        return ()  # others come up in the search
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
    """Whether the fields without effect have their first value."""
    strategy = Strategy().unchecked(**fields)
    return all(fields[name] == ones[0] or name not in ACTS or ACTS[name](strategy) for name, ones in values.items())


def _every(field: str, value: Any) -> Allowed:
    """The values that ``value`` stands for."""
    return Allowed(None, 2) if field in _DEGREES and value > 1 else Allowed((value,))


def without(constraints: Constraints, job: Job, way: Way) -> Constraints:
    """The constraints without a strategy that the framework does not have in its way.

    Others are left out with it: any value may stand in the fields that do not change the answer, one by one.
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
        raise SpecError("--for", f"{way.name} cannot express even plain data parallelism", "drop --for")
    return Constraints(constraints.allowed, (*constraints.excluded, entry))


def _varied(job: Job, field: str, value: Any) -> Iterator[Job]:
    """The job with another value, and with each of those that a new dimension brings."""
    beside = _BESIDE[field] if field in ("tp", "cp") and value > 1 else {}
    for fields in _products(beside):
        yield job.unchecked(strategy=_with(job.strategy, {**fields, field: value}))
