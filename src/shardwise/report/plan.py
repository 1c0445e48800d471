"""A plan as a page: the winner, why it wins, other strategies, who can run it, answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.cost.memory.room import probability_words
from shardwise.interop.frameworks.job_fields import Lost
from shardwise.planner.advice.answer import PlanAnswer
from shardwise.planner.advice.explanation import NotRun, difference_words, largest_differences
from shardwise.planner.advice.frameworks import FrameworkVerdict
from shardwise.planner.candidate import (
    Candidate,
    offload_words,
    order_words,
    peak_words,
    recompute_words,
    schedule_words,
    sharding_words,
    strategy_words,
)
from shardwise.planner.plan import GROUPS, Group, Plan, RankingRow
from shardwise.planner.request import Request
from shardwise.planner.search.search import Search
from shardwise.report.analysis import campaign_pieces, collective_lines
from shardwise.report.console import bar, table
from shardwise.report.page import Line, Piece, paged
from shardwise.report.tables import FittedTable
from shardwise.report.verdict import PLAN_WORDS, sending_less_words
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

_MOST_FAMILIES = 10
_MOST_PARTS = 4  # of the step, in the answer
_LEAST_SHARE = 0.0005  # of the step: what prints as 0.0%
_LIKE = (
    "like it: layouts that add dimensions to the same idea, for no time beyond noise and no memory; --all lists them"
)


@paged
def plan_screen(answer: PlanAnswer, *, top: int = 3, unfolded: bool = False) -> Iterator[Piece | str]:
    """What `plan` prints: the winner, its alternatives and why, in one screen, and what was asked."""
    plan = answer.plan
    yield from _answer(answer)
    title = f"The best: within noise ({plan.noise.share:.1%}) of the fastest the simplest first, then by time"
    yield _ranked_words(plan, [*enumerate(_rows(plan, top, unfolded=unfolded), 1)], title)
    if plan.tight:
        yield _tight_words(plan)
    yield from _why(answer)
    yield from _asked(answer)
    yield f"Runs on {_able(plan.best, answer.runners)}. --details adds more layouts, frameworks and error bars."


@paged
def plan_page(answer: PlanAnswer, *, top: int = 8, unfolded: bool = False) -> Iterator[Piece | str]:
    """What `plan --details` prints."""
    plan = answer.plan
    yield from _answer(answer)
    rows = _rows(plan, top, unfolded=unfolded)
    for group in GROUPS:
        if any(row.group == group for row in rows):
            yield _ranking(plan, rows, group)
    if any(row.like for row in rows):
        yield _LIKE
    if plan.tight:
        yield _tight(plan)
    yield _batches([row.best for row in rows])
    yield _families(plan)
    yield _where_time_goes(plan.best)
    yield from _why(answer)
    yield from _sentences(answer)
    yield from _asked(answer)
    yield from runner_lines(plan.best, answer.runners)


def _answer(answer: PlanAnswer) -> Iterator[Piece | str]:
    """What is planned for, and the winner as `analyze` would begin it."""
    yield _headline(answer.plan)
    for note in [*answer.notes, *_notes(answer)]:
        yield Line(f"note: {note}", "yellow")
    yield _winner(answer)


def _rows(plan: Plan, top: int, *, unfolded: bool) -> Sequence[RankingRow]:
    if unfolded:
        return [RankingRow(plan.group_of(candidate), candidate) for candidate in plan.layouts[:top]]
    return plan.rows[:top]


def _winner(answer: PlanAnswer) -> FittedTable:
    plan, best = answer.plan, answer.plan.best
    low, high = map(readable_seconds, (answer.predicted_seconds_low, answer.predicted_seconds_high))
    likely = probability_words(plan.fit_probability(best))
    held, usable = map(readable_bytes, (best.memory.total, plan.request.room.usable_bytes))
    mfu = f"MFU {readable_share(best.mfu)} of {peak_words(best.job)}"
    parts = sorted(best.shares.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    rows = (
        ("Best plan", strategy_words(best.job.strategy)),
        ("Memory", f"fits with {likely} probability: {held} of {usable}, {readable_bytes(plan.left_bytes(best))} free"),
        ("Predicted step", f"{readable_seconds(best.step_seconds)}; 80% of published runs: {low} - {high}"),
        ("Throughput", f"{best.tokens_per_second:,.0f} tokens/s, {mfu}"),
        ("Time goes to", " · ".join(f"{PLAN_WORDS[name]} {readable_share(share)}" for name, share in parts)),
    )
    return table("", ("", ""), rows, numbers_from=2)


def _ranked_words(plan: Plan, rows: Sequence[tuple[int, RankingRow]], title: str = "") -> FittedTable:
    """Numbered strategies in words, which wrap."""
    shown = [
        (
            str(number),
            strategy_words(row.best.job.strategy),
            readable_seconds(row.best.step_seconds),
            _time(plan, row.best),
            readable_bytes(row.best.memory.total),
            probability_words(plan.fit_probability(row.best)),
        )
        for number, row in rows
    ]
    return table(title, ("", "strategy", "step", "time", "memory", "fits"), shown, numbers_from=2)


def _tight_words(plan: Plan) -> str:
    """The best of the strategies that would be faster, but may run out of memory."""
    first = plan.tight[0]
    likely = probability_words(plan.fit_probability(first))
    return (
        f"Tight: {strategy_words(first.job.strategy)} takes {readable_seconds(first.step_seconds)} "
        f"({_time(plan, first)}), but fits with {likely} probability only (--memory-risk {_risk(plan.request.job)})."
    )


def _headline(plan: Plan) -> str:
    job = plan.request.job
    batch = plan.best.job.sequences
    return (
        f"{job.model.name}: {readable_count(parameter_count(job.model))} parameters on {job.cluster.devices:,} × "
        f"{job.cluster.device.name} ({job.cluster.name})\n"
        f"{counted(batch, 'sequence')} of {job.training.seq:,} = {readable_count(batch * job.training.seq)} tokens "
        f"per step, {job.training.precision}, {job.training.optimizer}, {job.stack.name}"
    )


def _notes(answer: PlanAnswer) -> Iterator[str]:
    plan = answer.plan
    if plan.narrowing:
        yield "a large space, narrowed to: " + "; ".join(plan.narrowing) + " (--thorough searches all of it)"
    note = plan.best.job.training.batch_note(plan.best.job.strategy.batch_multiple)
    if note:
        yield note
    if answer.sending_less is not None:
        yield sending_less_words(plan.best.job, answer.sending_less)


def _ranking(plan: Plan, rows: Sequence[RankingRow], group: Group) -> FittedTable:
    titles = {
        "within noise": f"Within noise ({plan.noise.share:.1%}) of the fastest: the simplest first",
        "slower": f"Slower than the fastest by more than noise ({plan.noise.share:.1%}): by time",
    }
    columns = ("", "schedule", "sharding", "recompute", "tp", "cp", "pp", "dp", "ep", "mb", "step", "time",
               "tokens/s", "MFU", "memory", "left", "fits", "like it")  # fmt: skip
    own = [(number, row) for number, row in enumerate(rows, 1) if row.group == group]
    optional = ("tokens/s", "like it", "left", "MFU")
    cells = [_row(number, row, plan) for number, row in own]
    wide = table(titles[group], columns, cells, numbers_from=4, optional=optional)
    return replace(wide, narrower=_ranked_words(plan, own))


def _row(number: int, row: RankingRow, plan: Plan) -> tuple[str, ...]:
    candidate, strategy = row.best, row.best.job.strategy
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
        readable_seconds(candidate.step_seconds),
        _time(plan, candidate),
        f"{candidate.tokens_per_second:,.0f}",
        readable_share(candidate.mfu),
        readable_bytes(candidate.memory.total),
        readable_bytes(plan.left_bytes(candidate)),
        probability_words(plan.fit_probability(candidate)),
        f"+{len(row.like)}" if row.like else "",
    )


def _time(plan: Plan, candidate: Candidate) -> str:
    """The step time relative to the fastest strategy, by which the tables group and sort."""
    return "fastest" if candidate is plan.fastest else difference_words(candidate.loss_to(plan.fastest))


def _tight(plan: Plan) -> FittedTable:
    """Strategies that would be faster, but may run out of memory."""
    rows = [
        (
            strategy_words(candidate.job.strategy),
            readable_seconds(candidate.step_seconds),
            _time(plan, candidate),
            readable_bytes(candidate.memory.total),
            readable_bytes(plan.left_bytes(candidate)),
            probability_words(plan.fit_probability(candidate)),
        )
        for candidate in plan.tight
    ]
    title = f"Faster, but tight: they may run out of memory more often than --memory-risk {_risk(plan.request.job)}"
    return table(title, ("strategy", "step", "time", "memory", "left", "fits"), rows, numbers_from=1)


def _risk(job: Job) -> str:
    return probability_words(job.run.memory_risk)


def _batches(candidates: Sequence[Candidate]) -> FittedTable:
    rows = [
        (
            str(number),
            f"{best.job.strategy.data_parallel:,} × {best.job.microbatches:,} × {best.job.strategy.microbatch}",
            f"{best.job.sequences:,}",
            readable_share(best.bubble_share),
            readable_share(best.exposed_share),
        )
        for number, best in enumerate(candidates, 1)
    ]
    columns = ("", "data parallel × accumulation × microbatch", "sequences", "bubble", "exposed communication")
    return table("How the batch is spent", columns, rows, numbers_from=2)


def _families(plan: Plan) -> FittedTable:
    """Each set of dimensions against the winner: what it would gain and lose."""
    rows = []
    for family in plan.families[:_MOST_FAMILIES]:
        name = " + ".join(family.dimensions) or "dp alone"
        if family.best is None:
            rows.append((name, f"does not fit: {plan.request.short_words(family.least_memory_bytes)}", "", ""))
            continue
        words = strategy_words(family.best.job.strategy)
        if family.best is plan.best:
            rows.append((name, words, "the plan", ""))
            continue
        time = difference_words(family.best.loss_to(plan.best))
        rows.append((name, words, largest_differences(plan.best, family.best), time))
    title = "The best with each set of dimensions (beside dp), and where it loses and gains"
    return table(title, ("uses", "strategy", "against 1", "in all"), rows, numbers_from=3)


def _where_time_goes(candidate: Candidate) -> FittedTable:
    rows = [
        (PLAN_WORDS[name], bar(share), readable_seconds(candidate.parts[name]), readable_share(share))
        for name, share in candidate.shares.items()
        if share > _LEAST_SHARE
    ]
    title = f"Where the step of 1 goes: {strategy_words(candidate.job.strategy)}"
    return table(title, ("part", "", "seconds", "share"), rows, numbers_from=2)


def _why(answer: PlanAnswer) -> Iterator[str]:
    plan, rule = answer.plan, answer.textbook
    yield f"Why 1 wins. {answer.explanation.sentence()}"
    if rule is None:
        yield "The textbook order (fill the node with TP or EP, then PP or ZeRO-3, then DP) does not fit."
    else:
        words, step = strategy_words(rule.job.strategy), readable_seconds(rule.step_seconds)
        noise = " (within noise)" if plan.group_of(rule) == "within noise" else ""
        against = "the fastest" if rule is plan.fastest else f"{_time(plan, rule)} against the fastest{noise}"
        yield f"The textbook order gives {words}: {step} a step, {against}."
    result = plan.search
    yield (
        f"Searched {counted(result.priced, 'strategy')} in {readable_duration(result.seconds)}: "
        f"{result.fitting:,} run and fit, {result.too_large:,} do not fit, {result.unsupported:,} are not run; "
        f"the best {len(plan.candidates)} were simulated."
    )


def _sentences(answer: PlanAnswer) -> Iterator[str]:
    """Where the figures come from, and what this project's engine does not run."""
    plan = answer.plan
    yield f"Error bars: {answer.error_bar.basis}."
    yield _room_words(plan.request, answer.memory_error_high)
    yield f"Noise: {plan.noise.basis}."
    yield from collective_lines(answer.gradient_times)
    if answer.not_run is not None:
        yield _missing_feature(answer.not_run, plan.best)


def _missing_feature(not_run: NotRun, first: Candidate) -> str:
    """The throughput lost because this project's engine cannot run a faster strategy."""
    faster = not_run.best
    return (
        f"Not run by this project's engine: {not_run.lacks}. It would give {faster.tokens_per_second:,.0f} instead of "
        f"{first.tokens_per_second:,.0f} tokens/s ({strategy_words(faster.job.strategy)}); --any shows it."
    )


def _room_words(request: Request, more: float) -> str:
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
    for question in answer.why_not:
        loss = ""
        if question.loss is not None and question.verdict in GROUPS:
            loss = f" than the fastest by {question.loss:.1%}"
            if question.verdict == "within noise":
                loss = f" of the fastest ({difference_words(question.loss)})"
        yield f"\nWhy not {question.wanted}? {question.verdict.capitalize()}{loss}: {question.reason}."
        if question.best is not None and question.verdict in GROUPS:
            yield f"  Its best is {strategy_words(question.best.job.strategy)}."
    if answer.what_if:
        yield _what_if_table(answer)
    if answer.memory_front is not None or answer.sizes is not None:
        yield _pareto_table(answer)
    if answer.campaign is not None:
        yield from campaign_pieces(answer.campaign)


def _what_if_table(answer: PlanAnswer) -> FittedTable:
    """The fastest strategy on each machine; comparing the simplest ones would add differences within noise."""
    now = answer.plan.fastest
    rows = [("as it is", strategy_words(now.job.strategy), readable_seconds(now.step_seconds), "")]
    for what_if in answer.what_if:
        if isinstance(what_if.result, Search):
            rows.append((what_if.change, "nothing fits", "", ""))
            continue
        other = what_if.result.fastest
        gain = difference_words(now.loss_to(other))
        rows.append((what_if.change, strategy_words(other.job.strategy), readable_seconds(other.step_seconds), gain))
    return table("What if", ("change", "fastest strategy", "step", "tokens/s"), rows, numbers_from=2)


def _pareto_table(answer: PlanAnswer) -> FittedTable:
    if answer.memory_front is not None:
        rows = [
            (
                strategy_words(candidate.job.strategy),
                readable_bytes(candidate.memory.total),
                readable_seconds(candidate.step_seconds),
                _time(answer.plan, candidate),
            )
            for candidate in answer.memory_front
        ]
        return table("Time against memory", ("strategy", "memory", "step", "time"), rows)
    assert answer.sizes is not None
    most = answer.sizes[0]
    sized = [
        (f"{size.devices:,}", strategy_words(size.best.job.strategy), readable_seconds(size.best.step_seconds),
         f"{1 + size.best.loss_to(most.best):.2f} ×", readable_share(size.cost_against(most)))
        for size in answer.sizes
    ]  # fmt: skip
    return table("Time against money", ("devices", "strategy", "step", "time", "cost per token"), sized, numbers_from=2)


def runner_lines(best: Candidate, verdicts: Sequence[FrameworkVerdict]) -> Iterator[str]:
    """Everything that can run the plan, then one line per framework with the plan priced as it would run there."""
    yield f"\nWho can run 1: {_able(best, verdicts)}."
    yield "Each framework with its own kernels and precision, compared with 1 as priced above:"
    for runner in verdicts:
        yield f"  {runner.name}: {' '.join(_what_it_runs(best, runner))}"


def _able(best: Candidate, verdicts: Sequence[FrameworkVerdict]) -> str:
    """Everything that can run the plan, by name."""
    here = ["shardwise"] if verdict(best.job).status == "runs" else []
    return ", ".join([*here, *(runner.name for runner in verdicts if runner.runs)]) or "no framework known here"


def _what_it_runs(best: Candidate, runner: FrameworkVerdict) -> Iterator[str]:
    """Why the framework cannot run the plan, if so, and the price of what it runs instead."""
    if runner.lacks:
        yield f"cannot run it: {'; '.join(_lack_words(lost, best.job) for lost in runner.lacks)}."
    if runner.needed_bytes is not None:
        yield f"cannot run it: it needs {readable_bytes(runner.needed_bytes)} of a device there."
    if runner.own is not None:
        what = (
            "runs it" if runner.runs else f"The fastest similar plan for it: {strategy_words(runner.own.job.strategy)}"
        )
        way = f", with {' and '.join(runner.differs)}" if runner.differs else ""
        yield f"{what}{way}: {_against(best, runner.own)}."
    elif runner.searched and all(lost.within("strategy") for lost in runner.lacks):
        yield f"No similar plan fits there; `shardwise plan --for {runner.name}` searches all that it can do."


def _lack_words(lost: Lost, job: Job) -> str:
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
