"""Why not another strategy: what rules it out, or by how much it loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.planner.candidate import PARTS, Candidate
from shardwise.planner.constraints import Allowed, has
from shardwise.planner.describe import strategy_words
from shardwise.planner.missing import what_is_missing
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search import Search
from shardwise.planner.supported import findings_of
from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes

TIE = 0.0005  # what prints as 0.0%


@dataclass(frozen=True)
class WhyNot:
    """``verdict``: "does not divide", "not supported", "does not fit", "within noise", "slower" or "the plan itself".

    ``best`` is the best strategy with these values that could be priced at all.
    """

    wanted: str
    verdict: str
    reason: str
    best: Candidate | None = None
    loss: float | None = None  # by how much its time per token is longer


@dataclass(frozen=True)
class Wish:
    """Strategies with certain values, searched by themselves: what was found, or why nothing can be."""

    words: str
    wanted: Mapping[str, Allowed]
    request: Request
    found: Plan | Search | None
    problem: str = ""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.found.candidates if isinstance(self.found, Plan) else ()

    def holds_for(self, one: Candidate) -> bool:
        strategy = one.job.strategy
        return all(has(strategy, name, values, idle=False) for name, values in self.wanted.items())


def wish(found: Plan, wanted: Mapping[str, Allowed]) -> Wish:
    """The search for strategies with the ``wanted`` values; what it simulates belongs to the plan (`Plan.joined`)."""
    words = ", ".join(f"{name} {one}" for name, one in wanted.items())
    request = found.request
    try:
        constraints = request.constraints.with_allowed(wanted)
    except SpecError as error:
        return Wish(words, wanted, request, None, f"{error.problem}: the request rules it out")
    # Offload as the plan may: a wish is not to be saved by what the plan did not need.
    offload = request.offload if request.offload is not None else found.best.job.strategy.offload.any
    restricted = replace(request, constraints=constraints, offload=offload or "offload" in wanted)
    return Wish(words, wanted, restricted, plan(restricted))


def why_not(found: Plan, wanted: Mapping[str, Allowed]) -> WhyNot:
    """What keeps strategies with the ``wanted`` values from being the plan."""
    asked = wish(found, wanted)
    return judged(found.joined(asked.candidates), asked)


def judged(found: Plan, asked: Wish) -> WhyNot:
    """The answer to a wish whose strategies are among those of the plan."""
    if isinstance(asked.found, Plan):
        own = {one.job for one in asked.candidates}
        best = next(one for one in found.candidates if one.job in own or asked.holds_for(one))
        return _behind(asked.words, found, best)
    if asked.found is None:
        return WhyNot(asked.words, "does not divide", asked.problem)
    return _ruled_out(asked.words, asked.found, asked.request)


def _ruled_out(words: str, other: Search, request: Request) -> WhyNot:
    if not other.wanted:
        problem, remedy = what_is_missing(other, request)
        return WhyNot(words, "does not divide", f"{problem}; {remedy}" if remedy else problem)
    if other.least_memory is None:
        free = plan(replace(request, any_priced=True, memory_bytes=None))
        example = free.best if isinstance(free, Plan) else None
        findings = findings_of(example.job) if example else []
        reason = findings[0].reason if findings else "this project's engine does not run it"
        return WhyNot(words, "not supported", reason, example)
    least = other.least_memory
    need, there = readable_bytes(least.memory_bytes), readable_bytes(request.capacity_bytes)
    reason = f"needs at least {need} per device ({strategy_words(least.strategy())}), a plan may use up to {there}"
    return WhyNot(words, "does not fit", reason)


def _behind(words: str, found: Plan, other: Candidate) -> WhyNot:
    first = found.best
    loss = other.seconds_per_token / first.seconds_per_token - 1
    if other is first:
        return WhyNot(words, "the plan itself", "that is what the plan does", other, 0.0)
    verdict = "slower" if found.group_of(other) == "slower" else "within noise"
    return WhyNot(words, verdict, largest_differences(first, other), other, loss)


def largest_differences(first: Candidate, other: Candidate) -> str:
    """In which parts of the step the other loses and gains, per token, as shares of the first's step."""
    scale = first.job.tokens_per_step / other.job.tokens_per_step
    whole = first.step_seconds
    deltas = {part: (other.parts[part] * scale - first.parts[part]) / whole for part in PARTS}
    ordered = sorted(deltas.items(), key=lambda item: -abs(item[1]))
    shown = [f"{part} {delta:+.1%}" for part, delta in ordered if abs(delta) >= TIE][:4]
    return ", ".join(shown) or "no part differs by 0.1%"


def difference_words(loss: float) -> str:
    """How much longer something takes: "+1.3%", or "ties" for what would print as 0.0%."""
    return "ties" if abs(loss) < TIE else f"{loss:+.1%}"
