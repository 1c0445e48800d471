"""`plan`: the best strategies for a model, a cluster and a batch, and what was asked about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Unpack

from shardwise.api.campaign import CampaignArguments, campaign_of, terms_from
from shardwise.api.given import JobArguments, JobKeywords, JobSource, job_arguments
from shardwise.api.inputs import planning_job
from shardwise.api.quantities import amount, exclusive, texts, whole_number
from shardwise.api.results import Figure, Result, Rows
from shardwise.planner import plan as planner
from shardwise.planner.advice.answer import PlanAnswer, Questions, answer
from shardwise.planner.advice.frameworks import check_framework, searched_for
from shardwise.planner.advice.what_if import changed
from shardwise.planner.candidate import Candidate
from shardwise.planner.constraints import FIELDS, Allowed, Constraints, allowed, parse_constraints
from shardwise.planner.mixed.plan import MixedPlan
from shardwise.planner.plan import Plan
from shardwise.planner.request import Request
from shardwise.planner.search.supported import model_note
from shardwise.report.mixed import mixed_data, mixed_page
from shardwise.report.page import Page
from shardwise.report.plan import plan_page, plan_screen
from shardwise.report.plan_data import family_data, plan_data, ranked_data
from shardwise.spec.bare import Size
from shardwise.spec.clusters import parse_mixed
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.units import parse

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class PlanResult(Result):
    """The best strategy as a job, and everything it was compared with."""

    verb = "plan"
    answer: PlanAnswer
    top: int | None = None
    """How many layouts are printed; by default as many as fit on a screen, or 8 with all details."""
    unfolded: bool = False
    """Near-duplicate layouts are printed separately."""

    job = Figure[Job]("answer.plan.best.job", "The plan: `analyze` prices it, `train` runs it, to_yaml() is its file.")
    predicted_seconds = Figure[float]("answer.plan.best.step_seconds", "The predicted time of a step of the plan.")
    predicted_seconds_low = Figure[float]("answer.predicted_seconds_low")
    predicted_seconds_high = Figure[float]("answer.predicted_seconds_high")
    tokens_per_second = Figure[float]("answer.plan.best.tokens_per_second")
    mfu = Figure[float]("answer.plan.best.mfu")
    memory_bytes = Figure[float]("answer.plan.best.memory.total")
    candidates = Figure[tuple[Candidate, ...]]("answer.plan.candidates", "All that were simulated, the best first.")
    notes = Figure[tuple[str, ...]]("answer.notes")

    @property
    def why(self) -> str:
        """Why the first wins, in a few sentences."""
        return self.answer.explanation.sentence()

    @cached_property
    def page(self) -> Page:
        return plan_page(self.answer, top=self.top or 8, unfolded=self.unfolded)

    @property
    def screen(self) -> Page:
        return plan_screen(self.answer, top=self.top or 3, unfolded=self.unfolded)

    @cached_property
    def plots(self) -> Page:
        """The same in pictures."""
        from shardwise.report.charts.sections import plan_plots

        return plan_plots(self.answer, top=self.top or 8)

    def _data(self) -> dict[str, Any]:
        return plan_data(self.answer)

    def tables(self) -> Mapping[str, Rows]:
        searched = self.answer.plan
        return {
            "layouts": [_flat(ranked_data(searched, candidate)) for candidate in searched.layouts],
            "candidates": [_flat(ranked_data(searched, candidate)) for candidate in searched.candidates],
            "families": [
                _flat({**family_data(family), **(family_data(family)["best"] or {})}) for family in searched.families
            ],
            "parts": [{"part": name, "seconds": seconds} for name, seconds in searched.best.parts.items()],
        }


@dataclass(frozen=True)
class MixedPlanResult(Result):
    """A plan for several kinds of nodes."""

    verb = "plan"
    plan: MixedPlan
    notes: tuple[str, ...] = ()

    job = Figure[Job]("plan.best.job", "The plan: `analyze` prices it, `train` runs it, to_yaml() is its file.")
    predicted_seconds = Figure[float]("plan.best.step_seconds")

    @cached_property
    def page(self) -> Page:
        return mixed_page(self.plan, self.notes)

    def _data(self) -> dict[str, Any]:
        return mixed_data(self.plan)


def plan(
    job: JobSource | None = None,
    *,
    exclude: Sequence[str] = (),
    max_memory: Size | None = None,
    min_global_batch: int | str | None = None,
    offload: bool | str | None = None,
    any_priced: bool = False,
    framework: str | None = None,
    thorough: bool = False,
    time_limit: Size | None = None,
    why_not: Sequence[str] = (),
    what_if: Sequence[str] = (),
    pareto: Literal["memory", "money"] | None = None,
    tokens: Size | None = None,
    price: Size | None = None,
    mtbf: Size | None = None,
    checkpoint_seconds: Size | None = None,
    restart_seconds: Size | None = None,
    top: int | str | None = None,
    unfolded: bool = False,
    on_progress: OnProgress | None = None,
    **keywords: Unpack[JobKeywords],
) -> PlanResult:
    """The best way to split a training job: ``plan(model="llama3-8b", cluster="dgx-h100:2", global_batch=512)``.

    Keywords of the strategy constrain the search: ``tp=8``, ``tp="2,4,8"``, ``pp="1..16"``. The others are those of the
    command; ``offload`` is True or names of what to offload (always), False (never) or None (where it gains).
    ``on_progress`` is called with what is being done. Raises DoesNotFit if nothing fits.
    """
    asked, bounds = bounded(job_arguments(job, keywords))
    cluster = asked.overrides.get("cluster")
    if isinstance(cluster, str) and parse_mixed(cluster) is not None:
        raise SpecError("cluster", f"{shown(cluster)} has several kinds of nodes", "use plan_mixed")
    if max_memory is not None and "run.memory_risk" in asked.overrides:
        raise exclusive("⟨max_memory⟩", max_memory, "⟨memory_risk⟩")
    chosen = None if framework is None else check_framework(framework)
    least = _minimum(min_global_batch)
    wanted, notes = planning_job(asked, None if chosen == "ddp" else chosen, batch_from=least)
    notes += filter(None, [model_note(wanted)])
    request = Request(
        wanted,
        constraints(bounds, exclude, offload),
        minimum_batch=least,
        memory_bytes=_memory(max_memory, wanted.cluster.device.usable_memory),
        offload=None if offload is None else bool(offload),
        any_priced=any_priced,
        thorough=thorough,
        time_limit_seconds=_time_limit(time_limit),
    ).started()
    questions = Questions(chosen, _conditions(why_not, "⟨why_not⟩"), texts(what_if, "⟨what_if⟩"), pareto)
    run = CampaignArguments(tokens, price, mtbf, checkpoint_seconds, restart_seconds)
    # Errors in further questions are raised before the search.
    terms_from(run, wanted.training)
    for change in questions.what_if:
        changed(wanted.cluster, change)
    shown_rows = None if top is None else whole_number(top, "⟨top⟩")
    searched = _searched(request, chosen, on_progress)
    if on_progress is not None:
        on_progress("explaining")
    answered = answer(searched, questions, notes, lambda best: campaign_of(run, best.job, best.step_seconds))
    return PlanResult(answered, shown_rows, unfolded)


def _searched(request: Request, framework: str | None, on_progress: OnProgress | None) -> Plan:
    if framework is not None:
        return planner.required(*searched_for(request, framework))

    def show(priced: int) -> None:
        if on_progress is not None:
            on_progress(f"searching: {priced:,} strategies priced")

    return planner.required(planner.plan(request, show), request)


def plan_mixed(
    job: JobSource | None = None,
    *,
    exclude: Sequence[str] = (),
    max_memory: Size | None = None,
    min_global_batch: int | str | None = None,
    any_priced: bool = False,
    time_limit: Size | None = None,
    **keywords: Unpack[JobKeywords],
) -> MixedPlanResult:
    """The plan for several kinds of nodes, such as ``cluster="dgx-h100:1+dgx-a100:1"``."""
    from shardwise.planner.mixed.plan import plan_mixed as plan_kinds
    from shardwise.planner.mixed.step import MixedRequest

    asked, bounds = bounded(job_arguments(job, keywords))
    cluster = asked.overrides.get("cluster")
    mixed = None if cluster is None else parse_mixed(cluster)
    if mixed is None:
        raise SpecError("cluster", f"{shown(cluster)} has one kind of nodes", "use plan")
    # Defaults that depend on the cluster are those of its first kind.
    least = _minimum(min_global_batch)
    of_first = replace(asked, overrides={**asked.overrides, "cluster": mixed.kinds[0]})
    wanted, notes = planning_job(of_first, batch_from=least)
    request = MixedRequest(
        wanted,
        constraints(bounds, exclude, None),
        minimum_batch=least,
        memory_bytes=_memory(max_memory, min(kind.device.usable_memory for kind in mixed.kinds)),
        any_priced=any_priced,
        time_limit_seconds=_time_limit(time_limit),
        mixed=mixed,
    )
    return MixedPlanResult(plan_kinds(request), (*notes, *filter(None, [model_note(wanted)])))


def bounded(asked: JobArguments) -> tuple[JobArguments, dict[str, Allowed]]:
    """Splits bounds on the strategy off the arguments, so that they do not become values of the job."""
    bounds: dict[str, Allowed] = {}
    rest: dict[str, Any] = {}
    for path, value in asked.overrides.items():
        part, _, name = path.partition(".")
        if part == "strategy" and name in FIELDS and _text(value).strip():
            bounds[name] = allowed(name, _text(value))
        else:
            rest[path] = value
    return replace(asked, overrides=rest), bounds


def constraints(bounds: Mapping[str, Allowed], exclude: Sequence[str], offload: bool | str | None) -> Constraints:
    own = dict(bounds)
    if isinstance(offload, str) and offload != "any":
        own["offload"] = allowed("offload", offload)
    return Constraints(own, tuple(parsed for _, parsed in _conditions(exclude, "⟨exclude⟩")))


def _conditions(given: Sequence[str], flag: str) -> tuple[tuple[str, Mapping[str, Allowed]], ...]:
    """Strategies as a caller names them, such as "tp=8,pp=1", with what each allows."""
    try:
        return tuple((text, parse_constraints(text)) for text in texts(given, ""))
    except SpecError as error:
        raise SpecError(f"{flag} {error.field}".strip(), error.problem, error.remedy) from None


def _text(value: Any) -> str:
    """A bound as the command line writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple, range)):
        return ",".join(part if isinstance(part, str) else shown(part) for part in value)
    return value if isinstance(value, str) else shown(value)


def _minimum(batch: int | str | None) -> int | None:
    return None if batch is None else whole_number(batch, "⟨min_global_batch⟩")


def _time_limit(value: Size | None) -> float | None:
    return None if value is None else amount(value, "seconds", "⟨time_limit⟩", "10min")


def _memory(value: Size | None, there: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and value.strip().endswith("%"):
        share = parse(value.strip()[:-1], "count", "⟨max_memory⟩") / 100
        if not 0 < share <= 1:
            remedy = "write 1% to 100%, or a size such as 70GB"
            raise SpecError("⟨max_memory⟩", f"{shown(value)} is not a share or a size", remedy)
        return share * there
    return float(parse(value, "bytes", "⟨max_memory⟩"))


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A flat row of a table: the entries of batch and memory beside the others, without other nested data."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if name in ("batch", "memory"):
                flat |= {inner: content for inner, content in value.items() if not isinstance(content, (Mapping, list))}
        elif not isinstance(value, list) or name == "dimensions":
            flat[name] = value
    return flat
