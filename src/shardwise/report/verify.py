"""A verification as a page, and its progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from shardwise.planner.candidate import strategy_words
from shardwise.report.console import table
from shardwise.report.page import Piece, paged
from shardwise.spec.job import Job
from shardwise.spec.units import counted

if TYPE_CHECKING:
    from shardwise.measure.verify import Verification

_WORDS = {"loss": "loss", "gradient": "gradients", "weight": "weights at the end", "gradient_norm": "gradient norm"}


@paged
def verification_page(asked: Job, verification: Verification) -> Iterator[Piece | str]:
    """How the job that ran differs from the one asked for, then a table of the worst deviations."""
    run = verification.job
    if run.strategy.world != asked.strategy.world:
        yield f"{asked.strategy.world} ranks are reduced to {run.strategy.world}: {_degrees(run)}, the same order."
    if run.model != asked.model:
        yield (f"{asked.model.name} is shrunk to {counted(run.model.layers, 'layer')} of {run.model.hidden} features.")
    if asked.training.precision != run.training.precision and not verification.in_fp8:
        yield f"Precision is {run.training.precision}: {asked.training.precision} would hide differences."
    words = strategy_words(run.strategy)
    title = f"{run.model.name}, {words}, against one process, {counted(verification.steps, 'step')}"
    rows = [
        (
            _WORDS[kind],
            f"{deviation.value:.1e}",
            "equal" if deviation.value <= verification.tolerance else "DIFFERS",
            deviation.where,
        )
        for kind, deviation in verification.worst.items()
    ]
    yield table(title, ("", "worst deviation", "", "where"), rows, numbers_from=9)
    if verification.in_fp8:
        yield _narrow(asked, verification)
    verdict = (
        "The layout computes what one process computes" if verification.ok else "The layout computes a different result"
    )
    yield (
        f"{verdict}: tolerance {verification.tolerance:g}, relative to the largest element of each tensor, "
        "or one rounding of the largest in its layer."
    )


def _narrow(asked: Job, verification: Verification) -> Piece:
    from shardwise.measure.verify import FP8_BOUNDS

    title = f"the same layout in {asked.training.precision}, against one process in fp32"
    rows = [
        (
            _WORDS[kind],
            f"{deviation.value:.1e}",
            f"{FP8_BOUNDS[kind]:g}",
            "within" if deviation.value <= FP8_BOUNDS[kind] else "OFF",
            deviation.where,
        )
        for kind, deviation in verification.in_fp8.items()
    ]
    return table(title, ("", "deviation", "bound", "", "where"), rows, numbers_from=9)


@contextmanager
def verification_progress(steps: int, shown: bool) -> Iterator[Callable[[str, Callable[[], int]], None]]:
    """Progress bars on standard error, if it is a terminal; removed when the processes are done."""
    if not (shown and sys.stderr.isatty()):
        yield lambda phase, done: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with _Counting(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:

        def watch(phase: str, done: Callable[[], int]) -> None:
            bars.counts[bars.add_task(phase, total=steps, count="starting")] = done

        yield watch


class _Counting(Progress):
    """Progress bars that ask every phase for its count whenever they are drawn."""

    def __init__(self, *columns: ProgressColumn, **settings: Any) -> None:
        self.counts: dict[TaskID, Callable[[], int]] = {}
        super().__init__(*columns, **settings)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task, count in list(self.counts.items()):
            done = count()
            if done:
                self.update(task, completed=done, count=f"{done} of {self.tasks[task].total:g} steps")
        yield from super().get_renderables()


def _degrees(job: Job) -> str:
    degrees = {name: job.strategy.degree(name) for name in job.strategy.order} | {"ep": job.strategy.ep}
    used = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return " × ".join(used) or "one rank"
