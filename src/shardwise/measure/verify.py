"""A layout against a single process: loss, every gradient, every weight after a few steps.

The layout runs on local processes (or GPUs). Each compares its own shards with the reference, which the single process
wrote to a file: so all replicas are checked, and only deviations are gathered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.parameters import HeldParameter, divided_as, local
from shardwise.engine.refuse import require_devices, require_folder, require_runs
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.pool import Pool
from shardwise.measure.calibrate.ranks import PoolRanks, Rank, Ranks, StartedRanks, started_ranks
from shardwise.measure.reference import (
    TOLERANCE,
    Deviation,
    Reference,
    cluster_of,
    deviation,
    gradient_scales,
    hold_routes,
    largest_of_layers,
    reference_key,
    reference_name,
    relative,
    run_reference,
    sample_engine,
    share,
    weight_scales,
)
from shardwise.models.decoder import is_stack_of_experts
from shardwise.run.environment import Started
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes

# -- in FP8: a layout may be about as far from fp32 as one process in FP8 is -------------------------
# Both FP8 runs send every token to the experts that it has in the reference.

Tick = Callable[[], None]  # after each step
_LONGEST_SECONDS = 300.0  # of training on the ranks: beyond it they hang
# How far training in FP8 may be from fp32. A matmul of e4m3 numbers is 3.8% off, with a gradient in e5m2 6%, relative
# to the norm of its result; several in a row add up, errors in other directions cancel out in the loss.
FP8_BOUNDS = {"loss": 0.005, "gradient": 0.2, "gradient_norm": 0.05}
# If one process in FP8 is further off, a layout may be twice as far off as that; but at most `MOST` times the bound,
# beyond which nothing of a gradient is left.
AS_ALONE, MOST = 2.0, 4.0
BF16_ROUNDING = 2.0**-8  # half of a unit in the last place: between matmuls all is in bf16


def on_one_process(job: Job) -> Job:
    """The same training without a layout: shows what the precision alone changes."""
    training = replace(job.training, compile=False)
    strategy = Strategy(microbatch=job.strategy.microbatch)
    return replace(job, cluster=cluster_of(job.cluster, 1), strategy=strategy, training=training)


@dataclass
class _Narrow:
    """What one rank of an FP8 run finds at each step."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    gradient_errors: list[dict[str, Tensor]] = field(default_factory=list)


def _run_narrow(job: Job, steps: int, seed: int, reference: Reference, device: str, tick: Tick) -> _Narrow:
    """Trains with the reference's experts for every token."""
    narrow, engine = _Narrow(), sample_engine(job, seed, device)
    for step in range(steps):
        for stage in engine.stages.values():
            hold_routes(stage, reference.routes[step], engine.device)
        narrow.losses.append(float(engine.forward_backward(share(engine, step, seed))))
        narrow.gradient_errors.append(_gradient_errors(engine, reference.gradients[step]))
        narrow.gradient_norms.append(float(engine.update()))
        tick()
    return narrow


def _write_narrow(
    rank: Rank, job: Job, steps: int, seed: int, path: str, narrow_path: str, device: str, tick: Tick
) -> None:
    """The run of a single process: that of the first rank of every host."""
    if not rank.first_of_host:
        return
    torch.set_num_threads(1)
    reference = Reference(**torch.load(path, mmap=True, weights_only=False))
    with process_group(0, 1, f"{narrow_path}.meeting", device=device):
        torch.save(asdict(_run_narrow(job, steps, seed, reference, device, tick)), narrow_path)


def _compare_narrow(
    rank: Rank, job: Job, steps: int, seed: int, path: str, narrow_path: str, device: str, tick: Tick
) -> dict[str, Deviation]:
    """How far training in FP8 is from the reference; gradients of each parameter, or of each expert, by their norm.

    Relative to the reference, on a scale that is widened if one process in FP8 is further off than half of a bound.
    """
    torch.set_num_threads(1)
    reference = Reference(**torch.load(path, mmap=True, weights_only=False))
    alone = _Narrow(**torch.load(narrow_path, weights_only=False))
    with process_group(rank.number, rank.world, rank.store, device=device):
        mine = _run_narrow(job, steps, seed, reference, device, tick if rank.number == 0 else lambda: None)
    deviations: dict[str, list[Deviation]] = {kind: [] for kind in FP8_BOUNDS}
    for step, expected in enumerate(reference.gradients):
        at = f"step {step + 1}"
        for kind, name in (("loss", "losses"), ("gradient_norm", "gradient_norms")):
            right = float(getattr(reference, name)[step])
            here, there = (torch.tensor([abs(getattr(run, name)[step] - right)]) for run in (mine, alone))
            deviations[kind].append(_beside_alone(kind, at, here, there, torch.tensor([abs(right)])))
        sizes = _gradient_sizes(expected)
        for name, here in mine.gradient_errors[step].items():
            known = reference_name(name, expected)
            worst = _beside_alone("gradient", f"{name}, {at}", here, alone.gradient_errors[step][known], sizes[known])
            deviations["gradient"].append(worst)
    return {kind: Deviation.worst(several) for kind, several in deviations.items()}


def _beside_alone(kind: str, where: str, errors: Tensor, by_alone: Tensor, sizes: Tensor) -> Deviation:
    """The worst of ``errors``, each relative to its entry of ``sizes``, or to more if one process is far off as well.

    The result is within `FP8_BOUNDS` if the relative error is, or if the error is at most `AS_ALONE` times that of one
    process.
    """
    allowed = (by_alone * (AS_ALONE / FP8_BOUNDS[kind])).minimum(sizes * MOST)
    scales = torch.maximum(sizes, allowed)
    relative_errors = torch.where(errors == 0, 0.0, errors / scales).nan_to_num(nan=float("inf"), posinf=float("inf"))
    worst = int(relative_errors.argmax())
    return Deviation(float(relative_errors[worst]), where if len(errors) == 1 else f"expert {worst} of {where}")


def _gradient_errors(engine: Engine, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each parameter, the norm of the difference between this rank's part of its gradient and the reference's.

    For stacked experts, the norm of each: one of many would be lost in the norm of all. Zero for other ranks' experts.
    """
    errors_of = {}
    for held in engine.trained:
        whole = expected[reference_name(held.name, expected)]
        tensor = engine.gradient(held)
        if tensor is None:
            errors_of[held.name] = torch.full_like(_norms(held.name, whole), float("inf"))
            continue
        right = divided_as(tensor, held.part.of(whole)).float()
        errors_of[held.name] = _norms(held.name, local(tensor).float().cpu() - right)
        if is_stack_of_experts(held.name):
            numbers = torch.arange(len(whole)).view(-1, *[1] * (whole.dim() - 1)).expand(whole.shape)
            here = divided_as(tensor, held.part.of(numbers)).flatten(1)[:, :1].flatten()
            errors = torch.zeros(len(whole))
            errors_of[held.name] = errors.index_copy(0, here, errors_of[held.name][: len(here)])
    return errors_of


def _gradient_sizes(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each gradient, or more if its layer's rounding exceeds that, as in `gradient_scales`."""
    norms = {name: _norms(name, gradient) for name, gradient in gradients.items()}
    of_layers = largest_of_layers(norms)
    return {name: norm.clamp_min(BF16_ROUNDING * of_layers[name]) for name, norm in norms.items()}


def _norms(name: str, tensor: Tensor) -> Tensor:
    """The norm of a tensor; of stacked experts, that of each."""
    rows = tensor.flatten(1) if is_stack_of_experts(name) else tensor.reshape(1, -1)
    norms: Tensor = torch.linalg.vector_norm(rows.float(), dim=1)
    return norms


# -- in fp32 -----------------------------------------------------------------------------------------

KINDS = ("loss", "gradient", "weight", "gradient_norm")
PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "shardwise.measure.verify")
# Of AdamW. With the usual 1e-8 an element whose gradient is only rounding moves by a full step, up or down: errors of
# 1e-7 would become errors of 1e-4 and hide real ones.
EPSILON = 1e-5
Watch = Callable[[str, Callable[[], int]], None]


@dataclass(frozen=True)
class Verification:
    """The worst deviation of each kind, and where it is."""

    job: Job  # as it was run: in fp32, perhaps smaller
    steps: int
    tolerance: float
    worst: dict[str, Deviation]
    in_fp8: dict[str, Deviation] = field(default_factory=dict)  # of the same layout, if the job asks for FP8

    @property
    def ok(self) -> bool:
        exact = all(worst.value <= self.tolerance for worst in self.worst.values())
        return exact and all(worst.value <= FP8_BOUNDS[kind] for kind, worst in self.in_fp8.items())

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
    """Runs ``job`` (in fp32, with AdamW) on as many processes as its strategy has ranks, and on a single process.

    ``references`` is a folder that keeps the single process's results for other layouts of the same job. ``watch`` is
    called for each phase, with a function that counts its finished steps.
    """
    comparison = _Comparison(job, _in_fp32(job), steps, seed, tolerance, device)
    require_devices(device, job.strategy.world)
    own_pool = pool or Pool(PRELOAD)
    try:
        with OwnedFolder("verify") as folder:
            ranks = PoolRanks(own_pool, job.strategy.world, longest_seconds=_LONGEST_SECONDS)
            return comparison.by(ranks, Path(folder), Path(references or folder), watch)
    finally:
        if pool is None:
            own_pool.close()


def verify_as_rank(
    job: Job, here: Started, *, steps: int = 3, seed: int = 0, tolerance: float = TOLERANCE, device: str = "cpu"
) -> Verification:
    """As `verify`, on ranks that a launcher has started: every rank calls this and gets the result.

    Each host runs the single process for itself: hosts need no common storage.
    """
    comparison = _Comparison(job, _in_fp32(job), steps, seed, tolerance, device)
    if job.strategy.world != here.world:
        problem = f"the job has {job.strategy.world:,} ranks, {here.launcher} started {here.world:,}"
        raise SpecError("cluster", problem, "start as many as the job has")
    require_devices(device, here.ranks_per_host)
    with started_ranks(here) as ranks, OwnedFolder("verify") as own:
        folders = ranks.run(lambda rank: str(own))
        folder = Path(folders[here.rank - here.local_rank])
        return comparison.by(ranks, folder, folder)


def _in_fp32(job: Job) -> Job:
    """The job as it is compared; raises SpecError if a single process cannot reproduce its results."""
    if job.strategy.compression.is_used or not job.strategy.synchronise.every_step:
        name = "compression" if job.strategy.compression.is_used else "synchronise"
        problem = "changes what is computed: a single process cannot reproduce it"
        raise SpecError(f"strategy.{name}", problem, "leave it out")
    require_runs(job)
    optimization = replace(job.training.optimization, epsilon=max(EPSILON, job.training.optimization.epsilon))
    return replace(job, training=replace(job.training, precision="fp32", optimizer="adamw", optimization=optimization))


@dataclass(frozen=True)
class _Comparison:
    asked: Job
    job: Job
    steps: int
    seed: int
    tolerance: float
    device: str

    def by(
        self,
        ranks: Ranks,
        folder: Path,
        references: Path,
        watch: Watch = lambda phase, done: None,
    ) -> Verification:
        """Runs the comparison on ``ranks``; ``folder`` and ``references`` are local to each host."""
        job, asked, given = self.job, self.asked.training, (self.steps, self.seed)
        require_folder(job)
        require_memory(job, self.steps, available_bytes())
        path = str(references / f"{reference_key(job, *given)}.pt")
        phases = ("alone", "together", "narrow_alone", "narrow")
        alone, together, alone_again, again = (Ticks(f"{folder}/{name}") for name in phases)
        if isinstance(ranks, StartedRanks) or not Path(path).exists():
            watch("one process", alone.count)
            ranks.run(_write_reference, job, *given, path, alone)
        watch(f"{job.strategy.world} processes", together.count)
        of_ranks = ranks.run(_compare, job, *given, path, self.device, together)
        narrow: list[dict[str, Deviation]] = []
        if asked.recipe.scaling:
            narrowed = replace(job, training=replace(job.training, precision=asked.precision))
            narrow_path = str(folder / "narrow.pt")
            watch(f"one process in {asked.precision}", alone_again.count)
            both = (*given, path, narrow_path, self.device)
            ranks.run(_write_narrow, on_one_process(narrowed), *both, alone_again.tick)
            watch(f"the same in {asked.precision}", again.count)
            narrow = ranks.run(_compare_narrow, narrowed, *both, again.tick)
        worst = {kind: Deviation.worst(own[kind] for own in of_ranks) for kind in KINDS}
        in_fp8 = {kind: Deviation.worst(own[kind] for own in narrow) for kind in FP8_BOUNDS} if narrow else {}
        return Verification(job, self.steps, self.tolerance, worst, in_fp8)


def require_memory(job: Job, steps: int, available: int | None) -> None:
    """Raises SpecError if the job exceeds this machine's memory: it would swap or be killed."""
    # The single process: weights, gradients, two moments, and what it saves (gradients of all steps, weights).
    parameters = parameter_count(job.model)
    alone = parameters * 4 * (4 + steps + 1)
    states = parameters * 16 * job.strategy.data_parallel * job.strategy.cp
    needed = max(alone, states // (job.strategy.gradient_group if job.strategy.zero else 1))
    if available is not None and needed > available:
        problem = f"{job.model.name} needs at least {readable_bytes(needed)} here, {readable_bytes(available)} are free"
        raise SpecError("model", problem, "make it smaller and keep its layout: ⟨shrink=true⟩")


def available_bytes() -> int | None:
    """Free memory of this machine; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Ticks:
    """Counts the steps that a worker has done, for the process that waits for it, as the size of a file."""

    path: str

    def tick(self) -> None:
        with Path(self.path).open("ab") as file:
            file.write(b".")

    def count(self) -> int:
        return Path(self.path).stat().st_size if Path(self.path).exists() else 0


def _write_reference(rank: Rank, job: Job, steps: int, seed: int, path: str, ticks: Ticks) -> None:
    """By the first rank of every host."""
    if not rank.first_of_host:
        return
    torch.set_num_threads(1)
    unfinished = f"{path}.{os.getpid()}"
    torch.save(asdict(run_reference(job, steps, seed, ticks.tick)), unfinished)
    Path(unfinished).replace(path)  # a file that exists is complete


def _compare(rank: Rank, job: Job, steps: int, seed: int, path: str, device: str, ticks: Ticks) -> dict[str, Deviation]:
    torch.set_num_threads(1)
    reference = Reference(**torch.load(path, mmap=True, weights_only=False))  # written by `_write_reference`
    deviations: dict[str, list[Deviation]] = {kind: [] for kind in KINDS}
    with process_group(rank.number, rank.world, rank.store, device=device):
        engine = sample_engine(job, seed, device)
        for step in range(steps):
            at = f"step {step + 1}"
            loss = engine.forward_backward(share(engine, step, seed))
            deviations["loss"].append(relative(at, float(loss), reference.losses[step]))
            expected = reference.gradients[step]
            deviations["gradient"] += _deviations(
                engine.trained, engine.gradient, expected, gradient_scales(expected), f", {at}"
            )
            norm = float(engine.update())
            deviations["gradient_norm"].append(relative(at, norm, reference.gradient_norms[step]))
            if rank.number == 0:
                ticks.tick()
        scales = weight_scales(reference.weights, reference.gradients, job.training.optimization)
        deviations["weight"] += _deviations(engine.parameters, engine.weight, reference.weights, scales)
    return {kind: Deviation.worst(several) for kind, several in deviations.items()}


def _deviations(
    parameters: Iterable[HeldParameter],
    held: Callable[[HeldParameter], Tensor | None],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, float],
    at: str = "",
) -> list[Deviation]:
    """For each parameter, this rank's part of its gradient or weight against the whole one."""
    deviations = []
    for parameter in parameters:
        tensor = held(parameter)
        if tensor is None:
            deviations.append(Deviation(float("inf"), f"{parameter.name}{at}: no gradient"))
            continue
        name = reference_name(parameter.name, expected)
        deviations.append(deviation(f"{parameter.name}{at}", tensor, parameter.part, expected[name], scales[name]))
    return deviations
