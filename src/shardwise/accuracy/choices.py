"""Whether the prediction chooses well: published runs of one job in several layouts, as measured and predicted.

Rows are comparable only within a source and a release of its software.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.accuracy.recipe import release
from shardwise.accuracy.runs import PublishedRun


@dataclass(frozen=True)
class LayoutChoice:
    """One job in several layouts.

    ``regret`` is how much slower than the fastest as measured the one is that is predicted to be the fastest;
    ``rank_correlation`` is Spearman's, None where all are predicted or measured to take as long.
    """

    source: str
    model: str
    device: str
    devices: int
    sequences: int
    layouts: int
    fastest: str
    chosen: str
    regret: float
    rank_correlation: float | None


def same_job(run: PublishedRun) -> Hashable:
    """What two rows share that differ in the strategy alone.

    The rows of another release ran other software; two slices joined by a data centre's network are another machine
    than one.
    """
    job = run.job
    software = (run.row.text("source"), release(run.row), job.stack.name)
    machine = (job.cluster.device.name, job.cluster.devices, job.cluster.levels)
    return (*machine, job.model, job.training, job.sequences, software)


def layouts_of_jobs(runs: Iterable[PublishedRun]) -> list[list[PublishedRun]]:
    """Runs with a time that differ in the strategy alone, together; of equal strategies the first."""
    jobs: dict[Hashable, list[PublishedRun]] = {}
    for run in runs:
        own = jobs.setdefault(same_job(run), [])
        is_known = any(run.job.strategy == earlier.job.strategy for earlier in own)
        if run.reported_seconds and not run.set_aside and not is_known:
            own.append(run)
    return [own for own in jobs.values() if len(own) > 1]


def choices(runs: Iterable[PublishedRun], predicted_seconds: Mapping[str, float]) -> list[LayoutChoice]:
    """Every job with several layouts, the largest regret first."""
    jobs = [_choice(own, [predicted_seconds[run.row_id] for run in own]) for own in layouts_of_jobs(runs)]
    return sorted(jobs, key=lambda choice: -choice.regret)


def _choice(runs: Sequence[PublishedRun], predicted: Sequence[float]) -> LayoutChoice:
    measured = [run.reported_seconds or 0.0 for run in runs]
    chosen, fastest = (min(range(len(runs)), key=list(times).__getitem__) for times in (predicted, measured))
    first = runs[chosen]
    return LayoutChoice(
        source=first.source.name,
        model=first.model_name,
        device=first.device,
        devices=first.job.cluster.devices,
        sequences=first.job.sequences,
        layouts=len(runs),
        fastest=runs[fastest].row_id,
        chosen=first.row_id,
        regret=measured[chosen] / measured[fastest] - 1,
        rank_correlation=rank_correlation(predicted, measured),
    )


@dataclass(frozen=True)
class ChoiceSummary:
    """Over all jobs: mean and worst regret, and the mean rank correlation of those that have one."""

    jobs: int
    mean_regret: float
    worst_regret: float
    mean_rank_correlation: float | None


def choice_summary(choices: Sequence[LayoutChoice]) -> ChoiceSummary | None:
    if not choices:
        return None
    regrets = [choice.regret for choice in choices]
    correlations = [choice.rank_correlation for choice in choices if choice.rank_correlation is not None]
    mean = sum(correlations) / len(correlations) if correlations else None
    return ChoiceSummary(len(choices), sum(regrets) / len(regrets), max(regrets), mean)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's: the correlation of the ranks, of equal values their mean rank; None if all of either are equal."""
    first_ranks, second_ranks = _ranks(first), _ranks(second)
    middle = (len(first_ranks) + 1) / 2
    together = sum((a - middle) * (b - middle) for a, b in zip(first_ranks, second_ranks, strict=True))
    spread, other_spread = (sum((rank - middle) ** 2 for rank in ranks) for ranks in (first_ranks, second_ranks))
    return together / (spread * other_spread) ** 0.5 if spread and other_spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]
