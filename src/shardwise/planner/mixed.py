"""A plan for a cluster of several kinds of nodes: priced only, this project's engine does not run it yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.planner.candidate import Candidate, complexity
from shardwise.planner.constraints import Constraints
from shardwise.planner.deadline import USUAL_SECONDS, Deadline
from shardwise.planner.mixed_division import divided, polished
from shardwise.planner.mixed_estimate import estimated
from shardwise.planner.mixed_space import MixedRequest, MixedSpace
from shardwise.planner.mixed_step import MixedStep, mixed_step
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.supported import require_offered
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.spec.mixed import MixedCluster, parse_mixed
from shardwise.spec.model import Model
from shardwise.spec.stack import Stack, default_stack
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training
from shardwise.spec.units import readable_bytes

__all__ = ["MixedCluster", "MixedPlan", "parse_mixed", "plan_mixed"]

MOST_SIMULATED = 64
POLISHED = 4  # of the fastest, whose neighbouring divisions are tried too
TIE = 0.005  # strategies this close are ranked by simplicity
BEYOND = 1.02  # strategies whose floor is this much slower than the best one are not looked at


@dataclass(frozen=True)
class MixedPlan:
    """``candidates``: all that were simulated, best first; ``alone``: the best on each kind by itself, if asked for."""

    request: MixedRequest
    tried: int
    candidates: tuple[MixedStep, ...]
    alone: tuple[Candidate | None, ...]
    was_stopped: bool = False  # by its limit of time: these are the best so far

    status = "priced only"
    note = "a job on several kinds of nodes cannot be written as a job file or run yet"

    @property
    def best(self) -> MixedStep:
        return self.candidates[0]

    @property
    def best_alone(self) -> Candidate | None:
        return max(filter(None, self.alone), key=lambda one: one.tokens_per_second, default=None)

    @property
    def gain(self) -> float | None:
        """Tokens per second over those of the best kind alone; None if nothing fits on one alone."""
        return self.best.tokens_per_second / self.best_alone.tokens_per_second if self.best_alone else None


def plan_mixed(
    model: Model,
    mixed: MixedCluster,
    training: Training,
    stack: Stack | None = None,
    *,
    strategy: Strategy | None = None,
    constraints: Constraints | None = None,
    minimum_batch: int | None = None,
    memory_bytes: float | None = None,
    any_priced: bool = False,
    time_limit_seconds: float | None = None,
    alone: bool = True,
) -> MixedPlan:
    """The best strategies with the pipeline across the kinds, and the best plan on each kind alone.

    ``strategy`` says what no search varies; for the others see `Request`.
    """
    one = Job(model=model, cluster=mixed.kinds[0], training=replace(training, global_batch=None))
    job = one.unchecked(strategy=strategy or Strategy(), training=training, stack=stack or default_stack())
    asked = (constraints or Constraints(), minimum_batch, memory_bytes, any_priced, time_limit_seconds)
    request = MixedRequest(mixed, job, *asked)
    if minimum_batch is None and training.global_batch is None:
        raise SpecError("training.global_batch", "is missing", "give --global-batch, such as 4M-tokens or 1024")
    require_offered(job, any_priced=any_priced)
    space = MixedSpace(request)
    space.check()
    deadline = Deadline(USUAL_SECONDS if time_limit_seconds is None else time_limit_seconds)
    tried, found = _search(space, deadline.part())
    steps = _ranked(found)
    better = [polished(request, step) for step in deadline.part().until(steps[:POLISHED])]
    steps = _ranked(better + steps[len(better) :])
    apart = _alone(request, deadline) if alone else ()
    return MixedPlan(request, tried, tuple(steps), apart, deadline.was_hit)


def _ranked(steps: list[MixedStep]) -> list[MixedStep]:
    """By time; first the simplest of those that the fastest does not clearly beat."""
    by_time = sorted(steps, key=lambda one: one.seconds_per_token)
    tied = [one for one in by_time if one.seconds_per_token <= by_time[0].seconds_per_token * (1 + TIE)]
    first = min(tied, key=lambda one: (complexity(one.arrangement.strategy), one.seconds_per_token))
    return [first, *(one for one in by_time if one is not first)]


def _alone(request: MixedRequest, deadline: Deadline) -> tuple[Candidate | None, ...]:
    """The best plan on each kind by itself."""
    found: list[Candidate | None] = []
    for kind in request.mixed.kinds:
        own = Request(
            request.job.unchecked(cluster=kind),
            request.constraints,
            request.minimum_batch,
            request.memory_bytes,
            any_priced=request.any_priced,
            running=deadline,
        )
        result = plan(own)
        found.append(result.fastest if isinstance(result, Plan) else None)
    return tuple(found)


def _search(space: MixedSpace, deadline: Deadline) -> tuple[int, list[MixedStep]]:
    """Strategies in the order of a floor of their time, until no other can be faster than the best that fits."""
    floors = sorted(deadline.part().until(estimated(space)), key=lambda one: one.seconds_per_token)
    found: list[MixedStep] = []
    fastest = float("inf")
    for one in deadline.until(floors):
        if len(found) >= MOST_SIMULATED or one.seconds_per_token > fastest * BEYOND:
            break
        steps = [mixed_step(way) for way in divided(space.request, one.arrangement, one.pieces)]
        if steps:
            found.append(min(steps, key=lambda step: step.seconds_per_token))
            fastest = min(fastest, found[-1].seconds_per_token)
    if not found:
        raise _what_is_missing(space, stopped=deadline.was_hit)
    return len(floors), found


def _what_is_missing(space: MixedSpace, *, stopped: bool) -> SpecError:
    request = space.request
    if stopped:
        problem, remedy = "nothing that fits was found within the time limit", "give it longer (--time-limit 10min)"
        return SpecError("plan", problem, remedy)
    if next(space.arrangements(), None) is None:
        sizes = " and ".join(f"{kind.devices:,}" for kind in request.mixed.kinds)
        problem = f"no tp·cp·dp divides {sizes} devices into stages of {request.job.model.layers} layers and the batch"
        remedy = "use numbers of nodes with a common divisor, or a batch in tokens, which is rounded"
        return SpecError("plan", problem, remedy)
    there = " and ".join(
        f"{readable_bytes(request.capacity_bytes(number))} per {kind.device.name}"
        for number, kind in enumerate(request.mixed.kinds)
    )
    problem = f"no strategy with the pipeline across the kinds fits in {there}"
    return DoesNotFit("plan", problem, "use more nodes of either kind")
