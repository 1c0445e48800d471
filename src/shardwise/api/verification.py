"""`verify`: a layout against the single process, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Unpack

from shardwise.api.given import JobKeywords, JobSource, job_arguments
from shardwise.api.inputs import decided_job
from shardwise.api.results import Figure, Result, Rows
from shardwise.launch.pool import told_in_one_line
from shardwise.report.measured import verification_page
from shardwise.report.page import Page
from shardwise.run.environment import started
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import require_packages
from shardwise.spec.job import Job
from shardwise.spec.units import parse

if TYPE_CHECKING:
    from shardwise.measure.verify import Verification

STEPS, PROCESSES, TOLERANCE = 3, 8, 1e-5
LARGEST_SEED = 10**12  # seeds of data are up to a million times as large, and have to fit in 64 bits


@dataclass(frozen=True)
class VerificationResult(Result):
    """How far a layout deviates from a single process."""

    verb = "verify"
    asked: Job
    """The job as given."""
    found: Verification
    """``found.job`` is the job that ran."""

    ok = Figure[bool]("found.ok", "Whether the layout computes what one process computes.")

    @property
    def worst(self) -> dict[str, float]:
        """The largest relative deviation of the loss, the gradients, and the weights at the end."""
        return {kind: deviation.value for kind, deviation in self.found.worst.items()}

    @cached_property
    def page(self) -> Page:
        return verification_page(self.asked, self.found)

    def _data(self) -> dict[str, Any]:
        where: dict[str, Any] = {"worst": self.worst, "where": self.found.where}
        if self.found.in_fp8:
            where["in_fp8"] = {kind: deviation.value for kind, deviation in self.found.in_fp8.items()}
        return {"ok": self.ok, "steps": self.found.steps, **where}

    def tables(self) -> Mapping[str, Rows]:
        worst = self.found.worst.items()
        return {
            "worst": [
                {"what": kind, "deviation": deviation.value, "where": deviation.where} for kind, deviation in worst
            ]
        }


def verify(
    job: JobSource | None = None,
    *,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    max_processes: int = PROCESSES,
    shrink: bool = False,
    run_device: Literal["cpu", "cuda"] = "cpu",
    seed: int = 0,
    watch: Callable[[str, Callable[[], int]], None] | None = None,
    **keywords: Unpack[JobKeywords],
) -> VerificationResult:
    """Runs a layout and the single process side by side in fp32: loss, every gradient, every weight after ``steps``.

    A layout of more than ``max_processes`` ranks is reduced to the smallest of its kind; ``shrink`` takes fewer layers
    and smaller widths. Under torchrun, srun or mpirun every rank calls it, and the layout runs on these ranks.
    ``watch`` is called with each phase and a function that returns how many of its steps are done.
    """
    for flag, value in (("⟨steps⟩", steps), ("⟨max_processes⟩", max_processes)):
        if parse(value, "count", flag) < 1:
            raise SpecError(flag, f"{value}", "use 1 or more")
    if not parse(tolerance, "count", "⟨tolerance⟩") >= 0:
        raise SpecError("⟨tolerance⟩", f"{tolerance:g} is not a deviation", "use 0 or more, such as 1e-5")
    if abs(parse(seed, "count", "⟨seed⟩")) > LARGEST_SEED:
        raise SpecError("⟨seed⟩", f"{seed} is out of range", f"use a number up to {LARGEST_SEED:,}")
    if isinstance(job, Job) and not keywords:
        asked = job
    else:
        asked, _ = decided_job(job_arguments(job, keywords), runs_here=True)
    require_packages("verify", "torch")

    from shardwise.measure import verify as measured
    from shardwise.measure.reference import on_fewer_ranks, with_small_model

    here = started()
    run = on_fewer_ranks(asked, max_processes if here is None else here.world)
    if shrink:
        run = with_small_model(run)
    if here is not None:
        as_rank = measured.verify_as_rank(run, here, steps=steps, seed=seed, tolerance=tolerance, device=run_device)
        return VerificationResult(asked, as_rank)
    quiet = watch or (lambda phase, done: None)
    with told_in_one_line():
        verification = measured.verify(run, steps=steps, seed=seed, tolerance=tolerance, device=run_device, watch=quiet)
    return VerificationResult(asked, verification)
