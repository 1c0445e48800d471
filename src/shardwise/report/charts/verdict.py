"""The verdict on a job in one sentence, with the figures of its error bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.cost.memory.room import Fit, probability_words
from shardwise.planner.advice.assessment import Assessment
from shardwise.spec.clusters import device_words
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_seconds


@dataclass(frozen=True)
class JobVerdict:
    """A predicted step with its error bar, and the memory of the fullest device."""

    sentence: str
    basis: str
    """Where the error bar comes from."""
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    floor_seconds: float
    """What no software can beat."""
    memory_bytes: float
    usable_bytes: float
    fit: Fit
    fit_probability: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def verdict_of(assessment: Assessment) -> JobVerdict:
    analysis = assessment.analysis
    return JobVerdict(
        sentence=verdict_sentence(assessment),
        basis=assessment.error_bar.basis,
        predicted_seconds=analysis.predicted_seconds,
        low_seconds=assessment.predicted_seconds_low,
        high_seconds=assessment.predicted_seconds_high,
        floor_seconds=analysis.floor_seconds,
        memory_bytes=analysis.memory.total,
        usable_bytes=analysis.room.usable_bytes,
        fit=analysis.fit,
        fit_probability=analysis.fit_probability,
    )


def verdict_sentence(assessment: Assessment) -> str:
    """ "llama3-70b on 64 × h100-sxm: 30.1 s a step, 28.3 s to 32.1 s, fits with 95%"."""
    analysis = assessment.analysis
    ends = (assessment.predicted_seconds_low, assessment.predicted_seconds_high)
    low, high = map(readable_seconds, ends)
    step = f"{readable_seconds(analysis.predicted_seconds)} a step, {low} to {high}"
    return f"{subject_words(analysis.job)}: {step}, {fit_words(assessment)}"


def subject_words(job: Job) -> str:
    return f"{job.model.name} on {device_words(job.cluster)}"


def fit_words(assessment: Assessment) -> str:
    analysis = assessment.analysis
    if analysis.fits:
        likely = f"fits with {probability_words(analysis.fit_probability)}"
        return likely if analysis.fit == "fits" else f"tight: {likely}"
    return f"does not fit ({readable_bytes(analysis.memory.total)} of {readable_bytes(analysis.room.usable_bytes)})"
