"""A plan: the best strategies of a search, simulated and ranked.

Among strategies within noise of the fastest the simplest comes first; the others follow by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from shardwise.cost.memory.room import fit_of, fit_probability
from shardwise.planner.candidate import Candidate, Degrees, candidate, complexity, dimensions_used, job_with
from shardwise.planner.request import Request
from shardwise.planner.search.search import PricedStrategy, Search, search
from shardwise.planner.search.space import Space
from shardwise.planner.search.stages import with_best_stages
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.uncertainty.residuals import PRINTED_DIGITS, Noise, error_bar, noise_of

Group = Literal["within noise", "slower"]
GROUPS: tuple[Group, ...] = ("within noise", "slower")


@dataclass(frozen=True)
class RankingRow:
    """The first strategy of a layout; ``like`` are those of layouts that only add dimensions to the same idea."""

    group: Group
    best: Candidate
    like: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Simulated strategies of one job, best first: those within ``noise`` of the fastest, then the others."""

    candidates: tuple[Candidate, ...]
    noise: Noise

    @cached_property
    def fastest(self) -> Candidate:
        return min(self.candidates, key=lambda candidate: candidate.seconds_per_token)

    def loss_of(self, candidate: Candidate) -> float:
        """The extra time per token against the fastest, as a share, to the digits that are printed."""
        return _loss(candidate, self.fastest)

    def group_of(self, candidate: Candidate) -> Group:
        return "within noise" if self.loss_of(candidate) <= self.noise.share else "slower"

    @cached_property
    def layouts(self) -> tuple[Candidate, ...]:
        """The first strategy of every layout (tp, cp, pp, dp, ep)."""
        first: dict[Degrees, Candidate] = {}
        for candidate in self.candidates:
            first.setdefault(candidate.degrees, candidate)
        return tuple(first.values())

    @cached_property
    def rows(self) -> tuple[RankingRow, ...]:
        """The layouts, near-duplicates under the one that they repeat; the fastest always has a row of its own."""
        rows: list[RankingRow] = []
        for candidate in self.layouts:
            group = self.group_of(candidate)
            for number, row in enumerate(rows):
                if (
                    candidate.degrees != self.fastest.degrees
                    and row.group == group
                    and self._repeats(row.best, candidate)
                ):
                    rows[number] = RankingRow(group, row.best, (*row.like, candidate))
                    break
            else:
                rows.append(RankingRow(group, candidate))
        return tuple(rows)

    def _repeats(self, first: Candidate, other: Candidate) -> bool:
        """Whether the other has all dimensions of the first, takes as long within noise and clearly saves no memory."""
        as_long = other.seconds_per_token <= first.seconds_per_token * (1 + self.noise.share)
        most_bytes = other.memory.total * (1 + error_bar(other.job).memory_high)
        return set(first.dimensions) <= set(other.dimensions) and as_long and most_bytes >= first.memory.total


def ranked(candidates: Iterable[Candidate]) -> Ranking:
    """The strategies in the order to try them."""
    by_time = sorted(candidates, key=lambda candidate: candidate.seconds_per_token)
    noise = noise_of(by_time[0].job)
    near = [candidate for candidate in by_time if _loss(candidate, by_time[0]) <= noise.share]
    first = sorted(_simplest_of_layouts(near), key=_difficulty)
    taken = {id(candidate) for candidate in first}
    return Ranking((*first, *(candidate for candidate in by_time if id(candidate) not in taken)), noise)


def _loss(candidate: Candidate, fastest: Candidate) -> float:
    return round(candidate.loss_to(fastest), PRINTED_DIGITS)


def _simplest_of_layouts(by_time: Sequence[Candidate]) -> Iterator[Candidate]:
    """Of each layout the simplest strategy; of several as simple the fastest."""
    simplest: dict[Degrees, Candidate] = {}
    for candidate in by_time:
        known = simplest.get(candidate.degrees)
        if known is None or complexity(candidate.job.strategy) < complexity(known.job.strategy):
            simplest[candidate.degrees] = candidate
    yield from simplest.values()


def _difficulty(candidate: Candidate) -> tuple[float, ...]:
    """Fewest dimensions first, then what a framework can express, plain choices, and what fits with the memory margin.

    The rest is ordered by time as printed, then by the memory left.
    """
    lacks_room = fit_of(candidate.job) != "fits"
    printed_seconds = float(f"{candidate.seconds_per_token:.3g}")
    choices = complexity(candidate.job.strategy)
    return (
        len(candidate.dimensions),
        not said_by_a_framework(candidate),
        choices,
        lacks_room,
        printed_seconds,
        -candidate.margin_bytes,
    )


def why_behind(first: Candidate, other: Candidate) -> str:
    """Why the other ranks behind the first, of two within noise of each other."""
    reasons = (
        "has more dimensions",
        "no framework's configuration can express it",
        "is less plain",
        "may not fit if it needs more memory than predicted",
        "is no simpler",
        "leaves less memory",
    )
    return next((why for why, a, b in zip(reasons, _difficulty(first), _difficulty(other)) if a < b), reasons[-2])


def said_by_a_framework(candidate: Candidate) -> bool:
    """Whether some framework's configuration can express the strategy, whatever its precision and optimizer."""
    from shardwise.interop.frameworks import TARGETS, lacking  # tables that only a plan needs

    return any(all(not lost.within("strategy") for lost in lacking(candidate.job, name)) for name in TARGETS)


RANKED_LAYOUTS = 24  # layouts whose best strategy is simulated too
OWN_STAGES = 10  # fastest pipelines that are also tried with layers divided by time and memory
FRONT_STEP = 0.005  # gain in time that justifies more memory on the Pareto front


@dataclass(frozen=True)
class Plan(Ranking):
    """A ranking of all that was simulated, with the search that found it.

    Every table and answer uses these candidates: a strategy has one price, and the best of a kind is its first.
    """

    request: Request
    search: Search
    narrowing: tuple[str, ...]
    tight: tuple[Candidate, ...] = ()  # faster than all candidates, but they may run out of memory

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def left_bytes(self, candidate: Candidate) -> float:
        """What a strategy leaves of a device's memory, or of the cap on it."""
        return self.request.room.usable_bytes - candidate.memory.total

    def fit_probability(self, candidate: Candidate) -> float:
        """How likely a strategy does not run out of memory."""
        return fit_probability(candidate.job, candidate.memory.total)

    def of(self, candidates: Iterable[Candidate]) -> Plan:
        """The same plan with these strategies, ranked."""
        ranking = ranked(candidates)
        return replace(self, candidates=ranking.candidates, noise=ranking.noise)

    def joined(self, others: Iterable[Candidate]) -> Plan:
        """The plan with further strategies, simulated to answer a question about it."""
        known = {candidate.job for candidate in self.candidates}
        more = {candidate.job: candidate for candidate in others if candidate.job not in known}
        return self.of([*self.candidates, *more.values()]) if more else self

    @cached_property
    def families(self) -> tuple[StrategyFamily, ...]:
        """The first with each set of dimensions, fastest first; then the sets with which nothing fits."""
        first: dict[tuple[str, ...], Candidate] = {}
        for candidate in self.candidates:
            first.setdefault(candidate.dimensions, candidate)
        least: dict[tuple[str, ...], float] = {}
        for degrees, held in self.search.least_of_degrees.items():
            used = dimensions_used(degrees)
            least[used] = min(held, least.get(used, held))
        # A stopped search may not have reached strategies that were simulated for another reason.
        fitting = [StrategyFamily(used, best, least.get(used, best.memory.total)) for used, best in first.items()]
        fitting.sort(key=lambda family: family.best.seconds_per_token if family.best else 0.0)
        return (*fitting, *(StrategyFamily(used, None, held) for used, held in least.items() if used not in first))

    @cached_property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of time and memory, least memory first."""
        kept: list[Candidate] = []
        known = {option.job for option in self.candidates}
        jobs = dict.fromkeys(_job(self.request.job, point) for point in self.search.front)
        priced = [candidate(job) for job in self.request.deadline.part().until(jobs) if job not in known]
        for option in sorted([*priced, *self.candidates], key=lambda option: option.memory.total):
            if not kept or option.seconds_per_token < kept[-1].seconds_per_token * (1 - FRONT_STEP):
                kept.append(option)
        return tuple(kept)


@dataclass(frozen=True)
class StrategyFamily:
    """All strategies that use the same dimensions: the best that fits, and the least memory any needs."""

    dimensions: tuple[str, ...]
    best: Candidate | None
    least_memory_bytes: float


def plan(request: Request, progress: Callable[[int], None] | None = None) -> Plan | Search:
    """The plan, or the search if nothing that runs fits."""
    running = request.started()
    result, space = searched(running, progress)
    if not result.best:
        return result
    candidates = _simulated(running, result)
    candidates += _with_own_stages(running, candidates)
    ranking = ranked(candidates)
    tight = [candidate(_job(request.job, priced)) for priced in result.tight.values()]
    faster = tuple(option for option in tight if option.seconds_per_token < ranking.fastest.seconds_per_token)
    return Plan(ranking.candidates, ranking.noise, request, result, space.narrowing, faster)


def searched(request: Request, progress: Callable[[int], None] | None = None) -> tuple[Search, Space]:
    """What a search finds, and where: layouts that straddle the network are searched where no other fits."""
    result, space = Search(), request.space(offload=bool(request.offload))
    for straddling in (False, True):
        space = request.space(offload=bool(request.offload), straddling=straddling)
        attempt = _search(request, space, progress)
        result = attempt if attempt.best or not straddling or not result.wanted else result
        if result.best:
            break
    return result, space


def _search(request: Request, space: Space, progress: Callable[[int], None] | None) -> Search:
    """Without offload, and with it where that can gain, unless the request says which."""
    job = request.job
    # On a CPU host memory is what is full.
    may_gain = request.offload is None and job.cluster.host_link is not None and job.run_device != "cpu"
    return search(
        space,
        beyond=replace(space, offload=True) if may_gain else None,
        memory_bytes=request.capacity_bytes,
        tight_bytes=request.room.usable_bytes,
        deadline=request.deadline.part(),
        any_priced=request.any_priced,
        progress=progress,
    )


def _simulated(request: Request, result: Search) -> list[Candidate]:
    """The best overall, of the fastest layouts, and of every set of dimensions, simulated."""
    layouts = sorted(result.of_degrees.items(), key=lambda item: item[1].seconds_per_sequence)
    families: dict[tuple[str, ...], PricedStrategy] = {}
    for degrees, priced in layouts:
        families.setdefault(dimensions_used(degrees), priced)
    finalists = [*result.best, *(priced for _, priced in layouts[:RANKED_LAYOUTS]), *families.values()]
    deadline = request.deadline.part()
    jobs = dict.fromkeys(_job(request.job, priced) for priced in finalists)
    candidates = [candidate(job) for job in deadline.until(jobs)]
    result.was_stopped |= deadline.was_hit
    return candidates


def _with_own_stages(request: Request, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest pipelines, and the fastest of every layout, with uneven stages where these are faster.

    Those with even stages remain candidates for other engines.
    """
    if request.constraints.names("stage_layers"):
        return []
    by_time = sorted(candidates, key=lambda candidate: candidate.seconds_per_token)
    pipelines = [candidate for candidate in by_time if candidate.job.strategy.pp > 1]
    of_layouts = {pipeline.degrees: pipeline for pipeline in reversed(pipelines)}
    chosen = {pipeline.job: pipeline for pipeline in [*pipelines[:OWN_STAGES], *of_layouts.values()]}.values()
    divided = [with_best_stages(pipeline, request.capacity_bytes) for pipeline in request.deadline.part().until(chosen)]
    return [own for own, even in zip(divided, chosen) if own is not even]


def _job(job: Job, priced: PricedStrategy) -> Job:
    return job_with(job, priced.strategy(), priced.sequences)


def required(result: Plan | Search, request: Request) -> Plan:
    """The plan; raises DoesNotFit if nothing fits, SpecError if nothing divides and runs."""
    if isinstance(result, Plan):
        return result
    from shardwise.planner.advice.remedy import what_is_missing

    kind = DoesNotFit if result.least_memory is not None else SpecError
    raise kind("plan", *what_is_missing(result, request))
