"""A layout against the single process: loss, every gradient, every weight after a few steps.

The layout runs on local processes (or GPUs), each of which compares its own parts with the reference that the single
process wrote to a file; so copies that should be equal are all checked, and nothing is gathered but small numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from shardwise.engine.engine import Engine
from shardwise.engine.offload.folder import require_folder
from shardwise.engine.offload.states import MASTER
from shardwise.engine.parameters import divided_as
from shardwise.engine.refuse import require_devices, require_runs
from shardwise.engine.world import joined
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.measure.deviation import (
    TOLERANCE,
    Deviation,
    deviation,
    gradient_scales,
    relative,
    weight_scales,
)
from shardwise.measure.reference import Reference, reference_key, run_reference
from shardwise.measure.sample import sample_batch, sample_weight
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.units import readable_bytes

KINDS = ("loss", "gradient", "weight", "gradient_norm")
PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "shardwise.measure.verify")
# With the usual 1e-8 an element whose gradient is rounding moves by a whole step, up or down: AdamW would turn errors
# of 1e-7 into errors of 1e-4, and hide real ones behind them.
EPSILON = 1e-5
Watch = Callable[[str, Callable[[], int]], None]


@dataclass(frozen=True)
class Verification:
    """The worst deviation of each kind, and where it is; ``job`` is what was run in place of what was asked for."""

    job: Job
    steps: int
    tolerance: float
    worst: dict[str, Deviation]

    @property
    def ok(self) -> bool:
        return all(one.value <= self.tolerance for one in self.worst.values())

    @property
    def where(self) -> str:
        return Deviation.worst(self.worst.values()).where


def verify(
    job: Job,
    *,
    steps: int = 3,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    device: str = "cpu",
    pool: Pool | None = None,
    references: str | None = None,
    watch: Watch = lambda phase, done: None,
) -> Verification:
    """Runs ``job`` (in fp32, by AdamW) on as many processes as its strategy has ranks, and the single process.

    ``references`` is a folder that keeps what the single process found: other layouts of the same job take it from
    there. ``watch`` is called for each phase, with a function that counts its finished steps.
    """
    if job.strategy.compression.is_used or not job.strategy.synchronise.every_step:
        name = "compression" if job.strategy.compression.is_used else "synchronise"
        problem = "changes what is computed: a single process cannot reproduce it"
        raise SpecError(f"strategy.{name}", problem, "leave it out")
    require_runs(job)
    optimization = replace(job.training.optimization, epsilon=max(EPSILON, job.training.optimization.epsilon))
    job = replace(job, training=replace(job.training, precision="fp32", optimizer="adamw", optimization=optimization))
    require_devices(device, job.strategy.world)
    require_folder(job)
    require_memory(job, steps, available_bytes())
    own_pool = pool or Pool(PRELOAD)
    try:
        with OwnedFolder("verify") as folder:
            path = str(Path(references or folder) / f"{reference_key(job, steps, seed)}.pt")
            alone, together = Ticks(f"{folder}/alone"), Ticks(f"{folder}/together")
            if not Path(path).exists():
                watch("one process", alone.count)
                own_pool.run(_write_reference, 1, job, steps, seed, path, alone)
            watch(f"{job.strategy.world} processes", together.count)
            found = own_pool.run(_compare, job.strategy.world, job, steps, seed, path, device, together)
    finally:
        if pool is None:
            own_pool.close()
    worst = {kind: Deviation.worst(one[kind] for one in found) for kind in KINDS}
    return Verification(job, steps, tolerance, worst)


def require_memory(job: Job, steps: int, available: int | None) -> None:
    """Raises SpecError for what exceeds this machine's memory: it would swap or be killed."""
    # The single process: weights, gradients, two moments, and what it writes down (gradients of all steps, weights).
    parameters = parameter_count(job.model)
    alone = parameters * 4 * (4 + steps + 1)
    states = parameters * 16 * job.strategy.data_parallel * job.strategy.cp
    needed = max(alone, states // (job.strategy.gradient_group if job.strategy.zero else 1))
    if available is not None and needed > available:
        problem = f"{job.model.name} needs at least {readable_bytes(needed)} here, {readable_bytes(available)} are free"
        raise SpecError("model", problem, "make it smaller and keep its layout: --shrink")


def available_bytes() -> int | None:
    """Free memory of this machine; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Ticks:
    """Steps that a worker has done, for the process that waits for it: the length of a file."""

    path: str

    def tick(self) -> None:
        with Path(self.path).open("ab") as file:
            file.write(b".")

    def count(self) -> int:
        return Path(self.path).stat().st_size if Path(self.path).exists() else 0


def _write_reference(place: WorkerPlace, job: Job, steps: int, seed: int, path: str, ticks: Ticks) -> None:
    torch.set_num_threads(1)
    unfinished = f"{path}.{os.getpid()}"
    torch.save(asdict(run_reference(job, steps, seed, ticks.tick)), unfinished)
    Path(unfinished).replace(path)  # a file that exists is complete


def _compare(
    place: WorkerPlace, job: Job, steps: int, seed: int, path: str, device: str, ticks: Ticks
) -> dict[str, Deviation]:
    """What one rank finds."""
    torch.set_num_threads(1)
    reference = Reference(**torch.load(path, mmap=True, weights_only=False))  # written by `_write_reference`
    found: dict[str, list[Deviation]] = {kind: [] for kind in KINDS}
    with joined(place.rank, place.world, place.meeting_file, device=device):
        engine = Engine(job, device=device, seed=seed)
        for one in engine.parameters:
            value = one.part.of(sample_weight(one.name, one.part.shape, seed, job.model))
            engine.optimizer.write(one.parameter, MASTER, divided_as(one.parameter, value))
        engine.on_weights_loaded()
        for step in range(steps):
            at = f"step {step + 1}"
            batch = sample_batch(job, step, seed, device).share(engine.mesh.rank("dp"), engine.mesh.size("dp"))
            loss = engine.forward_backward(batch)
            found["loss"].append(relative(at, float(loss), reference.losses[step]))
            found["gradient"] += _gradients(engine, reference.gradients[step], at)
            norm = float(engine.update())
            found["gradient_norm"].append(relative(at, norm, reference.gradient_norms[step]))
            if place.rank == 0:
                ticks.tick()
        found["weight"] += _weights(engine, reference)
    return {kind: Deviation.worst(several) for kind, several in found.items()}


def _gradients(engine: Engine, expected: dict[str, torch.Tensor], at: str) -> list[Deviation]:
    scales = gradient_scales(expected)
    found = []
    for one in engine.parameters:
        gradient = engine.gradient(one)
        if gradient is None:
            found.append(Deviation(float("inf"), f"{one.name}, {at}: no gradient"))
            continue
        name = _reference_name(one.name, expected)
        found.append(deviation(f"{one.name}, {at}", gradient, one.part, expected[name], scales[name]))
    return found


def _weights(engine: Engine, reference: Reference) -> list[Deviation]:
    scales = weight_scales(reference.weights, reference.gradients, engine.job.training.optimization)
    found = []
    for one in engine.parameters:
        name = _reference_name(one.name, reference.weights)
        found.append(deviation(one.name, engine.weight(one), one.part, reference.weights[name], scales[name]))
    return found


def _reference_name(name: str, expected: dict[str, torch.Tensor]) -> str:
    """Where embedding and head are one parameter, the whole model lists it once."""
    return "embedding.weight" if name == "head.weight" and name not in expected else name
