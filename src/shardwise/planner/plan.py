"""A plan: the search, its best strategies priced again by the simulator, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.cost.validation.residuals import Noise
from shardwise.planner.candidate import Candidate, candidate, dimensions_used, job_with
from shardwise.planner.ranking import Group, Ranking, Row, ranked
from shardwise.planner.request import Request
from shardwise.planner.search import Found, Search, search
from shardwise.planner.space import Space
from shardwise.planner.stages import with_best_stages
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job

RANKED_LAYOUTS = 24  # layouts whose best strategy is simulated too, beside the best of all
OWN_STAGES = 10  # of the fastest pipelines, whose layers are divided by time and memory too
FRONT_STEP = 0.005  # by which a strategy has to be faster to stand beside one that needs less memory


@dataclass(frozen=True)
class Plan:
    """What a search found, and the order of all that was simulated.

    Every table and answer is about these: a strategy has one price, and the best of a kind is the first of that kind.
    """

    request: Request
    search: Search
    narrowing: tuple[str, ...]
    ranking: Ranking

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.ranking.candidates

    def left_bytes(self, one: Candidate) -> float:
        """What a strategy leaves of a device, or of what was capped of it."""
        return self.request.room.usable_bytes - one.memory.total

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def fastest(self) -> Candidate:
        return self.ranking.fastest

    @property
    def noise(self) -> Noise:
        return self.ranking.noise

    @property
    def layouts(self) -> tuple[Candidate, ...]:
        return self.ranking.layouts

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.ranking.rows

    def group_of(self, one: Candidate) -> Group:
        return self.ranking.group_of(one)

    def joined(self, others: Iterable[Candidate]) -> Plan:
        """The plan with what was simulated besides, as the answer to a question about it."""
        known = {one.job for one in self.candidates}
        more = {one.job: one for one in others if one.job not in known}
        return replace(self, ranking=ranked([*self.candidates, *more.values()])) if more else self

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """The first with each set of dimensions, fastest first; then the sets with which nothing fits."""
        first: dict[tuple[str, ...], Candidate] = {}
        for one in self.candidates:
            first.setdefault(one.dimensions, one)
        least: dict[tuple[str, ...], float] = {}
        for degrees, held in self.search.least_of_degrees.items():
            used = dimensions_used(degrees)
            least[used] = min(held, least.get(used, held))
        # A search that was stopped may not have come to what was simulated for another reason.
        fitting = [Family(used, one, least.get(used, one.memory.total)) for used, one in first.items()]
        fitting.sort(key=lambda one: one.best.seconds_per_token if one.best else 0.0)
        return (*fitting, *(Family(used, None, held) for used, held in least.items() if used not in first))

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Nothing found is both faster and smaller than one of these: least memory first."""
        kept: list[Candidate] = []
        known = {one.job for one in self.candidates}
        jobs = dict.fromkeys(_job(self.request.job, found) for found in self.search.front)
        priced = [candidate(job) for job in self.request.deadline.part().until(jobs) if job not in known]
        for one in sorted([*priced, *self.candidates], key=lambda one: one.memory.total):
            if not kept or one.seconds_per_token < kept[-1].seconds_per_token * (1 - FRONT_STEP):
                kept.append(one)
        return tuple(kept)


@dataclass(frozen=True)
class Family:
    """All strategies that use the same dimensions: the best that fits, and the least memory any needs."""

    dimensions: tuple[str, ...]
    best: Candidate | None
    least_memory_bytes: float


def plan(request: Request, progress: Callable[[int], None] | None = None) -> Plan | Search:
    """The plan; or, where nothing that runs fits, the search that shows it."""
    running = request.started()
    space = request.space(offload=bool(request.offload))
    result = _search(running, space, progress)
    if not result.best and request.offload is None and request.job.cluster.host_link is not None:
        space = request.space(offload=True)
        result = _search(running, space, progress)
    if not result.best:
        return result
    candidates = _simulated(running, result)
    candidates += _with_own_stages(running, candidates)
    return Plan(request, result, space.narrowing, ranked(candidates))


def _search(request: Request, space: Space, progress: Callable[[int], None] | None) -> Search:
    return search(
        space,
        memory_bytes=request.capacity_bytes,
        deadline=request.deadline.part(),
        any_priced=request.any_priced,
        progress=progress,
    )


def _simulated(request: Request, result: Search) -> list[Candidate]:
    """The best of all, of the fastest layouts, and of every set of dimensions."""
    layouts = sorted(result.of_degrees.items(), key=lambda item: item[1].seconds_per_sequence)
    families: dict[tuple[str, ...], Found] = {}
    for degrees, found in layouts:
        families.setdefault(dimensions_used(degrees), found)
    finalists = [*result.best, *(found for _, found in layouts[:RANKED_LAYOUTS]), *families.values()]
    deadline = request.deadline.part()
    jobs = dict.fromkeys(_job(request.job, found) for found in finalists)
    candidates = [candidate(one) for one in deadline.until(jobs)]
    result.was_stopped |= deadline.was_hit
    return candidates


def _with_own_stages(request: Request, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest pipelines, and the fastest of every layout, once more with uneven stages where these are faster.

    Those with even stages stay for other engines.
    """
    if request.constraints.names("stage_layers"):
        return []
    by_time = sorted(candidates, key=lambda one: one.seconds_per_token)
    pipelines = [one for one in by_time if one.job.strategy.pp > 1]
    of_layouts = {one.degrees: one for one in reversed(pipelines)}
    chosen = {one.job: one for one in [*pipelines[:OWN_STAGES], *of_layouts.values()]}.values()
    divided = [with_best_stages(one, request.capacity_bytes) for one in request.deadline.part().until(chosen)]
    return [own for own, even in zip(divided, chosen) if own is not even]


def _job(job: Job, found: Found) -> Job:
    return job_with(job, found.strategy(), found.sequences)


def required(found: Plan | Search, request: Request) -> Plan:
    """The plan, or one line that says what is missing: room (DoesNotFit), or what divides and runs (SpecError)."""
    if isinstance(found, Plan):
        return found
    from shardwise.planner.missing import what_is_missing

    kind = DoesNotFit if found.least_memory is not None else SpecError
    raise kind("plan", *what_is_missing(found, request))
