"""A run: how long a job trains, on what, and what it keeps, shows and survives."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from shardwise.spec.codec import Spec, count, quantity, reference, setting
from shardwise.spec.emulation import Emulation, emulation_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.strategy import Automatic


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Spec):
    """When checkpoints are written, where, and which are kept. A run always writes one at its end."""

    folder: str | None = None
    """Path or URI (`s3://bucket/run`) to keep them in, instead of the run's folder."""
    steps: int | None = count(None)
    """Steps between two checkpoints."""
    memory: int | None = count(None)
    """Steps between two copies of the state into the memory of two nodes, from where a restart takes it."""
    seconds: float | None = setting(600.0, dimension="seconds", above=0)
    """Seconds between two checkpoints; with `steps` too, whichever comes first."""
    keep: int = count(2)
    """How many of the newest are kept."""
    keep_every: int | None = count(None)
    """Checkpoints of multiples of this step are kept for good."""
    asynchronous: bool = True
    """Written while training continues."""
    disk_full: Literal["continue", "stop"] = "continue"
    """What the run does if the disk is full; the last good checkpoint stays either way."""


MOST_SHARDS = 1024
CORPUS_VOCAB = 257  # the built-in corpus has bytes for tokens, and one that ends a document


@dataclass(frozen=True, kw_only=True)
class Data(Spec):
    """What a run trains and evaluates on."""

    shards: tuple[str, ...] = ()
    """Pairs of files (`shardwise data build`), named without their suffix. None: the source of Python's own library."""
    weights: tuple[float, ...] = setting((), above=0)
    """Sampling weight of each shard; by default its number of tokens."""
    validation: tuple[str, ...] = ()
    """Shards to evaluate on."""
    held_out: float = setting(0.02, minimum=0, maximum=0.5)
    """Without `validation`: the share of each shard's tokens, at its end, that is evaluated on and never trained on.
    Whole documents, or part of one where there are few."""
    packing: Literal["auto", "packed", "stream"] = "auto"
    """How documents become sequences: whole ones `packed` into few, or a `stream` of all cut anywhere; `auto` packs
    where the loss counts only some tokens, and for `training.task` sft."""
    workers: Literal["auto"] | int = count("auto", minimum=1, maximum=64)
    """Threads that prepare batches."""
    prefetch: Literal["auto"] | int = count("auto", minimum=1, maximum=1024)
    """Steps whose batches are prepared ahead."""
    stage: Literal["none", "memory", "local-disk"] = "none"
    """Where shards are copied to before the run."""
    stage_limit: float = quantity("bytes", 16 * 2**30)
    """Shards larger than this in total are not copied."""
    cache: float = quantity("bytes", 2**28)
    """Of shards in a store (`s3://bucket/name`) a rank reads only what it needs, and keeps this much of it in
    memory."""

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
    """What follows a step with non-finite gradients, which updates nothing. In fp16 such steps are how the loss scale
    is found: there only `in_a_row` applies."""

    policy: Policy = "skip"
    """Continue, load the newest checkpoint and leave that batch out, or stop."""
    in_a_row: int = count(10)
    """So many consecutive steps stop the run."""


@dataclass(frozen=True, kw_only=True)
class Spikes(Spec):
    """What follows a step whose loss is a spike, which updates nothing either."""

    factor: float | None = setting(None, minimum=1)
    """A loss above this many times the median of the last ones is a spike. None: nothing is."""
    window: int = count(64, minimum=8, maximum=10_000)
    """Number of losses that the median is taken of."""
    policy: Policy = "skip"
    """As for non-finite steps."""
    in_a_row: int = count(10)
    """As for non-finite steps."""


@dataclass(frozen=True, kw_only=True)
class StepWindow(Spec):
    """Some steps of a run, counted from 1."""

    first: int = count()
    """First step."""
    last: int = count()
    """Last step, included."""

    def check(self) -> None:
        if self.first > self.last:
            problem = f"step {self.first} is after step {self.last}"
            raise SpecError("last", problem, "name a few steps in the middle of the run, such as 10 to 12")

    def has(self, step: int) -> bool:
        return self.first <= step <= self.last

    @classmethod
    def from_dict(cls, data: object, path: str = "") -> Self:
        """From a mapping, or from text such as ``steps=10:12`` or ``steps=10``."""
        if not isinstance(data, str):
            return super().from_dict(data, path)
        match = re.fullmatch(r"steps=(\d{1,9})(?::(\d{1,9}))?", data.strip())
        if match is None:
            raise SpecError(path, f"{shown(data)} names no steps", "write it like steps=10:12")
        try:
            return cls(first=int(match[1]), last=int(match[2] or match[1]))
        except SpecError as error:
            raise SpecError(path, error.problem, error.remedy) from None


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
    """Seconds after which a run counts as stuck."""

    start: float = quantity("seconds", 300)
    """For the start of all ranks."""
    step: float = quantity("seconds", 100)
    """For a step."""
    checkpoint: float = quantity("seconds", 600)
    """For a checkpoint or an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Restarts(Spec):
    """What a run does when ranks, nodes or devices fail. A number in its place is `most`."""

    most: int = count(3, minimum=0)
    """Restarts without a new checkpoint between them."""
    shrink: bool = False
    """Go on without a node, host or device that does not come back, in a layout that the planner chooses, and with it
    again once it is back."""
    least_devices: int = count(1)
    """Fewer devices than these are too few to go on with."""
    wait: float = quantity("seconds", 60, minimum=0)
    """How long lost nodes and hosts are waited for."""
    retry: float = quantity("seconds", 600)
    """A device whose rank has failed too often is tried again after this time."""


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
    """When to cut a pipeline's stages anew: if the same rank is slow in every recorded step, by the speeds measured in
    them."""

    every: int = count(500, minimum=10)
    """Steps from one recording to the next."""
    steps: int = count(5, maximum=MOST_STEPS)
    """Steps recorded at the end of each such interval."""
    gain: float = setting(0.05, minimum=0, maximum=1)
    """Least share by which a step is expected to become shorter."""

    def check(self) -> None:
        if self.steps >= self.every:
            raise SpecError("steps", f"{self.steps} of {self.every}", "record fewer, or raise every")


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Spec):
    """The learning rate over the run: a warm-up from zero to the peak rate, then a decay."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """`cosine` (arXiv 1608.03983) and `linear` fall from the warm-up to the last step; `wsd` (warm-up, stable, decay:
    arXiv 2404.06395) falls linearly at the end; `constant` stays."""
    warmup: int = count(0, minimum=0)
    """Steps of the warm-up."""
    final: float = setting(0.1, minimum=0, maximum=1)
    """Rate of the last step, as a share of the peak."""
    decay: float = setting(0.1, above=0, maximum=1)
    """Share of the run in which the rate of `wsd` falls."""
    reference_batch: int | None = count(None)
    """Batch, in sequences, that the rate was tuned for. For another batch it scales with the square root of the ratio
    for Adam (arXiv 2006.09092), with the ratio itself for SGD (arXiv 1706.02677)."""

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
    """How often the loss of held-out data is computed, besides at the start and the end of the run."""

    interval: Literal["auto"] | int = count("auto")
    """Steps between two evaluations; `auto` is a tenth of the run."""
    batches: int = count(4, minimum=0)
    """Global batches of each evaluation. 0: never."""


@dataclass(frozen=True, kw_only=True)
class Logging(Spec):
    """What a run reports while it trains, besides metrics.jsonl."""

    interval: int = count(1)
    """Steps between two lines of metrics."""
    memory: int = count(500)
    """On CPUs: steps between two that count their tensors, which is slow. GPUs always count."""
    tensorboard: bool = True
    """Write for TensorBoard too, where it is installed."""
    wandb: str | None = None
    """Project of Weights & Biases to report to."""
    metrics_port: int | None = count(None, minimum=0, maximum=65535)
    """Port on loopback that serves the run's state to Prometheus. 0: any free one."""
    metrics_hosts: tuple[str, ...] = ()
    """Other names under which a scraper reaches it, through a proxy or a forwarded port."""

    def check(self) -> None:
        for number, host in enumerate(self.metrics_hosts):
            if not re.fullmatch(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", host):
                problem = f"{shown(host)} is not a host"
                raise SpecError(f"metrics_hosts[{number}]", problem, "write a name or an address, without a port")


@dataclass(frozen=True, kw_only=True)
class Run(Spec):
    """How long a job trains, on what, and what it keeps, shows and survives."""

    steps: int = count(1000)
    """Optimizer steps."""
    stop_at: int | None = count(None)
    """Step at which the run stops early; it can be resumed."""
    folder: str | None = None
    """Everything the run writes. Started again with the same folder, it resumes."""
    seed: int = count(0, minimum=0)
    """Of weights and data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device to run on."""
    backend: Literal["auto", "mpi"] = "auto"
    """What CPU ranks communicate by: gloo, or the MPI that started them."""
    data: Data = Data()
    """What it trains and evaluates on."""
    schedule: LearningRateSchedule = LearningRateSchedule()
    """Learning rate over the run."""
    evaluation: Evaluation = Evaluation()
    """How often it evaluates."""
    checkpoints: Checkpoints = Checkpoints()
    """When checkpoints are written, and which are kept."""
    non_finite: NonFinite = NonFinite()
    """What follows non-finite gradients."""
    spikes: Spikes = Spikes()
    """What follows a spike of the loss."""
    timeouts: Timeouts = Timeouts()
    """When the run counts as stuck."""
    restarts: Restarts = reference(restarts_from, _shortest, default=Restarts())
    """What it does when ranks fail."""
    logging: Logging = Logging()
    """What it reports."""
    profile: Profile | None = None
    """Steps whose phases and collectives are recorded on all ranks, for `shardwise compare`."""
    nvtx: StepWindow | None = None
    """Steps that mark them as NVTX ranges, for tools such as nsys."""
    recut: RecutPolicy | None = None
    """Record some steps automatically and cut the pipeline's stages by them."""
    start_from: str | None = None
    """Hugging Face folder, checkpoint or other run's folder whose weights are loaded at step 0."""
    automatic: tuple[Automatic, ...] = ()
    """What was `auto` in the strategy and is decided by the planner before the run. The optimizer's offload is also
    adjusted to the memory measured during it."""
    emulate: Emulation | None = reference(emulation_from, str, default=None)
    """Virtual nodes of this machine to put the ranks on, like "2x2,1Gbit,1ms"."""
    reorder: bool = True
    """Assign ranks to the nodes of a wiring in the order predicted to be the fastest, instead of the order of hosts."""
    memory_risk: float = setting(0.05, above=0, maximum=0.5, flag="--memory-risk")
    """Accepted probability that a chosen strategy runs out of device memory, by default 5%."""

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


def fitting_run(run: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a run, its warm-up cut to end before the run does as frameworks do; and a note if it was cut."""
    schedule, steps = run.get("schedule"), run.get("steps", Run().steps)
    warmup = schedule.get("warmup") if isinstance(schedule, Mapping) else None
    if not isinstance(warmup, int) or not isinstance(steps, int) or warmup < steps or not isinstance(schedule, Mapping):
        return dict(run), []
    cut = max(0, steps - 1)
    note = f"a warm-up of {warmup:,} steps is longer than the run of {steps:,}: cut to {cut:,}"
    return {**run, "schedule": {**schedule, "warmup": cut}}, [note]
