"""A plan: the search, its best strategies priced again by the simulator, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from shardwise.planner.candidate import Candidate, Degrees, candidate, complexity, job_with
from shardwise.planner.constraints import Allowed
from shardwise.planner.request import Request
from shardwise.planner.search import Found, Search, search
from shardwise.planner.space import Space
from shardwise.planner.stages import with_best_stages
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

RANKED_LAYOUTS = 24  # layouts whose best strategy is simulated too, beside the best of all
OWN_STAGES = 10  # of the fastest pipelines, whose layers are divided by time and memory too
Filters = Mapping[str, Mapping[str, Allowed]]
TIE = 0.005  # strategies this close are told apart by how simple they are


@dataclass(frozen=True)
class Plan:
    """``candidates``: all that were simulated, best first."""

    request: Request
    search: Search
    narrowing: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @cached_property
    def layouts(self) -> tuple[Candidate, ...]:
        """The best strategy of every layout (tp, cp, pp, dp, ep), best first."""
        first: dict[Degrees, Candidate] = {}
        for one in self.candidates:
            first.setdefault(one.degrees, one)
        return tuple(first.values())

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """The best with each set of dimensions, fastest first; then the sets with which nothing fits."""
        best: dict[tuple[str, ...], Found] = {}
        least: dict[tuple[str, ...], float] = {}
        for degrees, found in self.search.of_degrees.items():
            used = dimensions_used(degrees)
            if used not in best or found.seconds_per_sequence < best[used].seconds_per_sequence:
                best[used] = found
        for degrees, held in self.search.least_of_degrees.items():
            used = dimensions_used(degrees)
            least[used] = min(held, least.get(used, held))
        fitting = [Family(used, candidate(_job(self.request.job, one)), least[used]) for used, one in best.items()]
        fitting.sort(key=lambda one: one.best.seconds_per_token if one.best else 0.0)
        return (*fitting, *(Family(used, None, held) for used, held in least.items() if used not in best))

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Nothing found is both faster and smaller than one of these: least memory first."""
        kept: list[Candidate] = []
        priced = [candidate(_job(self.request.job, found)) for found in self.search.front]
        for one in sorted([*priced, *self.candidates], key=lambda one: one.memory.total):
            if not kept or one.seconds_per_token < kept[-1].seconds_per_token * (1 - TIE):
                kept.append(one)
        return tuple(kept)


@dataclass(frozen=True)
class Family:
    """All strategies that use the same dimensions: the best that fits, and the least memory any needs."""

    dimensions: tuple[str, ...]
    best: Candidate | None
    least_memory_bytes: float


def dimensions_used(degrees: Degrees) -> tuple[str, ...]:
    """Names of the dimensions beside data parallelism that ``degrees`` use."""
    tp, cp, pp, _, ep = degrees
    return tuple(name for name, degree in (("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep)) if degree > 1)


def plan(
    request: Request, progress: Callable[[int], None] | None = None, filters: Filters | None = None
) -> Plan | Search:
    """The plan; or, where nothing that runs fits, the search that shows it. For ``filters`` see `search`."""
    space = request.space(offload=bool(request.offload))
    result = _search(request, space, filters, progress)
    if not result.best and request.offload is None and request.job.cluster.host_link is not None:
        space = request.space(offload=True)
        result = _search(request, space, filters, progress)
    if not result.best:
        return result
    candidates = _simulated(request.job, result)
    candidates += _with_own_stages(request, candidates)
    return Plan(request, result, space.narrowing, tuple(ranked(candidates, lambda one: one.job.strategy)))


def _search(request: Request, space: Space, filters: Filters | None, progress: Callable[[int], None] | None) -> Search:
    return search(
        space,
        memory_bytes=request.capacity_bytes,
        any_priced=request.any_priced,
        filters=filters,
        progress=progress,
    )


def _simulated(job: Job, result: Search) -> list[Candidate]:
    layouts = sorted(result.of_degrees.values(), key=lambda one: one.seconds_per_sequence)[:RANKED_LAYOUTS]
    jobs = dict.fromkeys(_job(job, found) for found in [*result.best, *layouts])
    return [candidate(one) for one in jobs]


def _with_own_stages(request: Request, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest pipelines once more, where uneven stages make them faster; the even ones stay for other engines."""
    if request.constraints.names("stage_layers"):
        return []
    pipelines = [one for one in candidates if one.job.strategy.pp > 1]
    fastest = sorted(pipelines, key=lambda one: one.seconds_per_token)[:OWN_STAGES]
    divided = [with_best_stages(one, request.capacity_bytes) for one in fastest]
    return [own for own, even in zip(divided, fastest) if own is not even]


def _job(job: Job, found: Found) -> Job:
    return job_with(job, found.strategy(), found.sequences)


class Timed(Protocol):
    """A simulated step."""

    @property
    def seconds_per_token(self) -> float: ...


Step = TypeVar("Step", bound=Timed)


def ranked(steps: Iterable[Step], strategy_of: Callable[[Step], Strategy]) -> list[Step]:
    """By time; first the simplest of those that the fastest does not clearly beat."""
    by_time = sorted(steps, key=lambda one: one.seconds_per_token)
    limit = by_time[0].seconds_per_token * (1 + TIE)
    tied = [one for one in by_time if one.seconds_per_token <= limit]
    first = min(tied, key=lambda one: (complexity(strategy_of(one)), one.seconds_per_token))
    return [first, *(one for one in by_time if one is not first)]


def required(found: Plan | Search, request: Request) -> Plan:
    """The plan, or one line that says what is missing."""
    if isinstance(found, Plan):
        return found
    from shardwise.planner.missing import what_is_missing

    raise SpecError("plan", *what_is_missing(found, request))
