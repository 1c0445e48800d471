"""A layout in FP8 against the single process in fp32: it may be about as far off as one process in FP8 is.

Both FP8 runs send every token to the experts that it has in the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.engine.parameters import divided_as, local
from shardwise.engine.world import joined
from shardwise.launch.pool import WorkerPlace
from shardwise.measure.reference import (
    Deviation,
    Reference,
    hold_routes,
    largest_of_layers,
    reference_name,
    sample_engine,
    share,
)
from shardwise.measure.smaller import cluster_of
from shardwise.models.initialise import is_stack_of_experts
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

Tick = Callable[[], None]  # after each step
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


def write_narrow(
    place: WorkerPlace, job: Job, steps: int, seed: int, path: str, narrow_path: str, device: str, tick: Tick
) -> None:
    torch.set_num_threads(1)
    reference = Reference(**torch.load(path, mmap=True, weights_only=False))
    with joined(0, 1, f"{narrow_path}.meeting", device=device):
        torch.save(asdict(_run_narrow(job, steps, seed, reference, device, tick)), narrow_path)


def compare_narrow(
    place: WorkerPlace, job: Job, steps: int, seed: int, path: str, narrow_path: str, device: str, tick: Tick
) -> dict[str, Deviation]:
    """How far training in FP8 is from the reference; gradients of each parameter, or of each expert, by their norm.

    Relative to the reference, on a scale that is widened if one process in FP8 is further off than half of a bound.
    """
    torch.set_num_threads(1)
    reference = Reference(**torch.load(path, mmap=True, weights_only=False))
    alone = _Narrow(**torch.load(narrow_path, weights_only=False))
    with joined(place.rank, place.world, place.rendezvous_file, device=device):
        mine = _run_narrow(job, steps, seed, reference, device, tick if place.rank == 0 else lambda: None)
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
    for held in engine.parameters:
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
