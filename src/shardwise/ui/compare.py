"""Two jobs side by side, A and B: their figures, how their layouts differ, and which parts of the step take longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.cost.analysis import analyze as analyze_job
from shardwise.planner.advice.assessment import Assessment, assess
from shardwise.planner.advice.explanation import TIE
from shardwise.planner.candidate import PARTS, Candidate, candidate, strategy_words
from shardwise.report.part_names import PLAN_WORDS
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_share
from shardwise.ui.answer import changes_to, verdict_data
from shardwise.ui.given import job_of
from shardwise.uncertainty.residuals import noise_of

_MOST_REASONS = 3


def compare(given: Mapping[str, Any]) -> dict[str, Any]:
    """B against A; by time per token, since models and batches may differ."""
    jobs = [_job(given, name) for name in ("a", "b")]
    assessments = [assess(analyze_job(job), advice=False) for job in jobs]
    first, other = (candidate(job) for job in jobs)
    return {
        "a": _side(assessments[0]),
        "b": _side(assessments[1]),
        "changed": changes_to(*jobs),
        "loss": other.loss_to(first),
        "noise": noise_of(other.job).share,
        "parts": _parts(first, other),
        "reason": " ".join(filter(None, [_room(assessments), reason(first, other)])),
    }


def _job(given: Mapping[str, Any], name: str) -> Job:
    own = given.get(name)
    if not isinstance(own, Mapping):
        raise SpecError(name, f"{shown(own)} is not a job", "send the keywords of one under a, and of one under b")
    try:
        return job_of(own)[0]
    except SpecError as error:
        raise error.under(name) from None


def _side(assessment: Assessment) -> dict[str, Any]:
    job = assessment.analysis.job
    return {**verdict_data(assessment), "layout": strategy_words(job.strategy), "tokens_per_step": job.tokens_per_step}


def _room(assessments: Sequence[Assessment]) -> str:
    """Which of the two does not fit."""
    large = [letter for letter, assessment in zip("AB", assessments) if not assessment.analysis.fits]
    return f"{' and '.join(large)} {'does' if len(large) == 1 else 'do'} not fit." if large else ""


def _parts(first: Candidate, other: Candidate) -> list[dict[str, Any]]:
    """Seconds of each part, scaled to the tokens of a step of the first job, the largest difference first."""
    scale = first.job.tokens_per_step / other.job.tokens_per_step
    rows = [
        {"name": name, "words": PLAN_WORDS[name], "a": first.parts[name], "b": other.parts[name] * scale,
         "share": (other.parts[name] * scale - first.parts[name]) / first.step_seconds}
        for name in PARTS
    ]  # fmt: skip
    rows = [row for row in rows if row["a"] or row["b"]]
    return sorted(rows, key=lambda row: -abs(row["share"]))


def reason(first: Candidate, other: Candidate) -> str:
    """Why one takes longer than the other, in a sentence."""
    loss, noise = other.loss_to(first), noise_of(other.job).share
    causes = [row for row in _parts(first, other) if abs(row["share"]) >= TIE][:_MOST_REASONS]
    said = ", ".join(f"{row['words']} {_signed(row['share'])}" for row in causes)
    more = other.memory.total - first.memory.total
    memory = f"a device holds {readable_bytes(abs(more))} {'more' if more > 0 else 'less'}"
    if abs(loss) < TIE:
        return f"B takes as long as A; {memory}."
    pace = f"B takes {readable_share(abs(loss))} {'more' if loss > 0 else 'less'} time a token than A"
    within = f", within noise ({readable_share(noise)})" if abs(loss) <= noise else ""
    return f"{pace}{within}: {said or 'no part differs by 0.1%'}; {memory}."


def _signed(share: float) -> str:
    return f"{'+' if share > 0 else '−'}{readable_share(abs(share))}"
