"""A plan: the search, its best strategies priced again by the simulator, ranked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.planner.candidate import Candidate, candidate, complexity, job_with
from shardwise.planner.request import Request
from shardwise.planner.search import Found, Search, search
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

RANKED_LAYOUTS = 24  # layouts whose best strategy is simulated too, beside the best of all
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
        first: dict[tuple[int, ...], Candidate] = {}
        for one in self.candidates:
            first.setdefault(one.degrees, one)
        return tuple(first.values())

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """Nothing found is both faster and smaller than one of these: least memory first."""
        kept: list[Candidate] = []
        priced = [candidate(_job(self.request.job, found)) for found in self.search.front]
        for one in sorted([*priced, *self.candidates], key=lambda one: one.memory.total):
            if not kept or one.seconds_per_token < kept[-1].seconds_per_token * (1 - TIE):
                kept.append(one)
        return tuple(kept)


def plan(request: Request, progress: Callable[[int], None] | None = None) -> Plan | Search:
    """The plan; or, where nothing that runs fits, the search that shows it."""
    offload = bool(request.offload)
    space = request.space(offload=offload)
    result = _search(request, offload, progress)
    if not result.best and request.offload is None and request.job.cluster.host_link is not None:
        space = request.space(offload=True)
        result = _search(request, True, progress)
    if not result.best:
        return result
    return Plan(request, result, space.narrowing, tuple(_ranked(_simulated(request.job, result))))


def _search(request: Request, offload: bool, progress: Callable[[int], None] | None) -> Search:
    return search(
        request.space(offload=offload),
        memory_bytes=request.capacity_bytes,
        any_priced=request.any_priced,
        progress=progress,
    )


def _simulated(job: Job, result: Search) -> list[Candidate]:
    layouts = sorted(result.of_degrees.values(), key=lambda one: one.seconds_per_sequence)[:RANKED_LAYOUTS]
    jobs = dict.fromkeys(_job(job, found) for found in [*result.best, *layouts])
    return [candidate(one) for one in jobs]


def _job(job: Job, found: Found) -> Job:
    return job_with(job, found.strategy(), found.sequences)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By time; first the simplest of those that the fastest does not clearly beat."""
    ranked = sorted(candidates, key=lambda one: one.seconds_per_token)
    limit = ranked[0].seconds_per_token * (1 + TIE)
    tied = [one for one in ranked if one.seconds_per_token <= limit]
    first = min(tied, key=lambda one: (complexity(one.job.strategy), one.seconds_per_token))
    return [first, *(one for one in ranked if one is not first)]


def required(found: Plan | Search, request: Request) -> Plan:
    """The plan, or one line that says what is missing."""
    if isinstance(found, Plan):
        return found
    from shardwise.planner.missing import what_is_missing

    raise SpecError("plan", *what_is_missing(found, request))
