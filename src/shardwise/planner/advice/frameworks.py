"""Which training frameworks can run a plan, what each lacks, and the price of the plan as each of them runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.interop.frameworks import TARGETS, as_run_by, lacking, target
from shardwise.interop.frameworks.results import Lost
from shardwise.planner.advice.exported import differences
from shardwise.planner.advice.expressible import Probe, Way, other_than_strategy, ways_of, within_framework, without
from shardwise.planner.candidate import Candidate, candidate, job_with
from shardwise.planner.constraints import OFFLOADS, Allowed
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search, search
from shardwise.spec.errors import DoesNotFit, SpecError, nearest_name, shown

# Plain data parallelism: every device holds the whole model.
_DDP = {field: Allowed((value,)) for field, value in
        {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "zero": 0, "offload": OFFLOADS["none"]}.items()}  # fmt: skip
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


def who_can_run(plan: Plan, *, near: bool = True) -> tuple[FrameworkVerdict, ...]:
    """What each framework lacks to run the plan, and what it runs, with its own kernels and precision.

    ``near`` searches similar layouts for frameworks that cannot run the plan.
    """
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
        raise SpecError("--for", f"{shown(name)} is not known", nearest_name(str(name), NAMES))
    return name.lower()


def requests_for(request: Request, name: str) -> dict[Way, Request]:
    """The request within what a framework can express, priced as it runs it: one for each of its ways.

    Raises SpecError if it has none.
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
    """`plan` for a framework, and the request that it is the answer to; that which needs least if nothing fits."""
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
    return first.joined(
        candidate for other in plans if other is not first for candidate in other.candidates
    ), first.request


def _least_bytes(result: Plan | Search) -> float:
    least = result.least_memory if isinstance(result, Search) else None
    return math.inf if least is None else least.memory_bytes


def _plan_in(way: Way, request: Request) -> Plan | Search:
    """The plan in one way of a framework; combinations that it cannot express are excluded as they come up."""
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
        raise DoesNotFit("--for", problem, "give --max-memory less than the device has, or fix more dimensions")
    return plan.of(kept)
