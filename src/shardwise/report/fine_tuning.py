"""What a fine-tuning is about to do, and what it came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.planner.advice.method import WORDS, ChosenMethod
from shardwise.planner.candidate import strategy_words
from shardwise.report.page import Line, Page, Piece
from shardwise.spec.job import Job
from shardwise.spec.lengths import Lengths
from shardwise.spec.parameters import trained_parameters
from shardwise.spec.units import counted, readable_bytes, readable_count, readable_duration, readable_seconds

if TYPE_CHECKING:
    from shardwise.run.data.build import Built  # imports numpy


@dataclass(frozen=True)
class AnswerSample:
    """An answer to a prompt of the held-out part, before and after."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class ReadyFineTuning:
    """What is about to be trained: the data, the method and the plan."""

    built: Built
    lengths: Lengths
    choice: ChosenMethod
    job: Job
    prompt: tuple[int, ...]  # tokens
    notes: tuple[str, ...] = ()  # on the data: how full its sequences are, what of it is cut

    @property
    def total_seconds(self) -> float:
        return self.job.run.steps * self.choice.plan.best.step_seconds

    @property
    def trains(self) -> str:
        """The method in words."""
        return WORDS[self.choice.method]


def ready_page(ready: ReadyFineTuning) -> Page:
    """The data, the method with its reason, time and memory: shown before anything is trained."""
    return Page.of(_before(ready))


def _before(ready: ReadyFineTuning) -> Iterator[Piece | str]:
    best, job, built = ready.choice.plan.best, ready.job, ready.built
    packed = 1 - ready.lengths.packed_share(job.training.seq)
    share = f"{built.counted / max(1, built.tokens):.0%}" if built.counted < built.tokens else "all"
    yield Line(f"{ready.trains} of {job.model.name} on {job.cluster.devices:,} × {job.cluster.device.name}", "bold")
    read = f"{counted(built.documents, 'conversation')}, {counted(built.tokens, 'token')}, {share} of them answers"
    yield f"data:    {read}; sequences of {job.training.seq:,}, {packed:.0%} padding"
    yield f"method:  {ready.choice.sentence()}"
    yield f"layout:  {strategy_words(job.strategy)}"
    memory = f"{readable_bytes(best.memory.total)} of {readable_bytes(ready.choice.plan.request.room.usable_bytes)}"
    trained = readable_count(trained_parameters(job.model, job.training.tuning))
    yield f"memory:  {memory} per device; {trained} parameters are trained"
    steps = counted(job.run.steps, "step")
    yield (
        f"time:    {readable_duration(ready.total_seconds)}: {steps} of {readable_seconds(best.step_seconds)} "
        f"(evaluation and start come on top)"
    )
    yield f"folder:  {job.run.folder}"
    yield from (f"note:    {note}" for note in ready.notes)


def fine_tuning_page(trained: Sequence[Piece], written: Path | None, sample: AnswerSample | None) -> Page:
    """How it went, what was written, and a sample."""
    return Page.of(_after(trained, written, sample))


def _after(trained: Sequence[Piece], written: Path | None, sample: AnswerSample | None) -> Iterator[Piece | str]:
    yield from trained or ("Nothing was trained: the plan alone was asked for.",)
    if written is not None:
        yield f"Written: {written}"
    if sample is not None:
        yield Line("\nA prompt that was held out, and the answer before and after", "bold")
        yield Line(sample.prompt.rstrip("\n"), "dim")
        yield f"before: {sample.before.strip()}"
        yield f"after:  {sample.after.strip()}"


def fine_tuning_data(ready: ReadyFineTuning, written: Path | None, sample: AnswerSample | None) -> dict[str, Any]:
    """The plan, and what it left; plain data."""
    best = ready.choice.plan.best
    return {
        "method": ready.choice.method,
        "reason": ready.choice.sentence(),
        "conversations": ready.built.documents,
        "tokens": ready.built.tokens,
        "labels": ready.built.counted,
        "seq": ready.job.training.seq,
        "steps": ready.job.run.steps,
        "predicted_step_seconds": best.step_seconds,
        "predicted_seconds": ready.total_seconds,
        "memory_bytes": best.memory.total,
        "trained_parameters": trained_parameters(ready.job.model, ready.job.training.tuning),
        "folder": str(ready.job.run.folder),
        "written": None if written is None else str(written),
        "sample": None if sample is None else asdict(sample),
    }
