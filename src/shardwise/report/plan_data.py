"""A plan, and a job exported to another framework, as plain data."""

from __future__ import annotations

from typing import Any

from shardwise.cost.memory.room import fit_of
from shardwise.interop.frameworks import Exported
from shardwise.planner.advice.answer import PlanAnswer
from shardwise.planner.advice.explanation import PlanExplanation
from shardwise.planner.advice.exported import PricedExport
from shardwise.planner.advice.frameworks import FrameworkVerdict
from shardwise.planner.advice.what_if import WhatIf
from shardwise.planner.candidate import Candidate, strategy_words
from shardwise.planner.plan import Plan, RankingRow, StrategyFamily
from shardwise.report.analysis import campaign_data
from shardwise.report.console import all_fields, picked
from shardwise.uncertainty.residuals import error_bar


def runner_data(runner: FrameworkVerdict, best: Candidate) -> dict[str, Any]:
    """A verdict as plain data; ``loss`` is the relative increase in step time."""
    own = runner.own
    return {
        "name": runner.name,
        "runs": runner.runs,
        "lacks": [lost.field for lost in runner.lacks],
        "differs": list(runner.differs),
        "stack": None if own is None else own.job.stack.name,
        "best": None if own is None else strategy_words(own.job.strategy),
        "loss": None if own is None else own.loss_to(best),
        "memory_bytes": None if own is None else own.memory.total,
        "needed_bytes": runner.needed_bytes,
    }


def plan_data(answer: PlanAnswer) -> dict[str, Any]:
    """Everything `plan` prints; times in seconds, memory in bytes, shares as fractions."""
    plan: Plan = answer.plan
    result = plan.search
    return {
        "job": plan.best.job.to_dict(),
        "memory_risk": plan.request.job.run.memory_risk,
        "tight": [ranked_data(plan, candidate) for candidate in plan.tight],
        "candidates": [ranked_data(plan, candidate) for candidate in plan.candidates],
        "layouts": [ranked_data(plan, candidate) for candidate in plan.layouts],
        "ranking": [_ranking_data(number, row) for number, row in enumerate(plan.rows, 1)],
        "families": [family_data(family) for family in plan.families],
        "fastest": strategy_words(plan.fastest.job.strategy),
        "noise": picked(plan.noise, "share", "basis"),
        "room": all_fields(plan.request.room),
        "search": {
            **picked(result, "priced", "fitting", "too_large", "unsupported"),
            "cpu_seconds": result.seconds,
            "narrowing": list(plan.narrowing),
        },
        "explanation": _explanation(answer.explanation),
        "textbook": _candidate_or_none(answer.textbook),
        "frameworks": [runner_data(runner, plan.best) for runner in answer.runners],
        "not_run": answer.not_run
        and {
            "lacks": [list(finding.techniques) for finding in answer.not_run.findings],
            "best": candidate_data(answer.not_run.best),
        },
        "why_not": [
            {**picked(question, "wanted", "verdict", "reason", "loss"), "best": _candidate_or_none(question.best)}
            for question in answer.why_not
        ],
        "what_if": [_what_if(what_if) for what_if in answer.what_if],
        "pareto": _pareto(answer),
        "campaign": None if answer.campaign is None else campaign_data(answer.campaign),
        "notes": list(answer.notes),
    }


def ranked_data(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    return {
        "group": plan.group_of(candidate),
        "loss": plan.loss_of(candidate),
        **candidate_data(candidate),
        "left_bytes": plan.left_bytes(candidate),
        "fit_probability": plan.fit_probability(candidate),
    }


def _ranking_data(number: int, row: RankingRow) -> dict[str, Any]:
    """A row of the ranking; its figures are in the layout with the same words."""
    like = [strategy_words(candidate.job.strategy) for candidate in row.like]
    return {"rank": number, "group": row.group, "words": strategy_words(row.best.job.strategy), "like": like}


def family_data(family: StrategyFamily) -> dict[str, Any]:
    return {
        "dimensions": list(family.dimensions),
        "best": _candidate_or_none(family.best),
        "least_memory_bytes": family.least_memory_bytes,
    }


def _candidate_or_none(candidate: Candidate | None) -> dict[str, Any] | None:
    return None if candidate is None else candidate_data(candidate)


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    job, band = candidate.job, error_bar(candidate.job)
    return {
        "strategy": job.to_dict().get("strategy", {}),
        "words": strategy_words(job.strategy),
        "predicted_seconds": candidate.step_seconds,
        "predicted_seconds_low": candidate.low_seconds(band.time_low),
        "predicted_seconds_high": candidate.step_seconds * (1 + band.time_high),
        "error_bar_basis": band.basis,
        "tokens_per_step": job.tokens_per_step,
        **picked(candidate, "tokens_per_second", "mfu"),
        "mfu_peak": job.training.recipe.compute,
        "memory": candidate.memory.to_dict(),
        "margin_bytes": candidate.margin_bytes,
        "batch": {
            **picked(job, "sequences", data_parallel="strategy.data_parallel"),
            **picked(job, accumulation="microbatches", microbatch="strategy.microbatch"),
        },
        "parts_seconds": candidate.parts,
    }


def _explanation(explanation: PlanExplanation) -> dict[str, Any]:
    second = explanation.second
    return {
        "sentence": explanation.sentence(),
        "second": None if second is None else strategy_words(second.job.strategy),
        "loss": None if second is None else explanation.loss,
        "layouts_within_noise": explanation.within,
        "turnings": [picked(turning, "what", "factor") for turning in explanation.turnings or ()],
    }


def _what_if(what_if: WhatIf) -> dict[str, Any]:
    best, fastest = None, None
    if isinstance(what_if.result, Plan):
        best, fastest = candidate_data(what_if.result.best), candidate_data(what_if.result.fastest)
    return {"change": what_if.change, "best": best, "fastest": fastest}


def _pareto(answer: PlanAnswer) -> list[dict[str, Any]] | None:
    if answer.memory_front is not None:
        return [candidate_data(candidate) for candidate in answer.memory_front]
    if answer.sizes is None:
        return None
    return [
        {**picked(size, "devices", "device_seconds_per_token"), "best": candidate_data(size.best)}
        for size in answer.sizes
    ]


# -- an export: its files, what it cannot express, both prices ---------------------------------------


def export_data(exported: Exported, priced: PricedExport) -> dict[str, Any]:
    """Everything `export` says; times in seconds, memory in bytes."""
    return {
        **picked(exported, "target", "version", "files", "lost", "notes"),
        "priced": {"job": _figures(priced.here), "exported": _figures(priced.there), "differs": list(priced.differs)},
    }


def _figures(candidate: Candidate | None) -> dict[str, Any] | None:
    if candidate is None:
        return None
    figures = picked(candidate, predicted_seconds="step_seconds", memory_bytes="memory.total")
    return {**figures, "fit": fit_of(candidate.job)}
