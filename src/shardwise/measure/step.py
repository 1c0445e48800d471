"""Times training steps on this machine's device, as `train` runs them but on random tokens, beside the prediction."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.cost.analysis import Analysis, analyze
from shardwise.engine.batch import Batch
from shardwise.engine.context.apply import kernel_words
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group, store_of
from shardwise.engine.refuse import require_devices, require_runs
from shardwise.measure.verify import available_bytes
from shardwise.run.environment import Started
from shardwise.spec.errors import DoesNotFit, SpecError
from shardwise.spec.job import Job
from shardwise.spec.run import StepWindow
from shardwise.spec.units import readable_bytes
from shardwise.training.loop import Timestamp
from shardwise.training.memory import peak_during
from shardwise.training.profiler import NvtxSteps

# By the name that the driver gives a device: the preset that has it.
PRESETS = {
    "NVIDIA H200": "dgx-h200",
    "NVIDIA H100 80GB HBM3": "dgx-h100",
    "NVIDIA H100 PCIe": "h100-pcie-server",
    "NVIDIA B200": "dgx-b200",
    "NVIDIA A100-SXM4-80GB": "dgx-a100",
    "NVIDIA A100-SXM4-40GB": "dgx-a100-40gb",
    "NVIDIA GeForce RTX 4090": "workstation-4090",
    "NVIDIA GeForce RTX 3090": "workstation-3090",
}
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredStep:
    """Times and memory of a job's steps, beside their prediction."""

    analysis: Analysis
    device_name: str
    step_seconds: tuple[float, ...]
    peak_bytes: int
    reserved_bytes: int | None  # by the allocator of a GPU
    first_loss: float
    last_loss: float
    graphs: str  # whether steps were launched as CUDA graphs, and if not, why
    attention: str  # which kernel computed it

    @property
    def job(self) -> Job:
        return self.analysis.job

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens_per_step / self.median_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, with the same FLOPs and peak as the predicted one."""
        return self.analysis.flops_per_step() / (self.median_seconds * self.analysis.peak_flops)

    @property
    def predicted_bytes(self) -> float:
        """Predicted bytes of a rank's tensors, without the framework's memory, which the allocator does not count."""
        return self.analysis.memory.total - self.analysis.memory.allowance

    @property
    def seconds_error(self) -> float:
        """How far the prediction is above the measured time, relative to it."""
        return self.analysis.predicted_seconds / self.median_seconds - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.peak_bytes - 1


def device_type_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def cluster_name_here(device_type: str) -> str:
    """The preset whose device this machine has; raises SpecError if no preset is known for it."""
    if device_type == "cpu":
        return "laptop"
    called = torch.cuda.get_device_name(0)
    if called not in PRESETS:
        raise SpecError("cluster", f"no preset is known for {called}", "name one: ⟨cluster=dgx-h200⟩ ⟨gpus=1⟩")
    return PRESETS[called]


def devices_here() -> str:
    """All devices of this machine: a sized preset."""
    if torch.cuda.is_available():
        return f"{cluster_name_here('cuda')}:{torch.cuda.device_count()}"
    return "laptop:1"


def require_measurable(job: Job, here: Started | None) -> None:
    """Raises SpecError for a job that does not run, or has another number of ranks than were started."""
    require_runs(job)
    world, started = job.strategy.world, 1 if here is None else here.world
    if world != started:
        remedy = "⟨gpus=1⟩" if started == 1 and job.cluster.devices > 1 else "start as many by torchrun, srun or mpirun"
        raise SpecError("cluster", f"the job has {world:,} ranks, this command {started:,}", remedy)
    if job.run_device == "cuda":
        if not torch.cuda.is_available():
            raise SpecError("cluster", "PyTorch finds no GPU here", "⟨cluster=laptop⟩ ⟨gpus=1⟩")
        require_devices("cuda", 1 if here is None else here.ranks_per_host)
        return
    free, needed = available_bytes(), world * analyze(job).memory.total
    if free is not None and needed > free:
        problem = f"{job.model.name} needs {readable_bytes(needed)} here, {readable_bytes(free)} are free"
        raise DoesNotFit("model", problem, "a smaller model, batch or sequence")


def measure_step(
    job: Job,
    here: Started | None,
    *,
    steps: int,
    warmup: int,
    warmup_seconds: float = 0.0,
    seed: int = 0,
    nvtx: bool = False,
    on_progress: OnProgress,
) -> MeasuredStep:
    """Times ``steps`` steps after ``warmup`` others, in which kernels are built.

    The warm-up lasts at least ``warmup_seconds``: an idle card runs faster than one whose power limit has lowered its
    clocks. Steps follow each other as in training: the host launches the next step before it waits for the last one. On
    a CPU memory is counted in one further step, since counting slows it down. With ``nvtx`` the timed steps are marked
    as ranges.
    """
    on_progress("building the model")
    with _world(job, here):
        engine = Engine(job, device=job.run_device, seed=seed)
        random = torch.Generator(engine.device).manual_seed(seed)
        began = time.perf_counter()
        for number in itertools.count():
            if number >= warmup and time.perf_counter() - began > warmup_seconds:
                break
            on_progress(f"warm-up, step {number + 1} of {warmup}")
            result = engine.step(_random_batch(engine, random))
            if number == 0:
                first = result.loss
            elif warmup_seconds:
                Timestamp(engine.device).wait()
        ranges = NvtxSteps(engine, StepWindow(first=1, last=steps)) if nvtx else None
        stamps = [Timestamp(engine.device)]
        for number in range(1, steps + 1):
            on_progress(f"step {number} of {steps}")
            with nullcontext() if ranges is None else ranges.step(number):
                result = engine.step(_random_batch(engine, random))
            stamps.append(Timestamp(engine.device))
            stamps[-2].wait()
        stamps[-1].wait()
        peak = _peak_bytes(engine, _random_batch(engine, random))
        return MeasuredStep(
            analyze(job), _name(engine.device),
            tuple(later.seconds_since(earlier) for earlier, later in pairwise(stamps)),
            peak, torch.cuda.max_memory_reserved() if engine.device.type == "cuda" else None,
            float(first), float(result.loss), _graphs(engine, nvtx), kernel_words(job, engine.device),
        )  # fmt: skip


@contextmanager
def _world(job: Job, here: Started | None) -> Iterator[None]:
    """The process group of the job's ranks; running out of memory becomes a one-line DoesNotFit."""
    store = dist.HashStore() if here is None else store_of(here)  # type: ignore[attr-defined]
    rank, world = (0, 1) if here is None else (here.rank, here.world)
    try:
        with process_group(rank, world, store, device=job.run_device):
            yield
    except torch.OutOfMemoryError:
        needed = readable_bytes(analyze(job).memory.total)
        problem = f"a step ran out of the device's memory; {needed} were predicted"
        raise DoesNotFit("strategy", problem, "a smaller microbatch, or recompute: full") from None
    finally:
        if here is None and dist.is_initialized():  # after a failure
            dist.destroy_process_group()


def _random_batch(engine: Engine, random: torch.Generator) -> Batch:
    """This rank's sequences of the next step; every label counts."""
    job, device = engine.job, engine.device
    size = (job.sequences, job.training.seq + 1)
    text = torch.randint(job.model.vocab, size, generator=random, device=device)
    return Batch.of(text[:, :-1].contiguous(), text[:, 1:].contiguous()).rows(engine.rows)


def _peak_bytes(engine: Engine, batch: Batch) -> int:
    """The peak of the fullest rank."""
    if engine.device.type == "cuda":
        own = torch.cuda.max_memory_allocated(engine.device)
    else:
        _, own = peak_during(engine.device, lambda: engine.step(batch))
    peaks = torch.tensor([own])
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return int(peaks)


def _graphs(engine: Engine, nvtx: bool) -> str:
    if engine.graphs.recorded and nvtx:
        return "not used: steps with NVTX ranges run as they are written"
    return "used" if engine.graphs.recorded else f"not used: {engine.graphs.reason or 'too few steps'}"


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"
