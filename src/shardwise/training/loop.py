"""The training loop of one rank: data, step, figures, policy, evaluation, checkpoints; the same steps on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.engine.batch import Batch
from shardwise.engine.labels import StepPhase
from shardwise.engine.profiler_ranges import named
from shardwise.engine.trainer import StepResult, Trainer
from shardwise.run.attempt import Reporter
from shardwise.run.checkpoint.checkpoint_folder import RemoteCheckpointFolder
from shardwise.run.checkpoint.folder import CheckpointFolder, HeldFolders
from shardwise.run.data.order import Loader, Mixture, Rows
from shardwise.run.metrics.recorder import Recorder
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.training.agreement import Agreement, Health, MemoryPressure, RankRequests, StepVerdict, StopSignal
from shardwise.training.checkpoint.save import MemoryCopies
from shardwise.training.checkpointing import CheckpointManager, Position, State, load_newest
from shardwise.training.memory import device_memory, peak_during, resident_bytes
from shardwise.training.profiler import NvtxSteps, Profiler

# Between two garbage collections, at the same step on all ranks, so that no rank waits for another's.
COLLECTED_STEPS = 200
COUNTED_STEP = 2  # the first whose memory is counted: before it not everything is allocated yet


class Timestamp:
    """The moment at which the work launched so far is done; on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._host_seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Timestamp) -> float:
        """Valid after `wait`."""
        if self._event is None or earlier._event is None:
            return self._host_seconds - earlier._host_seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class PendingStep:
    """A running step, with what was known when it began.

    Loss and norm are copied to the host as it runs: `read` waits for this step, not for later ones.
    """

    def __init__(
        self, position: Position, rate: float, waited_seconds: float, memory: dict[str, Any], result: StepResult
    ) -> None:
        self.position, self.number = position, position.step + 1  # steps are counted from 1
        self.learning_rate, self.waited_seconds, self.memory = rate, waited_seconds, memory
        self.loss = self.gradient_norm = float("nan")
        self._numbers = numbers = torch.stack([result.loss, result.gradient_norm])
        if numbers.is_cuda:
            self._numbers = torch.empty(2, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self.finished = Timestamp(numbers.device)

    def read(self) -> PendingStep:
        self.finished.wait()
        self.loss, self.gradient_norm = self._numbers.tolist()
        return self


@dataclass(frozen=True)
class MemoryFolder:
    """Where copies in the memory of nodes go."""

    folder: RemoteCheckpointFolder
    on_commit: Callable[[int], None] = lambda step: None  # called with the step of each copy, in a thread of rank 0


@dataclass(frozen=True)
class LoopParts:
    """What a loop works with on this rank."""

    job: Job
    trainer: Trainer[Any]
    training: Mixture
    validation: Mixture | None
    folder: CheckpointFolder
    reporter: Reporter
    recorder: Recorder | None = None  # on rank 0
    profiler: Profiler | NvtxSteps | None = None
    stop: StopSignal = field(default_factory=StopSignal)
    memory: MemoryFolder | None = None
    held: HeldFolders = field(default_factory=HeldFolders)  # the folders that it writes into


class Loop:
    """`run` trains from ``state`` to the last step, or until a signal, and ends with a checkpoint."""

    def __init__(self, parts: LoopParts, state: State) -> None:
        job = parts.job
        self.parts, self.job, self.run_spec, self.trainer = parts, job, job.run, parts.trainer
        self.position, self.first_step = state.position, state.position.step
        data = job.run.data
        settings: dict[str, Any] = {"workers": data.workers, "prefetch": data.prefetch}
        share = (job.sequences, parts.trainer.rows)
        self.loader = Loader(parts.training, *share, **settings)
        self.held_out = None if parts.validation is None else Loader(parts.validation, *share, workers=1, prefetch=1)
        self.health = Health(job.run, scaled=self.trainer.scaler is not None, losses=state.losses)
        self.checkpoints = CheckpointManager(self.trainer, job.run, parts.folder, self._checkpoint_ended)
        self.checkpoints.last_begun = self.first_step if state.saved else None
        self.copies = self._copies_of(parts.memory)
        self.agreement = Agreement(self.first_step)
        self.pressure = MemoryPressure(self.trainer) if "optimizer" in job.run.automatic else None
        self._late: PendingStep | None = None
        self._since = Timestamp(self.trainer.device)  # when the previous step, or what came after it, ended
        optimization = job.training.optimization
        factor = job.run.schedule.batch_factor(job.sequences, job.training.optimizer)
        self._highest_rate = optimization.learning_rate * factor

    def run(self) -> Position:
        """Trains; returns where the run ended: at its last step, or where a signal stopped it."""
        gc.disable()
        try:
            self.begin()
            while self.advance():
                pass
            self._end()
        finally:
            gc.enable()
            self.loader.close()
            if self.held_out:
                self.held_out.close()
        return self.position

    def advance(self) -> bool:
        """Runs a step; at the end of the run, or once ranks agree to stop, reads the last figures and returns False."""
        if not self._agreed_to_stop() and self.position.step < self.run_spec.last_step:
            profiler = self.parts.profiler
            with nullcontext() if profiler is None else profiler.step(self.position.step + 1):
                self._one_step()
            return True
        return self._read_last() is StepVerdict.ROLL_BACK

    # -- a step --------------------------------------------------------------------------------------

    def _one_step(self) -> None:
        position = self.position
        self.parts.reporter.phase("data", position.step)
        waited_before = self.loader.waited_seconds
        with named(StepPhase.DATA):
            batch = batch_of(self.loader.take(position.batch), self.trainer.device)
        # Kernels are built in the first steps, which may take as long as the start.
        limit_seconds = self.run_spec.timeouts.start if position.step - self.first_step < 2 else None
        self.parts.reporter.phase("step", position.step, limit_seconds)
        rate = self._highest_rate * self.run_spec.schedule.share(position.step, self.run_spec.steps)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = rate
        # Like the data, random numbers depend on seed and step alone.
        torch.manual_seed((self.run_spec.seed * 1_000_003 + position.step) % 2**63)
        counts = self._counts_memory(position.step)
        result, memory = self._counted_step(batch) if counts else (self._step(batch), {})
        waited = self.loader.waited_seconds - waited_before
        before, self._late = self._late, PendingStep(position, rate, waited, memory, result)
        self.position = position.after_step()
        if before is not None and self._judge(before.read()) is StepVerdict.ROLL_BACK:
            return
        if self.position.step % COLLECTED_STEPS == 0:
            gc.collect()
        self._between_steps()

    def _between_steps(self) -> None:
        """Evaluates and saves if due; both need the last step's figures first."""
        step, last = self.position.step, self.run_spec.last_step
        evaluates = self.held_out is not None and (
            step % self.run_spec.evaluation_interval == 0 or step == self.run_spec.steps
        )
        saves = self.checkpoints.due_at(step) and step < last
        copies = self.copies is not None and self.copies.due_at(step) and step < last
        if not (evaluates or saves or copies) or self._read_last() is StepVerdict.ROLL_BACK:
            return
        if evaluates:
            self._evaluate()
        if copies:
            self._copy()
        if saves:
            self._save()
        self._since = Timestamp(self.trainer.device)

    def _step(self, batch: Any) -> StepResult:
        return self.trainer.step(batch, loss_limit=self.health.loss_limit)

    # -- figures and what follows from them ----------------------------------------------------------

    def _read_last(self) -> StepVerdict:
        """Judges the step begun last, once it is done."""
        late, self._late = self._late, None
        return StepVerdict.GOOD if late is None else self._judge(late.read())

    def _judge(self, figures: PendingStep) -> StepVerdict:
        try:
            verdict = self.health.judge(figures.number, figures.loss, figures.gradient_norm)
        except SpecError:
            self._late = None
            self._record(figures, "stopped")
            self._save(wait=True)
            raise
        self._record(figures, None if verdict is StepVerdict.GOOD else verdict.value)
        if verdict is StepVerdict.ROLL_BACK:
            self._roll_back(figures)
        return verdict

    def _roll_back(self, figures: PendingStep) -> None:
        """Reloads the newest checkpoint and skips the bad batch."""
        self._late = None
        batch = figures.position.batch
        self._settle()
        if self.copies is not None:
            self.copies.finish()
        self.parts.reporter.phase("checkpoint", self.position.step)
        left_out = self.position.left_out | {batch}
        state = load_newest(self.trainer, self.parts.folder, memory=self.copies.folder if self.copies else None)
        assert state is not None, "a run that may roll back begins with a checkpoint"
        self.position = state.position.without(left_out)
        self.health.rolled_back(state.losses)
        self.agreement.restart_from(self.position.step)
        if self.parts.recorder:
            self.parts.recorder.rolled_back(self.position.step)
            self._record_event({"rolled_back_from": figures.number, "left_out_batch": batch})
        self._since = Timestamp(self.trainer.device)

    def _record(self, figures: PendingStep, bad: str | None) -> None:
        seconds, self._since = figures.finished.seconds_since(self._since), figures.finished
        if self.parts.recorder is None or (figures.number % self.run_spec.logging.interval and bad is None):
            return
        numbers = {
            "loss": figures.loss,
            "gradient_norm": figures.gradient_norm,
            "learning_rate": figures.learning_rate,
            "data_wait_seconds": figures.waited_seconds,
            **device_memory(self.trainer.device),
            **figures.memory,
            "resident_bytes": resident_bytes(),
            **({"bad": bad} if bad else {}),
        }
        self.parts.held.require()
        self.parts.recorder.step(figures.number, seconds, numbers)

    def _record_event(self, event: dict[str, Any]) -> None:
        if self.parts.recorder:
            self.parts.recorder.write({"step": self.position.step, **event})

    # -- memory --------------------------------------------------------------------------------------

    def _counts_memory(self, step: int) -> bool:
        """Whether to count the memory of a step; never of a profiled one, which counting would slow down."""
        if self.parts.profiler is not None and self.parts.profiler.covers(step + 1):
            return False
        return (step - self.first_step) % self.run_spec.logging.memory == COUNTED_STEP % self.run_spec.logging.memory

    def _counted_step(self, batch: Any) -> tuple[StepResult, dict[str, Any]]:
        """A step, and the memory of every rank: from its allocator, or on a CPU the bytes of its tensors."""
        result, peak = peak_during(self.trainer.device, lambda: self._step(batch))
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        share = self.pressure.after(max(peaks)) if self.pressure is not None else None
        if share is not None:
            self._record_event({"offload_optimizer": share, "memory_bytes": max(peaks)})
        return result, {"memory_bytes": max(peaks), "memory_bytes_of_ranks": peaks}

    # -- begin and end --------------------------------------------------------------------------------

    def begin(self) -> None:
        """A first checkpoint and evaluation, if needed, before the first step."""
        gc.collect()
        gc.freeze()  # what exists now stays, and need not be scanned again
        if self.run_spec.rolls_back and self.checkpoints.last_begun is None:
            self._save(wait=True)
        if self.position.step == 0 and self.held_out is not None:
            self._evaluate()
        self._since = Timestamp(self.trainer.device)

    def _end(self) -> None:
        self.agreement.finish()
        if self.copies is not None:
            self.copies.finish()
        self._settle()
        if self.checkpoints.last_begun != self.position.step:
            self._save(wait=True)
            self.checkpoints.require(self.position.step)
        self.parts.held.require()
        self.parts.reporter.phase("done", self.position.step)

    def _evaluate(self) -> None:
        assert self.held_out is not None
        self.parts.reporter.phase("evaluation", self.position.step)
        with named(StepPhase.EVALUATION):
            loss = evaluate(self.trainer, self.held_out, self.run_spec.evaluation.batches)
        self._record_event({"validation_loss": loss})

    def _settle(self) -> None:
        """Waits for the save in flight; a save that was given up in time does not fail the run."""
        if self.checkpoints.unsettled:
            self.parts.reporter.phase("checkpoint", self.position.step, self.checkpoints.limit_seconds)
            with named(StepPhase.CHECKPOINT):
                self.checkpoints.settle()

    def _save(self, *, wait: bool = False) -> None:
        self._settle()
        self.parts.held.require()
        self.parts.reporter.phase("checkpoint", self.position.step, self.checkpoints.limit_seconds)
        with named(StepPhase.CHECKPOINT):
            self.checkpoints.save(self.position.step, self._numbers(), wait=wait)

    def _copies_of(self, memory: MemoryFolder | None) -> MemoryCopies | None:
        every = self.run_spec.checkpoints.memory
        if memory is None or every is None:
            return None
        seconds = self.run_spec.timeouts.checkpoint
        return MemoryCopies(self.trainer, memory.folder, every, seconds, memory.on_commit)

    def _copy(self) -> None:
        """Copies the state into the memory of two nodes."""
        assert self.copies is not None
        self.parts.reporter.phase("checkpoint", self.position.step)
        with named(StepPhase.CHECKPOINT):
            self.copies.save(self.position.step, self._numbers())
        self._record_event({"memory_copy": self.position.step, "memory_copy_seconds": self.copies.stall_seconds})

    def _numbers(self) -> dict[str, Any]:
        """Plain data to keep in a checkpoint."""
        return {"data": self.position.to_numbers(self.job.sequences), "losses": list(self.health.losses)}

    def _checkpoint_ended(self, step: int, problem: str) -> None:
        failed = {"checkpoint_failed": problem, "checkpoint_failed_step": step}  # later steps have been done since
        self._record_event(failed if problem else {"checkpoint": step})

    # -- what ranks agree on -------------------------------------------------------------------------

    def _agreed_to_stop(self) -> bool:
        """Does what all ranks have agreed on; returns whether to stop."""
        own = RankRequests(
            int(self.parts.stop.requested), int(self.checkpoints.due_by_time), int(self.checkpoints.saver.busy)
        )
        agreed = self.agreement.at_step(self.position.step, own)
        if agreed is None or agreed.stop:
            return agreed is not None
        if self.checkpoints.last_begun is not None and self.checkpoints.last_begun >= self.agreement.requested_at:
            return False  # the requests predate the newest checkpoint
        if not agreed.saving:
            self._settle()
        if agreed.save and self._read_last() is not StepVerdict.ROLL_BACK:
            self._save()
            self._since = Timestamp(self.trainer.device)
        return False


def batch_of(rows: Rows, device: torch.device) -> Batch:
    """A rank's rows on its device; rows of a single document need no mask, which makes attention faster."""
    packed, documents_of_row = bool(rows.documents.any()), 1 + np.count_nonzero(np.diff(rows.documents), axis=1)
    tensors = [torch.from_numpy(array) for array in (rows.tokens, rows.labels, rows.positions, rows.documents)]
    if device.type == "cuda":
        tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    tokens, labels, positions, documents = tensors
    # Rounded up to a power of two, so that few sizes occur.
    most = 1 << int(documents_of_row.max() - 1).bit_length()
    return Batch(tokens, labels, positions, documents, most) if packed else Batch(tokens, labels, positions)


def evaluate(trainer: Trainer[Any], loader: Loader, batches: int) -> float:
    """The mean loss over all labels in the first ``batches`` of the loader, equal on all ranks."""
    losses = [trainer.held_out_loss(batch_of(loader.take(number), trainer.device)) for number in range(batches)]
    trainer.data.after_evaluation()
    means, labels = (torch.stack(of).double() for of in zip(*((one.loss, one.labels) for one in losses)))
    return float((means * labels).sum() / labels.sum().clamp(min=1))
