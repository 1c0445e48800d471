"""A run: how long a job trains, on what, and what it keeps, shows and survives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.automatic import Automatic
from shardwise.spec.codec import Spec, count, reference
from shardwise.spec.emulation import Emulation, emulation_from, emulation_text
from shardwise.spec.errors import SpecError
from shardwise.spec.profile import Profile
from shardwise.spec.run_checkpoints import Checkpoints
from shardwise.spec.run_data import Data
from shardwise.spec.run_health import NonFinite, Spikes
from shardwise.spec.schedule import Schedule
from shardwise.spec.timeouts import Timeouts


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
    schedule: Schedule = Schedule()
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
    emulate: Emulation | None = reference(emulation_from, emulation_text, default=None)

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
