"""What a missing feature costs: the best strategy that is priced and not run, and what stands in its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.planner.candidate import Candidate
from shardwise.planner.constraints import Allowed
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.planner.search import Found, search
from shardwise.planner.supported import findings_of
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import schedule_records
from shardwise.spec.support import Finding


@dataclass(frozen=True)
class NotRun:
    """A strategy that this project's engine does not run and that is faster than all it runs by more than noise."""

    best: Candidate
    findings: tuple[Finding, ...]

    @property
    def lacks(self) -> str:
        """What stands in its way, in the words of the support matrix."""
        return " and ".join(" with ".join(one.techniques) for one in self.findings)


def not_run(found: Plan) -> NotRun | None:
    """The first that `--any` would list, where it gains more than noise; None if nothing does."""
    request = found.request
    if request.offers_priced or request.deadline.leaves_out() or not _may_gain(found):
        return None
    other = plan(replace(request, any_priced=True))
    if not isinstance(other, Plan):
        return None
    limit = found.fastest.seconds_per_token / (1 + found.noise.share)
    for row in other.rows:
        findings = tuple(findings_of(row.best.job))
        if findings and row.best.seconds_per_token < limit:
            return NotRun(row.best, findings)
    return None


def _may_gain(found: Plan) -> bool:
    """Whether the tables see something not run that is faster than all that is by more than noise."""
    fastest = min(one.seconds_per_sequence for one in found.search.best)
    return any(one.seconds_per_sequence * (1 + found.noise.share) < fastest for one in _seen(found))


def _seen(found: Plan) -> Iterator[Found]:
    if found.search.best_not_run is not None:
        yield found.search.best_not_run
    if found.request.job.model.moe:
        yield from _with_hidden_exchange(found.request)


def _with_hidden_exchange(request: Request) -> list[Found]:
    """The best of the schedules that hide the exchange of experts under another microbatch, in an engine that can."""
    hiding = tuple(one.name for one in schedule_records() if one.hides_exchange)
    try:
        constraints = request.constraints.with_allowed({"schedule": Allowed(hiding)})
    except SpecError:
        return []
    wider = replace(request, constraints=constraints, any_priced=True)
    space, capacity = wider.space(offload=False), request.capacity_bytes
    return search(space, memory_bytes=capacity, any_priced=True, kept=1, deadline=request.deadline.part()).best
