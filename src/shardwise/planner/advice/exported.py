"""The price of a job here, and of its export as the framework runs it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.memory.room import fit_of
from shardwise.interop.frameworks import as_run_by, lacking, target
from shardwise.interop.frameworks.job_fields import effective_fields
from shardwise.planner.candidate import Candidate, candidate
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job


@dataclass(frozen=True)
class PricedExport:
    """A job as priced here, and as a framework runs its export."""

    here: Candidate
    there: Candidate | None  # none if what the framework would run is not a valid job
    differs: tuple[str, ...] = ()  # what the framework does differently, in a few words

    @property
    def changed(self) -> bool:
        """Whether step time or memory differ by more than 0.1%."""
        if self.there is None:
            return True
        pairs = ((self.here.step_seconds, self.there.step_seconds), (self.here.memory.total, self.there.memory.total))
        return any(abs(after / before - 1) > 1e-3 for before, after in pairs)

    @property
    def no_longer_fits(self) -> bool:
        short = "does not fit"
        return self.there is not None and fit_of(self.here.job) != short and fit_of(self.there.job) == short


def priced_export(job: Job, name: str) -> PricedExport:
    """Prices a job and its export to the framework ``name``."""
    here, framework = candidate(job), target(name)
    try:
        run = as_run_by(job, framework)
    except SpecError:
        return PricedExport(here, None)
    there = here if run is job else candidate(run)
    ways = [] if run.stack == job.stack else [f"the stack {run.stack.name}"]
    lost = {lost.short_field for lost in lacking(job, name)}
    return PricedExport(here, there, (*ways, *differences(job, run), *(f"without {field}" for field in sorted(lost))))


def differences(job: Job, run: Job) -> tuple[str, ...]:
    """What a framework does differently from ``job`` that affects the price, in a few words."""
    before, after = effective_fields(job), effective_fields(run)
    words: list[str] = []
    if before["training.precision"] != after["training.precision"]:
        bits = {2: "16-bit gradients", 4: "fp32 gradients"}
        words.append(bits.get(int(run.training.recipe.gradient), run.training.precision))
    for dimension in ("dp", "tp", "cp", "pp", "ep", "offload"):
        path = f"strategy.overlap.{dimension}"
        if path in before and path in after and before[path] != after[path]:
            words.append(f"{'' if after[path] else 'no '}overlap of {dimension}")
    if "strategy.stage_layers" in after and before.get("strategy.stage_layers") != after["strategy.stage_layers"]:
        words.append("stages of its own")
    if before["training.attention"] != after["training.attention"]:
        words.append(f"{run.training.attention} attention")
    return tuple(words)
