"""The changes of a file's own settings that help a job most: each is made, read again and priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.cost.analysis import analyze
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import Fit, fit_of
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.verdict import WORTH_A_CHANGE
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

MOST = 3
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class PricedJob:
    """What decides between two jobs."""

    job: Job

    @cached_property
    def fit(self) -> Fit:
        return fit_of(self.job)

    @cached_property
    def memory_bytes(self) -> float:
        return peak_memory(self.job).total

    @cached_property
    def step_seconds(self) -> float:
        return analyze(self.job).predicted_seconds

    @cached_property
    def seconds_per_token(self) -> float:
        """Quicker than the whole step's parts, for the many that are only compared."""
        return predict(self.job).step_seconds / self.job.tokens_per_step


@dataclass(frozen=True)
class FileChange:
    """One change, on top of those before it: settings of the file (None: removed), and the job before and after."""

    settings: Settings
    before: PricedJob
    after: PricedJob

    @property
    def step_change(self) -> float:
        """The time of a step that is added, as a share."""
        return self.after.step_seconds / self.before.step_seconds - 1

    def to_dict(self) -> dict[str, Any]:
        after = self.after
        return {"settings": dict(self.settings), "fit": after.fit, "memory_bytes": after.memory_bytes,
                "predicted_seconds": after.step_seconds}  # fmt: skip


@dataclass(frozen=True)
class FileAdvice:
    """A file, the changes that help most, and its text with them."""

    file: str
    changes: tuple[FileChange, ...]
    text: str


def file_changes(
    job: Job, candidates: Callable[[Job], Iterable[Settings]], changed: Callable[[list[Settings]], Job | None]
) -> list[FileChange]:
    """At most `MOST`, the best first. ``changed`` reads the file with settings; None where that makes no such job."""
    chosen: list[FileChange] = []
    current = PricedJob(job)
    while len(chosen) < MOST:
        done = [change.settings for change in chosen]
        touched = {key for settings in done for key in settings}
        tried = [settings for settings in candidates(current.job) if not touched & settings.keys()]
        made = ((settings, changed([*done, settings])) for settings in tried)
        alike = [(settings, PricedJob(after)) for settings, after in made if after and _same_training(job, after)]
        better = [(score, number) for number, (_, after) in enumerate(alike) if (score := _score(current, after))]
        if not better:
            break
        settings, after = alike[min(better)[1]]
        chosen.append(FileChange(settings, current, after))
        current = after
    return chosen


_WORSE: tuple[Fit, ...] = ("fits", "tight", "does not fit")


def _score(before: PricedJob, after: PricedJob) -> tuple[int, float] | None:
    """Lower is better; None for a change that does not help: first a job must fit, then be fast."""
    try:
        fit, short = _WORSE.index(after.fit), _WORSE.index("does not fit")
        saves = after.memory_bytes < (1 - WORTH_A_CHANGE) * before.memory_bytes
        faster = after.seconds_per_token < (1 - WORTH_A_CHANGE) * before.seconds_per_token
        if before.fit == "does not fit":
            return (fit, after.seconds_per_token) if fit < short else (fit, after.memory_bytes) if saves else None
        return (0, after.seconds_per_token) if faster and fit <= _WORSE.index(before.fit) else None
    except SpecError:  # a group would cut across the network
        return None


def _same_training(before: Job, after: Job) -> bool:
    """Whether two jobs learn the same from the same batch: other formats are advised only where numbers stay as good.

    The frozen base of adapters may have fewer bits, and fp32 become bf16 with fp32 weights (Micikevicius et al. 2018).
    """
    one, other = before.training, after.training
    same = (before.model, before.cluster, before.sequences, one.seq, one.task, one.adapters, one.trained)
    if same != (after.model, after.cluster, after.sequences, other.seq, other.task, other.adapters, other.trained):
        return False
    if one.precision != other.precision and (one.precision, other.recipe.compute) != ("fp32", "bf16"):
        return False
    # Frameworks that shard keep moments in fp32 beside, which is no worse.
    return one.optimizer in (other.optimizer, f"{other.optimizer}-bf16-moments") or one.precision == "fp32"
