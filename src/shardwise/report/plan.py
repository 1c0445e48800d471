"""A plan as a page (the best strategies, why the first wins, who can run it, answers), and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from shardwise.cost.memory.room import probability_words
from shardwise.interop.frameworks.results import Lost
from shardwise.planner.advice.answer import PlanAnswer
from shardwise.planner.advice.explanation import PlanExplanation
from shardwise.planner.advice.frameworks import FrameworkVerdict
from shardwise.planner.advice.what_if import WhatIf
from shardwise.planner.advice.why_not import NotRun, WhyNot, difference_words, largest_differences
from shardwise.planner.candidate import Candidate
from shardwise.planner.describe import (
    offload_words,
    order_words,
    peak_words,
    recompute_words,
    schedule_words,
    sharding_words,
    strategy_words,
)
from shardwise.planner.plan import GROUPS, Group, Plan, RankingRow, StrategyFamily
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search
from shardwise.report.analysis import collective_lines
from shardwise.report.campaign import campaign_data, campaign_pieces
from shardwise.report.console import bar, picked, table
from shardwise.report.page import Line, Piece, paged
from shardwise.report.part_names import PLAN_WORDS
from shardwise.report.tables import FittedTable
from shardwise.report.verdict import sending_less_words
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.support import verdict
from shardwise.spec.units import (
    counted,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_seconds,
    readable_share,
)
from shardwise.uncertainty.residuals import error_bar

_MOST_FAMILIES = 10
_LEAST_SHARE = 0.0005  # of the step: what prints as 0.0%
_LIKE = (
    "like it: layouts that add dimensions to the same idea, for no time beyond noise and no memory; --all lists them"
)


@paged
def plan_page(answer: PlanAnswer, *, top: int = 8, unfolded: bool = False) -> Iterator[Piece | str]:
    """Everything `plan` prints."""
    found = answer.plan
    yield _headline(found)
    for note in [*answer.notes, *_notes(answer)]:
        yield Line(f"note: {note}", "yellow")
    rows = _rows(found, top=top, unfolded=unfolded)
    for group in GROUPS:
        if any(row.group == group for row in rows):
            yield _ranking(found, rows, group)
    if any(row.like for row in rows):
        yield _LIKE
    if found.tight:
        yield _tight(found)
    yield _batches([row.best for row in rows])
    yield _families(found)
    yield _where_time_goes(found.best)
    yield from _sentences(answer)
    yield from _asked(answer)
    yield from runner_lines(found.best, answer.runners)


def _headline(found: Plan) -> str:
    job = found.request.job
    batch = found.best.job.sequences
    return (
        f"{job.model.name}: {readable_count(parameter_count(job.model))} parameters on {job.cluster.devices:,} × "
        f"{job.cluster.device.name} ({job.cluster.name})\n"
        f"{counted(batch, 'sequence')} of {job.training.seq:,} = {readable_count(batch * job.training.seq)} tokens "
        f"per step, {job.training.precision}, {job.training.optimizer}, {job.stack.name}"
    )


def _notes(answer: PlanAnswer) -> Iterator[str]:
    found = answer.plan
    if found.narrowing:
        yield "a large space, narrowed to: " + "; ".join(found.narrowing) + " (--thorough searches all of it)"
    note = found.best.job.training.batch_note(found.best.job.strategy.batch_multiple)
    if note:
        yield note
    if answer.sending_less is not None:
        yield sending_less_words(found.best.job, answer.sending_less)


def _rows(found: Plan, *, top: int, unfolded: bool) -> Sequence[RankingRow]:
    if unfolded:
        return [RankingRow(found.group_of(one), one) for one in found.layouts[:top]]
    return found.rows[:top]


def _ranking(found: Plan, rows: Sequence[RankingRow], group: Group) -> FittedTable:
    titles = {
        "within noise": f"Within noise ({found.noise.share:.1%}) of the fastest: the simplest first",
        "slower": f"Slower than the fastest by more than noise ({found.noise.share:.1%}): by time",
    }
    columns = ("", "schedule", "sharding", "recompute", "tp", "cp", "pp", "dp", "ep", "mb", "step", "time",
               "tokens/s", "MFU", "memory", "left", "fits", "like it")  # fmt: skip
    own = [_row(number, row, found) for number, row in enumerate(rows, 1) if row.group == group]
    # The same with the strategy in words, which wrap.
    words = [strategy_words(row.best.job.strategy) for row in rows if row.group == group]
    kept = [columns.index(name) for name in ("step", "time", "memory", "fits")]
    short = [(row[0], said, *(row[place] for place in kept)) for row, said in zip(own, words)]
    optional = ("tokens/s", "like it", "left", "MFU")
    narrower = table("", ("", "strategy", *(columns[place] for place in kept)), short, numbers_from=2)
    return replace(table(titles[group], columns, own, numbers_from=4, optional=optional), narrower=narrower)


def _row(number: int, row: RankingRow, found: Plan) -> tuple[str, ...]:
    one, strategy = row.best, row.best.job.strategy
    others = [
        sharding_words(strategy) or "none",
        *(["no SP"] if strategy.tp > 1 and not strategy.sequence_parallel else []),
        *([strategy.context_method] if strategy.cp > 1 else []),
        *filter(None, [offload_words(strategy), order_words(strategy)]),
    ]
    return (
        str(number),
        schedule_words(strategy) if strategy.pp > 1 else "-",
        ", ".join(others),
        recompute_words(strategy).replace(" recompute", "").replace(" per rank", "") or "none",
        *(str(x) for x in (strategy.tp, strategy.cp, strategy.pp, strategy.data_parallel, strategy.ep)),
        str(strategy.microbatch),
        readable_seconds(one.step_seconds),
        _time(found, one),
        f"{one.tokens_per_second:,.0f}",
        readable_share(one.mfu),
        readable_bytes(one.memory.total),
        readable_bytes(found.left_bytes(one)),
        probability_words(found.fit_probability(one)),
        f"+{len(row.like)}" if row.like else "",
    )


def _time(found: Plan, one: Candidate) -> str:
    """The time of a strategy against the fastest, on which the tables and what is within noise rest."""
    return "fastest" if one is found.fastest else difference_words(one.loss_to(found.fastest))


def _tight(found: Plan) -> FittedTable:
    """What would be faster if it fits."""
    rows = [
        (
            strategy_words(one.job.strategy),
            readable_seconds(one.step_seconds),
            _time(found, one),
            readable_bytes(one.memory.total),
            readable_bytes(found.left_bytes(one)),
            probability_words(found.fit_probability(one)),
        )
        for one in found.tight
    ]
    title = f"Faster, but tight: they may run out of memory more often than --memory-risk {_risk(found.request.job)}"
    return table(title, ("strategy", "step", "time", "memory", "left", "fits"), rows, numbers_from=1)


def _risk(job: Job) -> str:
    return probability_words(job.run.memory_risk)


def _batches(candidates: Sequence[Candidate]) -> FittedTable:
    """How the global batch is spent, and the bubble that leaves."""
    rows = [
        (
            str(number),
            f"{one.job.strategy.data_parallel:,} × {one.job.microbatches:,} × {one.job.strategy.microbatch}",
            f"{one.job.sequences:,}",
            readable_share(one.bubble_share),
            readable_share(one.exposed_share),
        )
        for number, one in enumerate(candidates, 1)
    ]
    columns = ("", "data parallel × accumulation × microbatch", "sequences", "bubble", "exposed communication")
    return table("How the batch is spent", columns, rows, numbers_from=2)


def _families(found: Plan) -> FittedTable:
    """Each set of dimensions against the winner: what it would gain and lose."""
    rows = []
    for one in found.families[:_MOST_FAMILIES]:
        name = " + ".join(one.dimensions) or "dp alone"
        if one.best is None:
            rows.append((name, f"does not fit: {found.request.short_words(one.least_memory_bytes)}", "", ""))
            continue
        words = strategy_words(one.best.job.strategy)
        if one.best is found.best:
            rows.append((name, words, "the plan", ""))
            continue
        time = difference_words(one.best.loss_to(found.best))
        rows.append((name, words, largest_differences(found.best, one.best), time))
    title = "The best with each set of dimensions (beside dp), and where it loses and gains"
    return table(title, ("uses", "strategy", "against 1", "in all"), rows, numbers_from=3)


def _where_time_goes(one: Candidate) -> FittedTable:
    rows = [
        (PLAN_WORDS[name], bar(share), readable_seconds(one.parts[name]), readable_share(share))
        for name, share in one.shares.items()
        if share > _LEAST_SHARE
    ]
    title = f"Where the step of 1 goes: {strategy_words(one.job.strategy)}"
    return table(title, ("part", "", "seconds", "share"), rows, numbers_from=2)


def _sentences(answer: PlanAnswer) -> Iterator[str]:
    found = answer.plan
    explanation, rule = answer.explanation, answer.textbook
    yield f"Why 1 wins. {explanation.sentence()}"
    if rule is None:
        yield "The textbook order (fill the node with TP or EP, then PP or ZeRO-3, then DP) does not fit."
    else:
        words, step = strategy_words(rule.job.strategy), readable_seconds(rule.step_seconds)
        noise = " (within noise)" if found.group_of(rule) == "within noise" else ""
        against = "the fastest" if rule is found.fastest else f"{_time(found, rule)} against the fastest{noise}"
        yield f"The textbook order gives {words}: {step} a step, {against}."
    result = found.search
    yield (
        f"Searched {counted(result.priced, 'strategy')} in {readable_duration(result.seconds)}: "
        f"{result.fitting:,} run and fit, {result.too_large:,} do not fit, {result.unsupported:,} are not run; "
        f"the best {len(found.candidates)} were simulated."
    )
    band = answer.error_bar
    low, high = map(readable_seconds, (answer.predicted_seconds_low, answer.predicted_seconds_high))
    yield f"The step of 1 takes {low} to {high}. Error bars: {band.basis}."
    yield _room_words(found.request, answer.memory_error_high)
    yield f"Noise: {found.noise.basis}."
    yield f"MFU is of {peak_words(found.best.job)}."
    yield from collective_lines(answer.gradient_times)
    if answer.not_run is not None:
        yield _missing_feature(answer.not_run, found.best)


def _missing_feature(one: NotRun, first: Candidate) -> str:
    """What it costs that this project's engine lacks something."""
    return (
        f"Not run by this project's engine: {one.lacks}. It would give {one.best.tokens_per_second:,.0f} instead of "
        f"{first.tokens_per_second:,.0f} tokens/s ({strategy_words(one.best.job.strategy)}); --any shows it."
    )


def _room_words(request: Request, more: float) -> str:
    """What of a device a plan takes, and why not all of it."""
    room = request.room
    usable = readable_bytes(room.usable_bytes)
    if room.is_capped:
        return f"Memory: up to {usable} of a device, as --max-memory says."
    left, risk = readable_bytes(room.margin_bytes), _risk(request.job)
    return (
        f"Memory: of {usable} a plan leaves {left} free: tensors may take {more:.0%} more than predicted with a "
        f"probability of {risk} (--memory-risk; --max-memory overrides both)."
    )


def _asked(answer: PlanAnswer) -> Iterator[Piece | str]:
    for one in answer.why_not:
        loss = ""
        if one.loss is not None and one.verdict in GROUPS:
            loss = f" than the fastest by {one.loss:.1%}"
            if one.verdict == "within noise":
                loss = f" of the fastest ({difference_words(one.loss)})"
        yield f"\nWhy not {one.wanted}? {one.verdict.capitalize()}{loss}: {one.reason}."
        if one.best is not None and one.verdict in GROUPS:
            yield f"  Its best is {strategy_words(one.best.job.strategy)}."
    if answer.what_if:
        yield _what_if_table(answer)
    if answer.memory_front is not None or answer.sizes is not None:
        yield _pareto_table(answer)
    if answer.campaign is not None:
        yield from campaign_pieces(answer.campaign)


def _what_if_table(answer: PlanAnswer) -> FittedTable:
    """The fastest on every machine: the simplest of one and of another may differ by as much as noise."""
    now = answer.plan.fastest
    rows = [("as it is", strategy_words(now.job.strategy), readable_seconds(now.step_seconds), "")]
    for one in answer.what_if:
        if isinstance(one.found, Search):
            rows.append((one.change, "nothing fits", "", ""))
            continue
        other = one.found.fastest
        gain = difference_words(now.loss_to(other))
        rows.append((one.change, strategy_words(other.job.strategy), readable_seconds(other.step_seconds), gain))
    return table("What if", ("change", "fastest strategy", "step", "tokens/s"), rows, numbers_from=2)


def _pareto_table(answer: PlanAnswer) -> FittedTable:
    if answer.memory_front is not None:
        rows = [
            (strategy_words(one.job.strategy), readable_bytes(one.memory.total), readable_seconds(one.step_seconds),
             _time(answer.plan, one))
            for one in answer.memory_front
        ]  # fmt: skip
        return table("Time against memory", ("strategy", "memory", "step", "time"), rows)
    assert answer.sizes is not None
    most = answer.sizes[0]
    sized = [
        (f"{one.devices:,}", strategy_words(one.best.job.strategy), readable_seconds(one.best.step_seconds),
         f"{1 + one.best.loss_to(most.best):.2f} ×", readable_share(one.cost_against(most)))
        for one in answer.sizes
    ]  # fmt: skip
    return table("Time against money", ("devices", "strategy", "step", "time", "cost per token"), sized, numbers_from=2)


def runner_lines(best: Candidate, verdicts: Sequence[FrameworkVerdict]) -> Iterator[str]:
    """One line for all that run the plan, then one for each framework, priced as that runs it."""
    here = ["shardwise"] if verdict(best.job).status == "runs" else []
    able = [*here, *(one.name for one in verdicts if one.runs)]
    yield f"\nWho can run 1: {', '.join(able) or 'no framework known here'}."
    yield "Each framework with its own kernels and precision, compared with 1 as priced above:"
    for one in verdicts:
        yield f"  {one.name}: {' '.join(_what_it_runs(best, one))}"


def _what_it_runs(best: Candidate, one: FrameworkVerdict) -> Iterator[str]:
    """Sentences: why it cannot run the plan, and what it runs at what price."""
    if one.lacks:
        yield f"cannot run it: {'; '.join(_lack_words(lost, best.job) for lost in one.lacks)}."
    if one.needed_bytes is not None:
        yield f"cannot run it: it needs {readable_bytes(one.needed_bytes)} of a device there."
    if one.own is not None:
        what = "runs it" if one.runs else f"The fastest similar plan for it: {strategy_words(one.own.job.strategy)}"
        way = f", with {' and '.join(one.differs)}" if one.differs else ""
        yield f"{what}{way}: {_against(best, one.own)}."
    elif one.searched and all(lost.within("strategy") for lost in one.lacks):
        yield f"No similar plan fits there; `shardwise plan --for {one.name}` searches all that it can do."


def _lack_words(lost: Lost, job: Job) -> str:
    """What the plan has and the framework has not, and what that has instead."""
    value = "" if isinstance(lost.value, (bool, list, tuple)) else f" {lost.value}"
    usual = f"{lost.short_field.replace('_', ' ')}{value}"
    special = {"strategy.cp": f"{usual} by {job.strategy.context_method}", "strategy.zero": f"ZeRO-{lost.value}"}
    return f"{special.get(lost.field, usual)} ({lost.why})"


def _against(best: Candidate, own: Candidate) -> str:
    slower = own.loss_to(best)
    more = own.memory.total - best.memory.total
    memory = f"{'+' if more >= 0 else '-'}{readable_bytes(abs(more))}"
    step, held = readable_seconds(own.step_seconds), readable_bytes(own.memory.total)
    return f"{step} ({difference_words(slower)}), {held} ({memory})"


def runner_data(one: FrameworkVerdict, best: Candidate) -> dict[str, Any]:
    """A verdict as plain data; ``loss`` is of time, as a share."""
    own = one.own
    return {
        "name": one.name,
        "runs": one.runs,
        "lacks": [lost.field for lost in one.lacks],
        "differs": list(one.differs),
        "stack": None if own is None else own.job.stack.name,
        "best": None if own is None else strategy_words(own.job.strategy),
        "loss": None if own is None else own.loss_to(best),
        "memory_bytes": None if own is None else own.memory.total,
        "needed_bytes": one.needed_bytes,
    }


def plan_data(answer: PlanAnswer) -> dict[str, Any]:
    """Everything `plan` prints; times in seconds, memory in bytes, shares as fractions."""
    found: Plan = answer.plan
    result = found.search
    return {
        "job": found.best.job.to_dict(),
        "memory_risk": found.request.job.run.memory_risk,
        "tight": [ranked_data(found, one) for one in found.tight],
        "candidates": [ranked_data(found, one) for one in found.candidates],
        "layouts": [ranked_data(found, one) for one in found.layouts],
        "ranking": [_ranking_data(number, row) for number, row in enumerate(found.rows, 1)],
        "families": [family_data(one) for one in found.families],
        "fastest": strategy_words(found.fastest.job.strategy),
        "noise": picked(found.noise, "share", "basis"),
        "room": asdict(found.request.room),
        "search": {
            **picked(result, "priced", "fitting", "too_large", "unsupported"),
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
    return {
        "group": found.group_of(one),
        "loss": found.loss_of(one),
        **candidate_data(one),
        "left_bytes": found.left_bytes(one),
        "fit_probability": found.fit_probability(one),
    }


def _ranking_data(number: int, row: RankingRow) -> dict[str, Any]:
    """A row of the ranking; its figures are in the layout with the same words."""
    like = [strategy_words(one.job.strategy) for one in row.like]
    return {"rank": number, "group": row.group, "words": strategy_words(row.best.job.strategy), "like": like}


def family_data(one: StrategyFamily) -> dict[str, Any]:
    best = None if one.best is None else candidate_data(one.best)
    return {"dimensions": list(one.dimensions), "best": best, "least_memory_bytes": one.least_memory_bytes}


def candidate_data(one: Candidate) -> dict[str, Any]:
    job, band = one.job, error_bar(one.job)
    return {
        "strategy": job.to_dict().get("strategy", {}),
        "words": strategy_words(job.strategy),
        "predicted_seconds": one.step_seconds,
        "predicted_seconds_low": one.low_seconds(band.time_low),
        "predicted_seconds_high": one.step_seconds * (1 + band.time_high),
        "error_bar_basis": band.basis,
        "tokens_per_step": job.tokens_per_step,
        **picked(one, "tokens_per_second", "mfu"),
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
        "turnings": [picked(one, "what", "factor") for one in explanation.turnings or ()],
    }


def _not_run(one: NotRun) -> dict[str, Any]:
    return {"lacks": [list(finding.techniques) for finding in one.findings], "best": candidate_data(one.best)}


def _why_not(one: WhyNot) -> dict[str, Any]:
    best = None if one.best is None else candidate_data(one.best)
    return {**picked(one, "wanted", "verdict", "reason", "loss"), "best": best}


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
        {**picked(one, "devices", "device_seconds_per_token"), "best": candidate_data(one.best)} for one in answer.sizes
    ]
