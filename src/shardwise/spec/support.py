"""What composes with what: the table (`matrix`) that the planner prunes by and the engine refuses by, for a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.spec.job import Job
from shardwise.spec.matrix import MATRIX, STATUSES, Finding, Status, matrix
from shardwise.spec.model import Model
from shardwise.spec.techniques import OF_MODEL, TECHNIQUES, techniques


@dataclass(frozen=True)
class Verdict:
    """Whether a job runs: the worst status of its findings, worst first; "runs" without any."""

    status: Status
    findings: tuple[Finding, ...] = ()


def verdict(job: Job) -> Verdict:
    """What stands between a job and its run; never raises."""
    used = set(techniques_of(job))
    found = [one for one in matrix() if used.issuperset(one.techniques)]
    found.sort(key=lambda one: -STATUSES.index(one.status))
    return Verdict(found[0].status if found else "runs", tuple(found))


def not_built(model: Model) -> tuple[Finding, ...]:
    """What our decoder would get wrong of a model by itself; a module of one's own may have it."""
    used = {name for name, uses in OF_MODEL.items() if uses(model)}
    return tuple(one for one in MATRIX if used.issuperset(one.techniques))


def techniques_of(job: Job) -> tuple[str, ...]:
    """Names of the techniques that a job uses, in the order of `TECHNIQUES`."""
    return tuple(name for name, uses in techniques().items() if uses(job.strategy, job.training, job.model))


def between(*techniques: str) -> Finding:
    """What the table says of just these techniques together, in any order; "runs" where it is silent."""
    names = set(techniques)
    silent = Finding(techniques, "runs", "", "")
    return next((one for one in matrix() if set(one.techniques) == names), silent)


def forbidden_pairs(statuses: Iterable[Status] = ("needs", "refused")) -> tuple[tuple[str, str], ...]:
    """Pairs of techniques that a search leaves out; a technique that does not run at all is paired with itself.

    With "priced only" among ``statuses``: also what no engine of ours runs.
    """
    wanted = set(statuses)
    return tuple((one.techniques[0], one.techniques[-1]) for one in matrix() if one.status in wanted)


__all__ = [
    "MATRIX", "STATUSES", "TECHNIQUES", "Finding", "Status", "Verdict",
    "between", "forbidden_pairs", "matrix", "not_built", "techniques", "techniques_of", "verdict",
]  # fmt: skip
