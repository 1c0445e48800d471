"""A run: how long a job trains, on what, and what it keeps, shows and survives."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from shardwise.spec.codec import Spec, count, quantity, reference
from shardwise.spec.emulation import Emulation, emulation_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.strategy import Automatic

# -- When a run saves what it has learnt, and how much of that it keeps ------------------------------


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Spec):
    """One every ``steps`` steps, one when ``seconds`` have passed since the last, whichever is given; one at the end.

    The ``keep`` newest stay, and those of steps that ``keep_every`` divides. ``asynchronous``: written while training
    continues. A disk that is full leaves the last good one; then training will ``continue`` or ``stop``.
    """

    steps: int | None = count(None)
    seconds: float | None = field(default=600.0, metadata={"dimension": "seconds", "above": 0})
    keep: int = count(2)
    keep_every: int | None = count(None)
    asynchronous: bool = True
    disk_full: Literal["continue", "stop"] = "continue"


# -- What a run reads: token shards by weight, or the corpus that is on every machine ----------------

MOST_SHARDS = 1024
CORPUS_VOCAB = 257  # the built-in corpus has bytes for tokens, and one that ends a document


@dataclass(frozen=True, kw_only=True)
class Data(Spec):
    """``shards`` name pairs of files without their suffix (`shardwise data build`); none: Python's own library.

    ``weights`` say how often each is drawn from (their tokens, unless given). Evaluation reads ``validation``, or the
    share ``held_out`` of the tokens, the last ones of each, which training never sees then: whole documents, or a part
    of one where there are few. ``stage`` copies shards to memory or to a local disk first, if they are no larger than
    ``stage_limit`` together.
    """

    shards: tuple[str, ...] = ()
    weights: tuple[float, ...] = field(default=(), metadata={"above": 0})
    validation: tuple[str, ...] = ()
    held_out: float = field(default=0.02, metadata={"minimum": 0, "maximum": 0.5})
    workers: Literal["auto"] | int = count("auto", minimum=1, maximum=64)
    prefetch: Literal["auto"] | int = count("auto", minimum=1, maximum=1024)
    stage: Literal["none", "memory", "local-disk"] = "none"
    stage_limit: float = quantity("bytes", 16 * 2**30)

    def check(self) -> None:
        if self.weights and len(self.weights) != len(self.shards):
            problem = f"{len(self.weights)} weights for {len(self.shards)} shards"
            raise SpecError("weights", problem, "give one for each, or none")
        for name in ("shards", "validation"):
            if len(getattr(self, name)) > MOST_SHARDS:
                problem = f"names {len(getattr(self, name)):,} pairs, a run reads {MOST_SHARDS:,} at most"
                raise SpecError(name, problem, "build larger ones: data build takes many files")
        for number, path in enumerate(self.shards):
            if path.endswith((".bin", ".idx")):
                raise SpecError(f"shards[{number}]", f"{shown(path)} has a suffix", f"write {shown(path[:-4])}")

    def check_vocabulary(self, vocab: int) -> None:
        """Raises SpecError if the built-in corpus has tokens that a model does not know."""
        if not self.shards and vocab < CORPUS_VOCAB:
            problem = f"the built-in corpus needs a vocabulary of {CORPUS_VOCAB}, the model has {vocab}"
            raise SpecError("shards", problem, "name shards that were built with the model's tokenizer")


# -- What a run does about steps that went wrong; all ranks see them before a weight moves -----------

Policy = Literal["skip", "roll-back", "stop"]


@dataclass(frozen=True, kw_only=True)
class NonFinite(Spec):
    """A step with non-finite gradients updates nothing. Then: continue (``skip``), load the newest checkpoint and
    leave that batch out (``roll-back``), or ``stop``. After ``in_a_row`` of them one after the other a run stops.

    In fp16 such steps are how the scale of the loss is found: there only ``in_a_row`` applies.
    """

    policy: Policy = "skip"
    in_a_row: int = count(10)


@dataclass(frozen=True, kw_only=True)
class Spikes(Spec):
    """A step whose loss is above ``factor`` times the median of the last ``window`` ones moves no weight either.

    Without a ``factor`` nothing is a spike. ``policy`` and ``in_a_row`` as for steps that are not finite.
    """

    factor: float | None = field(default=None, metadata={"minimum": 1})
    window: int = count(64, minimum=8, maximum=10_000)
    policy: Policy = "skip"
    in_a_row: int = count(10)


# -- Which steps of a run are looked at closely ------------------------------------------------------

MOST_STEPS = 100  # what is recorded of a step is kept in memory until the last of them


@dataclass(frozen=True, kw_only=True)
class Profile(Spec):
    """Steps ``first`` to ``last`` of a run, counted from 1, both included."""

    first: int = count()
    last: int = count()

    def check(self) -> None:
        if not self.first <= self.last < self.first + MOST_STEPS:
            problem = f"from step {self.first} to {self.last} are not 1 to {MOST_STEPS} steps"
            raise SpecError("last", problem, "name a few steps in the middle of the run, such as 10 to 12")

    @classmethod
    def parse(cls, text: str, field: str) -> Profile:
        """From ``steps=10:12``, or ``steps=10``."""
        found = re.fullmatch(r"steps=(\d{1,9})(?::(\d{1,9}))?", text.strip())
        if found is None:
            raise SpecError(field, f"{shown(text)} names no steps", "write it like steps=10:12")
        try:
            return cls(first=int(found[1]), last=int(found[2] or found[1]))
        except SpecError as error:
            raise SpecError(field, error.problem, error.remedy) from None


# -- How long a run may take for what should not take long, before it is called stuck ----------------


@dataclass(frozen=True, kw_only=True)
class Timeouts(Spec):
    """Seconds until all ranks have begun, for one step, and for one checkpoint or evaluation."""

    start: float = quantity("seconds", 300)
    step: float = quantity("seconds", 100)
    checkpoint: float = quantity("seconds", 600)


# -- How the learning rate goes through a run: up, along, and down -----------------------------------


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Spec):
    """``warmup`` steps up from zero, then down to the share ``final`` of the highest rate at the last of ``steps``.

    ``cosine`` (arXiv 1608.03983) and ``linear`` fall all the way; ``wsd`` (warm-up, stable, decay: arXiv 2404.06395)
    stays until the last share ``decay`` of the run and falls linearly then; ``constant`` stays. ``reference_batch``,
    a number of sequences, makes the rate that of another batch: it grows with its square root for Adam (arXiv
    2006.09092), with the batch itself for SGD (arXiv 1706.02677).
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = count(0, minimum=0)
    final: float = field(default=0.1, metadata={"minimum": 0, "maximum": 1})
    decay: float = field(default=0.1, metadata={"above": 0, "maximum": 1})
    reference_batch: int | None = count(None)

    def check_against(self, steps: int) -> None:
        """Raises SpecError if the run ends before the rate is up."""
        if self.warmup >= steps:
            raise SpecError("warmup", f"{self.warmup} steps in a run of {steps}", "use fewer")

    def share(self, step: int, steps: int) -> float:
        """The rate in the update after ``step`` others, as a share of the highest, in a run of ``steps``."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        begin = self.warmup if self.kind != "wsd" else max(self.warmup, steps - math.ceil(self.decay * steps))
        if step < begin:
            return 1.0
        # The last update, step - 1, has the final rate; a run that continues beyond it keeps that.
        done = min(1.0, (step - begin + 1) / max(1, steps - begin))
        fallen = (1 - math.cos(math.pi * done)) / 2 if self.kind == "cosine" else done
        return 1 - (1 - self.final) * fallen

    def batch_factor(self, sequences: int, optimizer: str) -> float:
        """What a batch of ``sequences`` multiplies the highest rate by."""
        if self.reference_batch is None:
            return 1.0
        ratio = sequences / self.reference_batch
        return ratio if optimizer.startswith("sgd") else math.sqrt(ratio)


# -- the run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evaluation(Spec):
    """The loss of ``batches`` global batches of held-out data at the start, every ``interval`` steps, and at the end.

    ``auto`` is a tenth of the run; 0 batches: never.
    """

    interval: Literal["auto"] | int = count("auto")
    batches: int = count(4, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Logging(Spec):
    """Every ``interval`` steps a line in metrics.jsonl, TensorBoard (where it is installed) and, if ``wandb`` names a
    project, Weights & Biases. On CPUs ``memory`` is the number of steps between two that are run with their tensors
    counted, which is slow; GPUs count by themselves.
    """

    interval: int = count(1)
    memory: int = count(500)
    tensorboard: bool = True
    wandb: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run(Spec):
    """``folder`` keeps everything of the run: started again with the same one, it resumes where it was.

    ``automatic`` names what was `auto` in the job's strategy: the planner decides it before the run, and of the
    optimizer's offload what memory is measured during it. ``start_from`` is a Hugging Face folder, a checkpoint or
    another run's folder whose weights are taken at step 0.
    ``profile`` names steps whose every phase and collective is recorded on all ranks, for `shardwise compare`.
    It pauses at ``stop_at``, if given, as if somebody had stopped it. ``seed`` is that of weights and data. After a
    failure ``restarts`` in a row are tried without a new checkpoint. ``emulate`` puts the ranks on virtual nodes of
    this machine, like "2x2,1Gbit,1ms".
    """

    steps: int = count(1000)
    stop_at: int | None = count(None)
    folder: str | None = None
    seed: int = count(0, minimum=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: Data = Data()
    schedule: LearningRateSchedule = LearningRateSchedule()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    non_finite: NonFinite = NonFinite()
    spikes: Spikes = Spikes()
    timeouts: Timeouts = Timeouts()
    restarts: int = count(3, minimum=0)
    logging: Logging = Logging()
    profile: Profile | None = None
    start_from: str | None = None
    automatic: tuple[Automatic, ...] = ()
    emulate: Emulation | None = reference(emulation_from, str, default=None)

    def check(self) -> None:
        try:
            self.schedule.check_against(self.steps)
        except SpecError as error:
            raise error.under("schedule") from None
        if self.profile is not None and self.profile.last > self.steps:
            raise SpecError("profile", f"step {self.profile.last} is after the last, {self.steps}", "name earlier ones")
        if self.evaluation.batches and not self.data.validation and not self.data.held_out:
            remedy = "name run.data.validation, hold out some (run.data.held_out: 2%), or evaluation.batches: 0"
            raise SpecError("evaluation", "there is no held-out data", remedy)

    @property
    def last_step(self) -> int:
        """The step at which the run ends for now."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)

    @property
    def evaluation_interval(self) -> int:
        """Steps between two evaluations."""
        asked = self.evaluation.interval
        return max(1, self.steps // 10) if asked == "auto" else asked

    @property
    def rolls_back(self) -> bool:
        """Whether any policy needs a checkpoint to go back to."""
        spikes = self.spikes.factor is not None and self.spikes.policy == "roll-back"
        return spikes or self.non_finite.policy == "roll-back"
