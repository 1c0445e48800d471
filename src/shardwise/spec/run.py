"""A run: how long a job trains, on what, and what it keeps, shows and survives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from shardwise.spec.codec import Spec, count, quantity, reference
from shardwise.spec.emulation import Emulation, emulation_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.strategy import Automatic


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Spec):
    """A checkpoint every ``steps`` steps, or ``seconds`` after the last one, whichever is given; and one at the end.

    The ``keep`` newest are kept, and those of steps that ``keep_every`` divides. ``asynchronous``: written while
    training continues. If the disk is full the last good one stays, and training will ``continue`` or ``stop``.
    ``folder`` is a path or a URI (``s3://bucket/run``) to keep them in, instead of the run's folder. Every ``memory``
    steps, if given, the state is also copied into the memory of two nodes, from where a restart takes it.
    """

    folder: str | None = None
    steps: int | None = count(None)
    memory: int | None = count(None)
    seconds: float | None = field(default=600.0, metadata={"dimension": "seconds", "above": 0})
    keep: int = count(2)
    keep_every: int | None = count(None)
    asynchronous: bool = True
    disk_full: Literal["continue", "stop"] = "continue"


MOST_SHARDS = 1024
CORPUS_VOCAB = 257  # the built-in corpus has bytes for tokens, and one that ends a document


@dataclass(frozen=True, kw_only=True)
class Data(Spec):
    """``shards`` name pairs of files without their suffix (`shardwise data build`); none: Python's own library.

    ``weights`` are the sampling weights of the shards (default: their tokens). Evaluation reads ``validation``, or the
    last ``held_out`` share of each shard's tokens, which training then never sees: whole documents, or a part of one
    where there are few. ``stage`` copies shards to memory or to a local disk first, if they are no larger than
    ``stage_limit`` in total. Of shards in a store (``s3://bucket/name``) each rank reads what it needs, and keeps the
    last ``cache`` of it in memory.
    """

    shards: tuple[str, ...] = ()
    weights: tuple[float, ...] = field(default=(), metadata={"above": 0})
    validation: tuple[str, ...] = ()
    held_out: float = field(default=0.02, metadata={"minimum": 0, "maximum": 0.5})
    workers: Literal["auto"] | int = count("auto", minimum=1, maximum=64)
    prefetch: Literal["auto"] | int = count("auto", minimum=1, maximum=1024)
    stage: Literal["none", "memory", "local-disk"] = "none"
    stage_limit: float = quantity("bytes", 16 * 2**30)
    cache: float = quantity("bytes", 2**28)

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
        """Raises SpecError if the built-in corpus has tokens outside the model's vocabulary."""
        if not self.shards and vocab < CORPUS_VOCAB:
            problem = f"the built-in corpus needs a vocabulary of {CORPUS_VOCAB}, the model has {vocab}"
            raise SpecError("shards", problem, "name shards that were built with the model's tokenizer")


Policy = Literal["skip", "roll-back", "stop"]


@dataclass(frozen=True, kw_only=True)
class NonFinite(Spec):
    """A step with non-finite gradients updates nothing. Then: continue (``skip``), load the newest checkpoint and
    leave that batch out (``roll-back``), or ``stop``. After ``in_a_row`` consecutive ones a run stops.

    In fp16 such steps are how the loss scale is found: there only ``in_a_row`` applies.
    """

    policy: Policy = "skip"
    in_a_row: int = count(10)


@dataclass(frozen=True, kw_only=True)
class Spikes(Spec):
    """A step whose loss is above ``factor`` times the median of the last ``window`` losses updates nothing either.

    Without a ``factor`` nothing is a spike. ``policy`` and ``in_a_row`` are as for non-finite steps.
    """

    factor: float | None = field(default=None, metadata={"minimum": 1})
    window: int = count(64, minimum=8, maximum=10_000)
    policy: Policy = "skip"
    in_a_row: int = count(10)


@dataclass(frozen=True, kw_only=True)
class StepWindow(Spec):
    """Steps of a run: ``first`` to ``last``, counted from 1, both included."""

    first: int = count()
    last: int = count()

    def check(self) -> None:
        if self.first > self.last:
            problem = f"step {self.first} is after step {self.last}"
            raise SpecError("last", problem, "name a few steps in the middle of the run, such as 10 to 12")

    def has(self, step: int) -> bool:
        return self.first <= step <= self.last

    @classmethod
    def parse(cls, text: str, field: str) -> Self:
        """From ``steps=10:12``, or ``steps=10``."""
        found = re.fullmatch(r"steps=(\d{1,9})(?::(\d{1,9}))?", text.strip())
        if found is None:
            raise SpecError(field, f"{shown(text)} names no steps", "write it like steps=10:12")
        try:
            return cls(first=int(found[1]), last=int(found[2] or found[1]))
        except SpecError as error:
            raise SpecError(field, error.problem, error.remedy) from None


MOST_STEPS = 100  # records are kept in memory until the last of these steps


@dataclass(frozen=True, kw_only=True)
class Profile(StepWindow):
    """The steps of a run that are profiled."""

    def check(self) -> None:
        if not self.first <= self.last < self.first + MOST_STEPS:
            problem = f"from step {self.first} to {self.last} are not 1 to {MOST_STEPS} steps"
            raise SpecError("last", problem, "name a few steps in the middle of the run, such as 10 to 12")


@dataclass(frozen=True, kw_only=True)
class Timeouts(Spec):
    """Seconds after which a run counts as stuck: for the start of all ranks, a step, a checkpoint or evaluation."""

    start: float = quantity("seconds", 300)
    step: float = quantity("seconds", 100)
    checkpoint: float = quantity("seconds", 600)


@dataclass(frozen=True, kw_only=True)
class Restarts(Spec):
    """At most ``most`` restarts are tried without a new checkpoint between them; a number alone means that.

    ``shrink``: the run goes on without a node, host or device that does not come back, if at least ``least_devices``
    are left, in a layout of the planner's, and with it when it is there again. Lost nodes and hosts are waited for at
    most ``wait``. A device whose rank has failed too often is tried again after ``retry``.
    """

    most: int = count(3, minimum=0)
    shrink: bool = False
    least_devices: int = count(1)
    wait: float = quantity("seconds", 60, minimum=0)
    retry: float = quantity("seconds", 600)


def restarts_from(value: Any) -> Restarts:
    """From a mapping, or from the number of restarts."""
    if isinstance(value, Mapping):
        return Restarts.from_dict(value)
    try:
        return Restarts(most=value)
    except SpecError as error:
        raise SpecError("", error.problem, error.remedy) from None


def _shortest(restarts: Restarts) -> Any:
    return restarts.most if restarts == Restarts(most=restarts.most) else restarts.to_dict()


@dataclass(frozen=True, kw_only=True)
class RecutPolicy(Spec):
    """Of every ``every`` steps the last ``steps`` are recorded; if the same rank is slow in each, the stages of the
    pipeline are cut anew by the measured speeds, where a step is expected to be shorter by ``gain`` at least.
    """

    every: int = count(500, minimum=10)
    steps: int = count(5, maximum=MOST_STEPS)
    gain: float = field(default=0.05, metadata={"minimum": 0, "maximum": 1})

    def check(self) -> None:
        if self.steps >= self.every:
            raise SpecError("steps", f"{self.steps} of {self.every}", "record fewer, or raise every")


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Spec):
    """``warmup`` steps up from zero, then down to ``final`` times the peak rate at the last step.

    ``cosine`` (arXiv 1608.03983) and ``linear`` fall all the way; ``wsd`` (warm-up, stable, decay: arXiv 2404.06395)
    is constant until the last ``decay`` of the run and then falls linearly; ``constant`` stays. ``reference_batch``,
    in sequences, is the batch that the rate was tuned for: for another batch it scales with the square root of the
    ratio for Adam (arXiv 2006.09092), with the ratio itself for SGD (arXiv 1706.02677).
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = count(0, minimum=0)
    final: float = field(default=0.1, metadata={"minimum": 0, "maximum": 1})
    decay: float = field(default=0.1, metadata={"above": 0, "maximum": 1})
    reference_batch: int | None = count(None)

    def share(self, step: int, steps: int) -> float:
        """The rate of update number ``step`` (from 0), as a share of the peak, in a run of ``steps``."""
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
        """The factor on the peak rate for a batch of ``sequences``."""
        if self.reference_batch is None:
            return 1.0
        ratio = sequences / self.reference_batch
        return ratio if optimizer.startswith("sgd") else math.sqrt(ratio)


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
    project, Weights & Biases. On CPUs every ``memory`` steps one is run with its tensors counted, which is slow; GPUs
    count by themselves. ``metrics_port`` serves the run's state to Prometheus on loopback; 0 takes a free port.
    ``metrics_hosts`` are other names under which a scraper reaches it, through a proxy or a forwarded port.
    """

    interval: int = count(1)
    memory: int = count(500)
    tensorboard: bool = True
    wandb: str | None = None
    metrics_port: int | None = count(None, minimum=0, maximum=65535)
    metrics_hosts: tuple[str, ...] = ()

    def check(self) -> None:
        for number, host in enumerate(self.metrics_hosts):
            if not re.fullmatch(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", host):
                problem = f"{shown(host)} is not a host"
                raise SpecError(f"metrics_hosts[{number}]", problem, "write a name or an address, without a port")


@dataclass(frozen=True, kw_only=True)
class Run(Spec):
    """``folder`` holds everything the run writes: started again with the same folder, it resumes.

    ``automatic`` names what was `auto` in the job's strategy: the planner decides it before the run; the optimizer's
    offload is adjusted to the memory measured during it. ``start_from`` is a Hugging Face folder, a checkpoint or
    another run's folder whose weights are loaded at step 0. ``profile`` names steps whose phases and collectives are
    recorded on all ranks, for `shardwise compare`; ``recut`` records some by itself, and acts on them. ``nvtx`` names
    steps that mark them as NVTX ranges of a GPU's tools, such as nsys. The run stops at
    step ``stop_at``, if given, and can be resumed. ``seed`` is that of weights and data. ``emulate`` puts the ranks on
    virtual nodes of this machine, like "2x2,1Gbit,1ms". ``memory_risk`` is the probability of running out of device
    memory that whoever chooses a strategy accepts: one start in twenty. ``backend`` is what CPU ranks communicate by:
    gloo, or the MPI that started them. ``reorder``: the nodes of a wiring get their ranks in the order in which a step
    is predicted to be the fastest, not in the order of the hosts.
    """

    steps: int = count(1000)
    stop_at: int | None = count(None)
    folder: str | None = None
    seed: int = count(0, minimum=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "mpi"] = "auto"
    data: Data = Data()
    schedule: LearningRateSchedule = LearningRateSchedule()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    non_finite: NonFinite = NonFinite()
    spikes: Spikes = Spikes()
    timeouts: Timeouts = Timeouts()
    restarts: Restarts = reference(restarts_from, _shortest, default=Restarts())
    logging: Logging = Logging()
    profile: Profile | None = None
    nvtx: StepWindow | None = None
    recut: RecutPolicy | None = None
    start_from: str | None = None
    automatic: tuple[Automatic, ...] = ()
    emulate: Emulation | None = reference(emulation_from, str, default=None)
    reorder: bool = True
    memory_risk: float = field(default=0.05, metadata={"above": 0, "maximum": 0.5})

    def check(self) -> None:
        if self.schedule.warmup >= self.steps:
            problem = f"{self.schedule.warmup} steps in a run of {self.steps}"
            raise SpecError("schedule.warmup", problem, "use fewer")
        for name, window in (("profile", self.profile), ("nvtx", self.nvtx)):
            if window is not None and window.last > self.steps:
                raise SpecError(name, f"step {window.last} is after the last, {self.steps}", "name earlier ones")
        if self.recut is not None and self.profile is not None:
            raise SpecError("recut", "records steps by itself, run.profile others", "leave one of them out")
        if self.nvtx is not None and (self.profile is not None or self.recut is not None):
            other = "run.recut" if self.profile is None else "run.profile"
            problem = f"a process has one profiler, and {other} needs PyTorch's"  # CUPTI has one subscriber as well
            raise SpecError("nvtx", problem, "leave one of them out")
        if self.evaluation.batches and not self.data.validation and not self.data.held_out:
            remedy = "name run.data.validation, hold out some (run.data.held_out: 2%), or evaluation.batches: 0"
            raise SpecError("evaluation", "there is no held-out data", remedy)

    @property
    def last_step(self) -> int:
        """The last step before the run ends or stops."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)

    @property
    def evaluation_interval(self) -> int:
        """Steps between two evaluations."""
        interval = self.evaluation.interval
        return max(1, self.steps // 10) if interval == "auto" else interval

    @property
    def rolls_back(self) -> bool:
        """Whether any policy needs a checkpoint to go back to."""
        spikes = self.spikes.factor is not None and self.spikes.policy == "roll-back"
        return spikes or self.non_finite.policy == "roll-back"
