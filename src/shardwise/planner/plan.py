"""A plan: the best strategies of a search, simulated and ranked; or what is missing where nothing fits.

Strategies within noise of the fastest come first, the simplest of them at the top; the others follow by time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from shardwise.cost.memory.room import fit_of, fit_probability, margin_words, room_of
from shardwise.planner.candidate import (
    Candidate,
    Degrees,
    candidate,
    complexity,
    dimensions_used,
    job_with,
    strategy_words,
)
from shardwise.planner.constraints import Allowed
from shardwise.planner.request import Request
from shardwise.planner.search.search import PricedStrategy, Search, search
from shardwise.planner.search.space import Space
from shardwise.planner.search.stages import with_best_stages
from shardwise.planner.search.supported import findings_of
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes
from shardwise.uncertainty.residuals import PRINTED_DIGITS, Noise, error_bar, noise_of

Group = Literal["within noise", "slower"]
GROUPS: tuple[Group, ...] = ("within noise", "slower")


@dataclass(frozen=True)
class RankingRow:
    """One line of a ranking: the first strategy of a layout."""

    group: Group
    best: Candidate
    like: tuple[Candidate, ...] = ()  # near-duplicates, which add dimensions to ``best`` and gain nothing by them


@dataclass(frozen=True)
class Ranking:
    """Simulated strategies of one job, best first: those within ``noise`` of the fastest, then the others."""

    candidates: tuple[Candidate, ...]
    noise: Noise

    @cached_property
    def fastest(self) -> Candidate:
        return min(self.candidates, key=lambda candidate: candidate.seconds_per_token)

    def loss_of(self, candidate: Candidate) -> float:
        """Extra time per token against the fastest, as a share, rounded to the digits that are printed."""
        return _loss(candidate, self.fastest)

    def group_of(self, candidate: Candidate) -> Group:
        return "within noise" if self.loss_of(candidate) <= self.noise.share else "slower"

    @cached_property
    def layouts(self) -> tuple[Candidate, ...]:
        """The first strategy of every layout (tp, cp, pp, dp, ep)."""
        first: dict[Degrees, Candidate] = {}
        for option in self.candidates:
            first.setdefault(option.degrees, option)
        return tuple(first.values())

    @cached_property
    def rows(self) -> tuple[RankingRow, ...]:
        """A row per layout, near-duplicates folded into the row they repeat; the fastest always has its own row."""
        rows: list[RankingRow] = []
        for option in self.layouts:
            group = self.group_of(option)
            for number, row in enumerate(rows):
                if option.degrees != self.fastest.degrees and row.group == group and self._repeats(row.best, option):
                    rows[number] = RankingRow(group, row.best, (*row.like, option))
                    break
            else:
                rows.append(RankingRow(group, option))
        return tuple(rows)

    def _repeats(self, first: Candidate, other: Candidate) -> bool:
        """Whether ``other`` uses every dimension of ``first``, is as fast within noise, and may not save memory."""
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
    """The simplest strategy of each layout; among equally simple ones the fastest."""
    simplest: dict[Degrees, Candidate] = {}
    for option in by_time:
        known = simplest.get(option.degrees)
        if known is None or complexity(option.job.strategy) < complexity(known.job.strategy):
            simplest[option.degrees] = option
    yield from simplest.values()


def _difficulty(candidate: Candidate) -> tuple[float, ...]:
    """Sort key: dimensions, whether a framework can express it, plain choices, whether it fits with the memory margin;
    then time as printed, and memory left."""
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
    """Why ``other`` ranks behind ``first`` although the two are within noise of each other."""
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
    """Whether some framework's configuration can express the strategy; precision and optimizer are ignored."""
    from shardwise.interop.frameworks import TARGETS, lacking  # tables that only a plan needs

    return any(all(not lost.within("strategy") for lost in lacking(candidate.job, name)) for name in TARGETS)


RANKED_LAYOUTS = 24  # of the fastest layouts, whose best strategy is simulated
OWN_STAGES = 10  # of the fastest pipelines, which are also tried with layers divided by time and memory
FRONT_STEP = 0.005  # least gain in time for which the Pareto front takes more memory


@dataclass(frozen=True)
class Plan(Ranking):
    """A ranking of all that was simulated, with the search that found it.

    Every table and answer reads these candidates, so that a strategy has one price everywhere.
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
        """The probability that a strategy does not run out of memory."""
        return fit_probability(candidate.job, candidate.memory.total)

    def of(self, candidates: Iterable[Candidate]) -> Plan:
        """The same plan with other strategies, ranked anew."""
        ranking = ranked(candidates)
        return replace(self, candidates=ranking.candidates, noise=ranking.noise)

    def with_candidates(self, others: Iterable[Candidate]) -> Plan:
        """The plan with further strategies that were simulated to answer a question about it."""
        known = {candidate.job for candidate in self.candidates}
        more = {candidate.job: candidate for candidate in others if candidate.job not in known}
        return self.of([*self.candidates, *more.values()]) if more else self

    @cached_property
    def families(self) -> tuple[StrategyFamily, ...]:
        """The best strategy with each set of dimensions, fastest first; then the sets with which nothing fits."""
        first: dict[tuple[str, ...], Candidate] = {}
        for option in self.candidates:
            first.setdefault(option.dimensions, option)
        least: dict[tuple[str, ...], float] = {}
        for degrees, held in self.search.least_of_degrees.items():
            used = dimensions_used(degrees)
            least[used] = min(held, least.get(used, held))
        # A search that was stopped has no least memory for strategies that were simulated for another reason.
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
    """All strategies that use the same dimensions: the best that fits, and the least memory that any of them needs."""

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
    """The result of a search, and its space: layouts that straddle network levels are tried only if no other fits."""
    space = request.space(offload=bool(request.offload))
    result = _search(request, space, progress)
    if not result.best:
        space = request.space(offload=bool(request.offload), straddling=True)
        straddling = _search(request, space, progress)
        if straddling.best or not result.wanted:
            result = straddling
    return result, space


def _search(request: Request, space: Space, progress: Callable[[int], None] | None) -> Search:
    """Searches without offload, then with it where that can gain, unless the request fixes it."""
    job = request.job
    # On a CPU host memory is what runs out, so offload gains nothing.
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
    """Simulates the best strategies overall, of the fastest layouts, and of every set of dimensions."""
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
    """The fastest pipelines, overall and of every layout, with uneven stages where these are faster.

    The same pipelines with even stages remain candidates, for engines that have no others.
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


# -- where nothing fits -------------------------------------------------------------------------------

_MOST_TIMES = 1024  # times the devices: the largest cluster that is tried
MOST_RISK = 0.5  # that a job may ask for


def required(result: Plan | Search, request: Request) -> Plan:
    """The plan; raises DoesNotFit if nothing fits, SpecError if nothing divides and runs."""
    if isinstance(result, Plan):
        return result
    kind = DoesNotFit if result.least_memory is not None else SpecError
    raise kind("plan", *what_is_missing(result, request))


def what_is_missing(result: Search, request: Request) -> tuple[str, str]:
    """Why there is no plan, and what would make one."""
    if result.was_stopped:
        problem = f"nothing that fits was found within the time limit of {request.seconds:g} s"
        return problem, "give it longer (⟨time_limit=10min⟩), or bound it: ⟨tp=8⟩, ⟨pp=1..16⟩"
    if not result.wanted:
        return _no_layout(request)
    least = result.least_memory
    if least is None:
        return f"this project's engine runs none of the strategies that divide{_first_lack(result, request)}", (
            "use ⟨any_priced=true⟩ for what is only priced"
        )
    strategy = least.strategy()
    cluster, room = request.job.cluster, request.room
    if least.memory_bytes <= room.planned_bytes and cluster.host_memory is not None:
        host, devices = readable_bytes(least.host_bytes * cluster.node_devices), _devices_that_fit(request)
        return (
            f"nothing fits: offloading ({strategy_words(strategy)}) would need {host} of host memory per node, "
            f"{readable_bytes(cluster.host_memory)} are there",
            f"use {f'{devices:,}' if devices else 'more'} devices, or hosts with more memory",
        )
    usable = f"{cluster.device.name} has {readable_bytes(room.usable_bytes)}"
    if room.is_capped:
        usable += " as capped"
    elif least.memory_bytes <= room.usable_bytes:
        usable += f", of which {margin_words(request.job)}"
    need = readable_bytes(least.memory_bytes)
    problem = f"nothing fits: the smallest strategy ({strategy_words(strategy)}) needs {need} per device, {usable}"
    return problem, ", or ".join(_remedies(request, least.memory_bytes))


def _remedies(request: Request, least_bytes: float) -> Iterator[str]:
    """Changes after which something would fit, each tried or computed."""
    room, device = request.room, request.job.cluster.device
    if room.is_capped and room_of(request.job).planned_bytes >= least_bytes:
        yield "leave out ⟨max_memory⟩"
        return
    devices = _devices_that_fit(request)
    if devices:
        yield f"use {devices:,} devices"
    if room.is_capped:
        return
    if least_bytes <= room.usable_bytes:
        risk = 1 - fit_probability(request.job, least_bytes)
        yield (
            f"accept ⟨memory_risk={risk:.0%}⟩" if risk <= MOST_RISK else "plan without that margin (⟨max_memory=100%⟩)"
        )
    tensors = (room.planned_bytes - device.framework_memory) / (room.usable_bytes - device.framework_memory)
    whole = device.driver_memory + device.framework_memory + (least_bytes - device.framework_memory) / tensors
    yield f"use devices with {math.ceil(whole / 2**30):,} GiB"


def _first_lack(result: Search, request: Request) -> str:
    """Why the fastest priced-only strategy does not run."""
    if result.best_not_run is None:
        return ""
    job = job_with(request.job, result.best_not_run.strategy(), result.best_not_run.sequences)
    return "".join(f" ({' with '.join(finding.techniques)}: {finding.reason})" for finding in findings_of(job)[:1])


def _no_layout(request: Request) -> tuple[str, str]:
    """The answer where nothing divides: constraints contradict each other, or the batch is too small."""
    job, constraints = request.job, request.constraints
    fixed: dict[str, Any] = {"dp": None, "stage_layers": "balanced"}
    for name, values in constraints.allowed.items():
        if values.values is not None and len(values.values) == 1:
            fixed[name] = values.values[0]
    try:
        replace(job, strategy=replace(Strategy(), **fixed))
    except SpecError as error:
        return f"{error.field}: {error.problem}" if error.field else error.problem, error.remedy
    if constraints.allowed:
        words = ", ".join(f"{name} {values}" for name, values in constraints.allowed.items())
        return f"no layout of {job.cluster.devices:,} devices has {words} and a batch that divides", "relax one of them"
    return (
        f"the global batch {job.training.global_batch} does not divide over any layout of "
        f"{job.cluster.devices:,} devices",
        "use a batch with more divisors, or one in tokens such as 4M-tokens, which is rounded",
    )


def _devices_that_fit(request: Request) -> int | None:
    """The smallest cluster on which something fits, trying 2, 4, 8, ... times the devices; None if none does."""
    cluster = request.job.cluster
    small = {"recompute": Allowed(("full",)), "recompute_layers": Allowed((None,)), "microbatch": Allowed((1,)),
             "schedule": Allowed((PLAIN,)), "shard_group": Allowed((None,))}  # fmt: skip
    allowed = {name: values for name, values in small.items() if name not in request.constraints.allowed}
    times = 2
    while times <= _MOST_TIMES:
        try:
            larger = cluster.with_devices(cluster.devices * times)
        except SpecError:
            return None
        constraints = request.constraints.with_allowed(allowed)
        wider = replace(request.on(larger), constraints=constraints)
        space = wider.space(offload=request.offload is not False)
        deadline, capacity = request.deadline.part(), request.capacity_bytes
        if search(space, memory_bytes=capacity, any_priced=request.any_priced, kept=1, deadline=deadline).best:
            return larger.devices
        times *= 2
    return None
