"""Why not another strategy: what rules it out, or by how much it loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.planner.candidate import PARTS, Candidate
from shardwise.planner.constraints import Allowed
from shardwise.planner.describe import strategy_words
from shardwise.planner.missing import what_is_missing
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search import Search
from shardwise.planner.supported import findings_of
from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes


@dataclass(frozen=True)
class WhyNot:
    """``verdict``: "does not divide", "not supported", "does not fit" or "slower" (or "the plan itself").

    ``best`` is the best strategy with these values that could be priced at all.
    """

    wanted: str
    verdict: str
    reason: str
    best: Candidate | None = None
    loss: float | None = None  # by how much its time per token is longer


def why_not(found: Plan, wanted: Mapping[str, Allowed]) -> WhyNot:
    """What keeps strategies with the ``wanted`` values from being the plan."""
    words = ", ".join(f"{name} {one}" for name, one in wanted.items())
    request = found.request
    try:
        constraints = request.constraints.with_allowed(wanted)
        # Offload as the plan may: a wish is not to be saved by what the plan did not need.
        offload = request.offload if request.offload is not None else found.best.job.strategy.offload.any
        restricted = replace(request, constraints=constraints, offload=offload or "offload" in wanted)
    except SpecError as error:
        return WhyNot(words, "does not divide", f"{error.problem}: the plan was asked for otherwise")
    other = plan(restricted)
    if isinstance(other, Plan):
        return _slower(words, found.best, other.best)
    return _ruled_out(words, other, restricted)


def _ruled_out(words: str, other: Search, request: Request) -> WhyNot:
    if not other.wanted:
        problem, remedy = what_is_missing(other, request)
        return WhyNot(words, "does not divide", f"{problem}; {remedy}" if remedy else problem)
    if other.least_memory is None:
        free = plan(replace(request, any_priced=True, memory_bytes=None))
        example = free.best if isinstance(free, Plan) else None
        findings = findings_of(example.job) if example else []
        reason = findings[0].reason if findings else "no engine of ours runs it"
        return WhyNot(words, "not supported", reason, example)
    least = other.least_memory
    need, there = readable_bytes(least.memory_bytes), readable_bytes(request.capacity_bytes)
    reason = f"needs at least {need} of {there} per device ({strategy_words(least.strategy())})"
    return WhyNot(words, "does not fit", reason)


def _slower(words: str, first: Candidate, other: Candidate) -> WhyNot:
    loss = other.seconds_per_token / first.seconds_per_token - 1
    if other.job.strategy == first.job.strategy:
        return WhyNot(words, "the plan itself", "that is what the plan does", other, 0.0)
    return WhyNot(words, "slower", largest_differences(first, other), other, loss)


def largest_differences(first: Candidate, other: Candidate) -> str:
    """In which parts of the step the other loses and gains, per token, as shares of the first's step."""
    scale = first.job.tokens_per_step / other.job.tokens_per_step
    whole = first.step_seconds
    deltas = {part: (other.parts[part] * scale - first.parts[part]) / whole for part in PARTS}
    ordered = sorted(deltas.items(), key=lambda item: -abs(item[1]))
    shown = [f"{part} {delta:+.1%}" for part, delta in ordered if abs(delta) >= 0.0005][:4]
    return ", ".join(shown) or "no part differs by 0.1%"
