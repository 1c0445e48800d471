"""What the page shows of one job, priced like `analyze`: verdict, figures, pictures, controls, exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.accuracy.nearest import NEAR_WORDS, NearRun, nearest_runs
from shardwise.api.analysis import require_few_passes
from shardwise.cost.analysis import Analysis
from shardwise.cost.analysis import analyze as analyze_job
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.trace import step_trace
from shardwise.interop.frameworks import TARGETS, target
from shardwise.planner.advice.assessment import Assessment, assess, nearest_fit
from shardwise.planner.advice.exported import priced_export
from shardwise.planner.candidate import strategy_words
from shardwise.report.charts.chart import BarChart
from shardwise.report.charts.devices import memory_chart
from shardwise.report.charts.job import communication_chart, levels_chart, step_chart, timeline_chart
from shardwise.report.console import picked
from shardwise.report.export import export_data
from shardwise.report.formats import versioned
from shardwise.report.verdict import advice_row, fit_words, floor_row, subject_words, verdict_of, verdict_rows
from shardwise.spec.clusters import device_words
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_share
from shardwise.ui.choices import choices
from shardwise.ui.given import command, job_of, keywords_of

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
    return {**verdict_of(assessment).to_dict(), **ends, **picked(analysis, "tokens_per_second", "mfu")}


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
