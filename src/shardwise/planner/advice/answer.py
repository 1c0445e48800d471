"""A plan with the answers to questions about it: why it wins, why not another, what if, who can run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.cost.analysis import analyze
from shardwise.cost.campaign import Campaign
from shardwise.cost.step.verdict import SendingLess, sending_less
from shardwise.cost.traffic.data import GradientTime, gradient_times
from shardwise.planner.advice.explanation import (
    NotRun,
    PlanExplanation,
    WhyNot,
    difference_words,
    explain,
    judged,
    not_run,
    textbook,
    wish,
)
from shardwise.planner.advice.frameworks import FrameworkVerdict, who_can_run
from shardwise.planner.advice.what_if import Size, WhatIf, faster_part, sizes, what_if
from shardwise.planner.candidate import Candidate, strategy_words
from shardwise.planner.constraints import Allowed
from shardwise.planner.plan import Plan
from shardwise.spec.units import readable_duration, readable_seconds
from shardwise.uncertainty.residuals import ErrorBar, error_bar, memory_quantile


@dataclass(frozen=True)
class Questions:
    """Questions about a plan."""

    framework: str | None = None
    why_not: tuple[tuple[str, Mapping[str, Allowed]], ...] = ()
    """Each alternative as the user wrote it, and as allowed values."""
    what_if: tuple[str, ...] = ()
    pareto: Literal["memory", "money"] | None = None


@dataclass(frozen=True)
class PlanAnswer:
    """A plan and the answers to all questions about it."""

    plan: Plan  # includes the strategies that were simulated for an answer
    notes: tuple[str, ...]  # what was assumed or left out
    framework: str | None
    explanation: PlanExplanation
    textbook: Candidate | None
    runners: tuple[FrameworkVerdict, ...]
    why_not: tuple[WhyNot, ...]
    what_if: tuple[WhatIf, ...]
    memory_front: tuple[Candidate, ...] | None
    sizes: tuple[Size, ...] | None
    not_run: NotRun | None
    error_bar: ErrorBar
    memory_error_high: float
    gradient_times: tuple[GradientTime, ...]
    sending_less: SendingLess | None
    campaign: Campaign | None = None

    @property
    def predicted_seconds_low(self) -> float:
        return self.plan.best.low_seconds(self.error_bar.time_low)

    @property
    def predicted_seconds_high(self) -> float:
        return self.plan.best.step_seconds * (1 + self.error_bar.time_high)


def answer(
    plan: Plan, asked: Questions, notes: Sequence[str], campaign: Callable[[Candidate], Campaign | None]
) -> PlanAnswer:
    """Answers the questions; ``campaign`` prices the whole run of the best strategy."""
    # A strategy that is simulated for a question may be the best of its kind, so it joins the plan and all tables.
    deadline, left_out = plan.request.deadline, []
    wishes = []
    for text, wanted in asked.why_not:
        if deadline.leaves_out():
            left_out.append(f"--why-not {text}")
        else:
            wishes.append(wish(plan, wanted))
    rule = textbook(plan.request)
    plan = plan.with_candidates([candidate for alternative in wishes for candidate in alternative.candidates])
    if rule is not None and plan.request.allows(rule.job.strategy):
        plan = plan.with_candidates([rule])
    best = plan.best
    front = plan.front if asked.pareto == "memory" else None
    sized = sizes(plan, asked.framework) if asked.pareto == "money" else None
    explanation, runners = explain(plan), who_can_run(plan, near=asked.framework is None)
    others = []
    for change in asked.what_if:
        if deadline.leaves_out():
            left_out.append(f"--what-if {change}")
        else:
            others.append(what_if(plan.request, change))
    lacking = not_run(plan)
    part = faster_part(plan, asked.framework)
    return PlanAnswer(
        plan=plan,
        notes=(*notes, *_part_notes(plan, part), *_stopped_notes(plan, left_out)),
        framework=asked.framework,
        explanation=explanation,
        textbook=rule,
        runners=runners,
        why_not=tuple(judged(plan, alternative) for alternative in wishes),
        what_if=tuple(others),
        memory_front=front,
        sizes=sized,
        not_run=lacking,
        error_bar=error_bar(best.job),
        memory_error_high=memory_quantile(plan.request.job, plan.request.job.run.memory_risk) - 1,
        gradient_times=tuple(gradient_times(analyze(best.job))),
        sending_less=sending_less(best.job),
        campaign=campaign(best),
    )


def _part_notes(plan: Plan, part: Size | None) -> Iterator[str]:
    """Advice to use only a part of the devices."""
    if part is not None:
        whole, less = plan.best.job, part.best.job
        levels = zip(whole.cluster.levels, less.cluster.levels)
        left_out = " and ".join(before.name for before, after in levels if before.width > after.width == 1)
        without = f", without {left_out} between them," if left_out and part.devices > 1 else ""
        yield (
            f"{part.devices:,} of the {whole.cluster.devices:,} devices{without} would be faster: "
            f"{readable_seconds(part.best.step_seconds)} a step ({difference_words(part.best.loss_to(plan.best))}) "
            f"with {strategy_words(less.strategy)}"
        )


def _stopped_notes(plan: Plan, left_out: list[str]) -> list[str]:
    """Notes that a search, or a further question, was cut short."""
    limit, priced = f"the time limit of {readable_duration(plan.request.seconds)}", plan.search.priced
    notes = []
    if plan.search.was_stopped:
        notes.append(f"stopped at {limit} with {priced:,} strategies priced: this is the best so far (--time-limit)")
    elif plan.request.deadline.was_hit:
        notes.append(f"some answers about the plan were cut short by {limit} (--time-limit)")
    if left_out:
        notes.append(f"not answered within {limit}: {', '.join(left_out)}")
    return notes
