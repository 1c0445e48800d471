"""What the page shows of one job, priced like `analyze`: verdict, figures, pictures, controls, exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.accuracy.nearest import NEAR_WORDS, NearRun, nearest_runs
from shardwise.api.analysis import require_few_passes
from shardwise.cost.analysis import Analysis
from shardwise.cost.analysis import analyze as analyze_job
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.trace import step_trace
from shardwise.interop.frameworks import TARGETS, target
from shardwise.planner.advice.assessment import Assessment, assess, nearest_fit
from shardwise.planner.advice.explanation import TIE
from shardwise.planner.advice.exported import priced_export
from shardwise.planner.candidate import PARTS, Candidate, candidate, strategy_words
from shardwise.report.charts.chart import BarChart
from shardwise.report.charts.devices import memory_chart
from shardwise.report.charts.job import communication_chart, levels_chart, step_chart, timeline_chart
from shardwise.report.console import picked, versioned
from shardwise.report.plan_data import export_data
from shardwise.report.verdict import (
    PLAN_WORDS,
    advice_row,
    fit_words,
    floor_row,
    subject_words,
    verdict_of,
    verdict_rows,
)
from shardwise.spec.clusters import device_words
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_share
from shardwise.ui.choices import choices
from shardwise.ui.given import command, job_of, keywords_of
from shardwise.uncertainty.residuals import noise_of

Data = dict[str, Any]


def answer(given: Mapping[str, Any]) -> Data:
    """Everything that is updated within a tenth of a second when a control changes."""
    job, notes = job_of(given)
    assessment = assess(analyze_job(job), advice=False)
    analysis = assessment.analysis
    return {
        "verdict": verdict_data(assessment),
        "facts": [{"name": name, "words": words} for name, words in (*verdict_rows(assessment), floor_row(analysis))],
        "charts": {chart.name: chart.to_dict() for chart in _charts(analysis)},
        "job": {
            **picked(job, "microbatches", "sequences", "tokens_per_step"),
            "devices": job.cluster.devices,
            "nodes": job.cluster.nodes,
            "dp": job.strategy.data_parallel,
            "words": strategy_words(job.strategy),
            "model": job.model.name,
            "experts": job.model.moe is not None,
        },
        "notes": [*notes, *analysis.notes],
        "controls": choices(job),
        "command": command(given),
        "yaml": job.to_yaml(),
    }


def _charts(analysis: Analysis) -> Iterator[BarChart]:
    yield step_chart(analysis)
    yield memory_chart(analysis)
    if analysis.exposed_by_dimension():
        yield communication_chart(analysis)
        yield levels_chart(analysis)


def verdict_data(assessment: Assessment) -> Data:
    """The verdict, with the subject and the end of its sentence also apart, and its figures."""
    analysis = assessment.analysis
    ends = {"subject": subject_words(analysis.job), "fit_words": fit_words(assessment)}
    return {**vars(verdict_of(assessment)), **ends, **picked(analysis, "tokens_per_second", "mfu")}


def timeline(given: Mapping[str, Any]) -> Data:
    """The passes of a step, apart from `answer` since drawing them takes as long as all the rest."""
    job, _ = job_of(given)
    drawn = timeline_chart(job)
    words = f"{job.microbatches:,} microbatches are too many passes to draw: give a smaller global batch"
    return {"chart": None if drawn is None else drawn.to_dict(), "why_not": "" if drawn is not None else words}


def advice(given: Mapping[str, Any]) -> Data:
    """What to change, as words and as keywords; slow, since it prices neighbouring strategies."""
    job, _ = job_of(given)
    analysis = analyze_job(job)
    if not analysis.fits:
        return _fitting(job)
    assessment = assess(analysis)
    name, words = advice_row(assessment)
    change = assessment.best_change
    return {"name": name, "words": words, "set": None if change is None else changes_to(job, change.job)}


def _fitting(job: Job) -> Data:
    """What would fit a few changes away; the page has a button for a full search."""
    other = nearest_fit(job)
    if other is None:
        words = "nothing that is a few changes away"
        return {"name": "What would fit", "words": words, "set": None, "search": True}
    words = f"{strategy_words(other.strategy)}: that needs {readable_bytes(peak_memory(other).total)}"
    return {"name": "What would fit", "words": words, "set": changes_to(job, other)}


def changes_to(before: Job, after: Job) -> Data:
    """The keywords that turn ``before`` into ``after``; None resets one to its default."""
    old, new = keywords_of(before), keywords_of(after)
    return {name: new.get(name) for name in {**old, **new} if old.get(name) != new.get(name)}


def published(given: Mapping[str, Any]) -> Data:
    """The published runs nearest to a job, with their source, beside its own prediction."""
    job, _ = job_of(given)
    assessment = assess(analyze_job(job), advice=False)
    analysis = assessment.analysis
    own = {
        "model": job.model.name,
        "machine": device_words(job.cluster),
        "layout": strategy_words(job.strategy),
        "seconds": analysis.predicted_seconds,
        "mfu": analysis.mfu,
        "tokens_per_second_per_device": analysis.tokens_per_second / job.cluster.devices,
    }
    return {
        "own": own,
        "runs": [_near_data(near) for near in nearest_runs(job)],
        "near": NEAR_WORDS,
        "basis": assessment.error_bar.basis,
    }


def _near_data(near: NearRun) -> Data:
    run, job = near.run, near.run.job
    error = near.error
    return {
        "source": run.row.text("source"),
        "locator": run.row.text("locator"),
        "model": run.model_name,
        "machine": device_words(job.cluster),
        "layout": f"{strategy_words(job.strategy)} · {job.training.precision}",
        **picked(run, seq="job.training.seq", sequences="job.sequences"),
        **picked(run, "reported_from", assumed="row.assumed"),
        **picked(near, "seconds", "mfu", "tokens_per_second_per_device", "distance", "differs", "error"),
        "error_words": "" if error is None else f"{'+' if error > 0 else ''}{readable_share(error)}",
    }


_MOST_PASSES = 100_000  # of a trace that a browser opens in seconds


def exported(given: Mapping[str, Any]) -> dict[str, Any]:
    """The data of `export --json`; ``to`` names the framework."""
    to = given.get("to")
    if not isinstance(to, str):
        raise SpecError("to", f"{shown(to)} is not a framework", "choose one of " + ", ".join(TARGETS))
    chosen = target(to)
    job, _ = job_of({name: value for name, value in given.items() if name != "to"})
    return versioned("export", export_data(chosen.export(job), priced_export(job, chosen.name)))


def trace(given: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted step in Chrome's format, as `analyze --trace` writes it."""
    job, _ = job_of(given)
    require_few_passes(job, "trace", _MOST_PASSES)
    return step_trace(job)


# -- two jobs side by side, A and B: figures, layouts, which parts of the step take longer -----------


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
