"""Why not another strategy: what rules it out, or by how much it loses; and what a feature we lack costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.planner.candidate import PARTS, Candidate
from shardwise.planner.constraints import Allowed, has
from shardwise.planner.describe import strategy_words
from shardwise.planner.plan import Plan, plan, what_is_missing
from shardwise.planner.request import Request
from shardwise.planner.search.search import PricedStrategy, Search, search
from shardwise.planner.search.supported import findings_of
from shardwise.spec.errors import SpecError, in_flags
from shardwise.spec.schedules import schedule_records
from shardwise.spec.support import Finding

TIE = 0.0005  # a smaller share prints as 0.0%


@dataclass(frozen=True)
class WhyNot:
    """The answer to one "why not"."""

    wanted: str
    verdict: str
    """ "does not divide", "not supported", "does not fit", "within noise", "slower" or "the plan itself"."""
    reason: str
    best: Candidate | None = None
    """The best strategy with the wanted values, if any could be priced."""
    loss: float | None = None
    """Extra time per token against the fastest, as a share."""


@dataclass(frozen=True)
class Wish:
    """A request for strategies with certain values, and what the search for them found."""

    words: str
    wanted: Mapping[str, Allowed]
    request: Request
    result: Plan | Search | None
    """None if the request itself rules the values out; ``problem`` says why."""
    problem: str = ""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.result.candidates if isinstance(self.result, Plan) else ()


def wish(base: Plan, wanted: Mapping[str, Allowed]) -> Wish:
    """Searches strategies with the ``wanted`` values; the caller adds those simulated to the plan."""
    words = ", ".join(f"{name} {values}" for name, values in wanted.items())
    request = base.request
    try:
        constraints = request.constraints.with_allowed(wanted)
    except SpecError as error:
        return Wish(words, wanted, request, None, f"{in_flags(error.problem)}: the request rules it out")
    # Offload only if the plan offloads: it should not rescue an alternative.
    offload = request.offload if request.offload is not None else base.best.job.strategy.offload.any
    restricted = replace(request, constraints=constraints, offload=offload or "offload" in wanted)
    return Wish(words, wanted, restricted, plan(restricted))


def judged(base: Plan, asked: Wish) -> WhyNot:
    """The answer to a wish; the strategies simulated for it are among those of the plan."""
    if isinstance(asked.result, Plan):
        own, wanted = {candidate.job for candidate in asked.candidates}, asked.wanted.items()
        best = next(
            candidate
            for candidate in base.candidates
            if candidate.job in own
            or all(has(candidate.job.strategy, name, values, idle=False) for name, values in wanted)
        )
        return _behind(asked.words, base, best)
    if asked.result is None:
        return WhyNot(asked.words, "does not divide", asked.problem)
    return _ruled_out(asked.words, asked.result, asked.request)


def _ruled_out(words: str, other: Search, request: Request) -> WhyNot:
    if not other.wanted:
        problem, remedy = what_is_missing(other, request)
        return WhyNot(words, "does not divide", in_flags(f"{problem}; {remedy}" if remedy else problem))
    if other.least_memory is None:
        free = plan(replace(request, any_priced=True, memory_bytes=None))
        example = free.best if isinstance(free, Plan) else None
        findings = findings_of(example.job) if example else []
        reason = findings[0].reason if findings else "this project's engine does not run it"
        return WhyNot(words, "not supported", reason, example)
    least = other.least_memory
    reason = f"{strategy_words(least.strategy())} {request.short_words(least.memory_bytes)}"
    return WhyNot(words, "does not fit", reason)


def _behind(words: str, base: Plan, other: Candidate) -> WhyNot:
    first = base.best
    if other is first:
        return WhyNot(words, "the plan itself", "that is what the plan does", other, base.loss_of(other))
    against = f"against 1, {largest_differences(first, other)}"
    return WhyNot(words, base.group_of(other), against, other, base.loss_of(other))


def largest_differences(first: Candidate, other: Candidate) -> str:
    """The parts of the step in which ``other`` loses or gains most, per token, as shares of the step of ``first``."""
    scale = first.job.tokens_per_step / other.job.tokens_per_step
    whole = first.step_seconds
    deltas = {part: (other.parts[part] * scale - first.parts[part]) / whole for part in PARTS}
    ordered = sorted(deltas.items(), key=lambda item: -abs(item[1]))
    shown = [f"{part} {delta:+.1%}" for part, delta in ordered if abs(delta) >= TIE][:4]
    return ", ".join(shown) or "no part differs by 0.1%"


def difference_words(loss: float) -> str:
    """A difference in time: "+1.3%", or "ties" if it would print as 0.0%."""
    return "ties" if abs(loss) < TIE else f"{loss:+.1%}"


@dataclass(frozen=True)
class NotRun:
    """A strategy that our engine does not run, but that beats all it runs by more than noise."""

    best: Candidate
    findings: tuple[Finding, ...]

    @property
    def lacks(self) -> str:
        """What is missing, in the words of the support matrix."""
        return " and ".join(" with ".join(finding.techniques) for finding in self.findings)


def not_run(base: Plan) -> NotRun | None:
    """The first strategy that only `--any` would list, if it gains more than noise."""
    request = base.request
    if request.offers_priced or request.deadline.leaves_out() or not _may_gain(base):
        return None
    other = plan(replace(request, any_priced=True))
    if not isinstance(other, Plan):
        return None
    limit = base.fastest.seconds_per_token / (1 + base.noise.share)
    for row in other.rows:
        findings = tuple(findings_of(row.best.job))
        if findings and row.best.seconds_per_token < limit:
            return NotRun(row.best, findings)
    return None


def _may_gain(base: Plan) -> bool:
    """Whether the price tables have a strategy that our engine does not run and that gains more than noise."""
    fastest = min(priced.seconds_per_sequence for priced in base.search.best)
    return any(priced.seconds_per_sequence * (1 + base.noise.share) < fastest for priced in _seen(base))


def _seen(base: Plan) -> Iterator[PricedStrategy]:
    if base.search.best_not_run is not None:
        yield base.search.best_not_run
    if base.request.job.model.moe:
        yield from _with_hidden_exchange(base.request)


def _with_hidden_exchange(request: Request) -> list[PricedStrategy]:
    """The best strategy whose schedule hides the expert exchange under another microbatch, in an engine that can."""
    hiding = tuple(record.name for record in schedule_records() if record.hides_exchange)
    try:
        constraints = request.constraints.with_allowed({"schedule": Allowed(hiding)})
    except SpecError:
        return []
    wider = replace(request, constraints=constraints, any_priced=True)
    space, capacity = wider.space(offload=False), request.capacity_bytes
    return search(space, memory_bytes=capacity, any_priced=True, kept=1, deadline=request.deadline.part()).best
