"""A plan as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.cost.accuracy.residuals import error_bar
from shardwise.planner.advice.answer import PlanAnswer
from shardwise.planner.advice.explanation import PlanExplanation
from shardwise.planner.advice.what_if import WhatIf
from shardwise.planner.advice.why_not import NotRun, WhyNot
from shardwise.planner.candidate import Candidate
from shardwise.planner.describe import strategy_words
from shardwise.planner.plan import Plan, RankingRow, StrategyFamily
from shardwise.report.campaign import campaign_data
from shardwise.report.runners import runner_data


def plan_data(answer: PlanAnswer) -> dict[str, Any]:
    """Everything `plan` prints; times in seconds, memory in bytes, shares as fractions."""
    found: Plan = answer.plan
    result = found.search
    return {
        "job": found.best.job.to_dict(),
        "candidates": [ranked_data(found, one) for one in found.candidates],
        "layouts": [ranked_data(found, one) for one in found.layouts],
        "ranking": [_row(number, row) for number, row in enumerate(found.rows, 1)],
        "families": [family_data(one) for one in found.families],
        "fastest": strategy_words(found.fastest.job.strategy),
        "noise": {"share": found.noise.share, "basis": found.noise.basis},
        "room": asdict(found.request.room),
        "search": {
            "priced": result.priced,
            "fitting": result.fitting,
            "too_large": result.too_large,
            "unsupported": result.unsupported,
            "cpu_seconds": result.seconds,
            "narrowing": list(found.narrowing),
        },
        "explanation": _explanation(answer.explanation),
        "textbook": None if answer.textbook is None else candidate_data(answer.textbook),
        "frameworks": [runner_data(one, found.best) for one in answer.runners],
        "not_run": None if answer.not_run is None else _not_run(answer.not_run),
        "why_not": [_why_not(one) for one in answer.why_not],
        "what_if": [_what_if(one) for one in answer.what_if],
        "pareto": _pareto(answer),
        "campaign": None if answer.campaign is None else campaign_data(answer.campaign),
        "notes": list(answer.notes),
    }


def ranked_data(found: Plan, one: Candidate) -> dict[str, Any]:
    return {"group": found.group_of(one), **candidate_data(one), "left_bytes": found.left_bytes(one)}


def _row(number: int, row: RankingRow) -> dict[str, Any]:
    """A row of the ranking; its figures are in the layout with the same words."""
    like = [strategy_words(one.job.strategy) for one in row.like]
    return {"rank": number, "group": row.group, "words": strategy_words(row.best.job.strategy), "like": like}


def family_data(one: StrategyFamily) -> dict[str, Any]:
    best = None if one.best is None else candidate_data(one.best)
    return {"dimensions": list(one.dimensions), "best": best, "least_memory_bytes": one.least_memory_bytes}


def candidate_data(one: Candidate) -> dict[str, Any]:
    job, band = one.job, error_bar(one.job)
    return {
        "strategy": job.strategy.to_dict(),
        "words": strategy_words(job.strategy),
        "predicted_seconds": one.step_seconds,
        "predicted_seconds_low": one.step_seconds * (1 + band.time_low),
        "predicted_seconds_high": one.step_seconds * (1 + band.time_high),
        "error_bar_basis": band.basis,
        "tokens_per_step": job.tokens_per_step,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "mfu_peak": job.training.recipe.compute,
        "memory": one.memory.to_dict(),
        "margin_bytes": one.margin_bytes,
        "batch": {
            "sequences": job.sequences,
            "data_parallel": job.strategy.data_parallel,
            "accumulation": job.microbatches,
            "microbatch": job.strategy.microbatch,
        },
        "parts_seconds": one.parts,
    }


def _explanation(explanation: PlanExplanation) -> dict[str, Any]:
    second = explanation.second
    return {
        "sentence": explanation.sentence(),
        "second": None if second is None else strategy_words(second.job.strategy),
        "loss": None if second is None else explanation.loss,
        "layouts_within_noise": explanation.within,
        "turnings": [{"what": one.what, "factor": one.factor} for one in explanation.turnings or ()],
    }


def _not_run(one: NotRun) -> dict[str, Any]:
    return {"lacks": [list(finding.techniques) for finding in one.findings], "best": candidate_data(one.best)}


def _why_not(one: WhyNot) -> dict[str, Any]:
    best = None if one.best is None else candidate_data(one.best)
    return {"wanted": one.wanted, "verdict": one.verdict, "reason": one.reason, "loss": one.loss, "best": best}


def _what_if(one: WhatIf) -> dict[str, Any]:
    best, fastest = None, None
    if isinstance(one.found, Plan):
        best, fastest = candidate_data(one.found.best), candidate_data(one.found.fastest)
    return {"change": one.change, "best": best, "fastest": fastest}


def _pareto(answer: PlanAnswer) -> list[dict[str, Any]] | None:
    if answer.memory_front is not None:
        return [candidate_data(one) for one in answer.memory_front]
    if answer.sizes is None:
        return None
    return [
        {
            "devices": one.devices,
            "device_seconds_per_token": one.device_seconds_per_token,
            "best": candidate_data(one.best),
        }
        for one in answer.sizes
    ]
