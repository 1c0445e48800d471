"""Whether a job fits its devices: the one answer that `analyze`, `plan`, `train` and `dryrun` give.

What counts is the memory that a process can have of a device. A plan does not fill it to the last byte: published runs
show how far predictions of tensors are off, and so much stays free that a run exceeds the device with a probability of
`memory_risk` at most (`memory_quantile`). A job beyond that is tight; one predicted to be larger than the device does
not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.cost.memory.device import DeviceMemory, device_memories
from shardwise.layout.views import ranks_to_price
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes
from shardwise.uncertainty.residuals import memory_quantile

Fit = Literal["fits", "tight", "does not fit"]
FITS: tuple[Fit, ...] = ("fits", "tight", "does not fit")  # from the best
# Risks that are tried to find the probability with which a job fits.
_RISKS = (0.01, 0.02, 0.03, 0.05, 0.07, *(step / 20 for step in range(2, 20)))


@dataclass(frozen=True)
class Room:
    """How many bytes a job may take of one device and of its host."""

    usable_bytes: float
    """What a process can have of the device."""
    planned_bytes: float
    """What a prediction may take, so that the job fits with the margin that plans keep."""
    host_bytes: float
    """The device's part of its node's memory."""
    is_capped: bool = False
    """The user caps the memory, and so decides what stays free."""

    @property
    def margin_bytes(self) -> float:
        return self.usable_bytes - self.planned_bytes

    def fit(self, memory: DeviceMemory) -> Fit:
        if memory.total > self.usable_bytes or memory.host > self.host_bytes:
            return "does not fit"
        return "fits" if memory.total <= self.planned_bytes else "tight"


def room_of(job: Job, cap_bytes: float | None = None) -> Room:
    """The room of the job's devices; ``cap_bytes`` of each at most, and then without a margin."""
    device = job.cluster.device
    usable = device.usable_memory if cap_bytes is None else min(device.usable_memory, cap_bytes)
    # Where offload goes to a disk, the host's memory is no limit.
    host = float("inf") if job.strategy.offload.target == "nvme" else job.cluster.host_memory_per_device
    if cap_bytes is not None:
        return Room(usable, usable, host, is_capped=True)
    return Room(usable, min(usable, _planned(job, usable, job.run.memory_risk)), host)


def _planned(job: Job, usable: float, risk: float) -> float:
    """The largest prediction that exceeds ``usable`` bytes with probability ``risk`` at most."""
    allowance = job.cluster.device.framework_memory
    return min(usable, allowance) + max(0.0, usable - allowance) / memory_quantile(job, risk)


def fit_of(job: Job, cap_bytes: float | None = None) -> Fit:
    """The worst of the job's devices."""
    views = (view for view, _ in ranks_to_price(job))
    fits = (room_of(view, cap_bytes).fit(memory) for view, memory in zip(views, device_memories(job)))
    return max(fits, key=FITS.index)


def tightest(job: Job, memories: Sequence[DeviceMemory]) -> tuple[Job, DeviceMemory]:
    """The one of `device_memories` that fills most of its device, and the job as its rank sees it."""
    views = (view for view, _ in ranks_to_price(job))
    return max(zip(views, memories), key=lambda pair: pair[1].total / pair[0].cluster.device.usable_memory)


def fit_probability(job: Job, memory_bytes: float) -> float:
    """How likely a device of the job has room for what was predicted as ``memory_bytes``.

    A lower bound, in steps, since published runs are counted. 0 stands for less than the lowest step.
    """
    usable = job.cluster.device.usable_memory
    risks = sorted((*_RISKS, job.run.memory_risk))
    return 1 - next((risk for risk in risks if memory_bytes <= _planned(job, usable, risk)), 1.0)


def probability_words(probability: float) -> str:
    """ "95%"; for 0, "less than" the lowest step of `fit_probability`."""
    return f"{100 * probability:.3g}%" if probability > 0 else f"less than {1 - _RISKS[-1]:.0%}"


def tight_words(job: Job) -> str:
    """The note on a job that fits only without the margin that plans keep."""
    job, memory = tightest(job, device_memories(job))
    room, needed = room_of(job), memory.total
    likely = probability_words(fit_probability(job, needed))
    size = f"a device needs {readable_bytes(needed)} of {readable_bytes(room.usable_bytes)}"
    return f"tight: {size}, which fits with {likely} probability; {margin_words(job)}"


def margin_words(job: Job) -> str:
    """How much plans keep free, and to what end."""
    likely = probability_words(1 - job.run.memory_risk)
    return f"plans leave {readable_bytes(room_of(job).margin_bytes)} free, to fit with {likely}"
