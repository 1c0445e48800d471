"""Whether a job fits its devices: the one answer that `analyze`, `plan`, `train` and `dryrun` give.

A device has the memory that a process can have of it. A plan does not fill it to the last byte: the prediction of
tensors is off by what published runs show (`error_bar`), and the memory that the upper end of that bar would take stays
free. A job beyond that is tight; one whose prediction is larger than the device does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.cost.accuracy.residuals import error_bar
from shardwise.cost.memory.device import DeviceMemory, device_memories, peak_memory
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes

Fit = Literal["fits", "tight", "does not fit"]
FITS: tuple[Fit, ...] = ("fits", "tight", "does not fit")  # from the best


@dataclass(frozen=True)
class Room:
    """Bytes of one device: ``usable_bytes`` of it can be had, ``planned_bytes`` is what a prediction may take.

    ``host_bytes`` are its part of the node's memory. ``is_capped`` by the user, who then decides what stays free.
    """

    usable_bytes: float
    planned_bytes: float
    host_bytes: float
    is_capped: bool = False

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
    tensors = max(0.0, usable - device.framework_memory)
    planned = min(usable, device.framework_memory) + tensors / (1 + error_bar(job).memory_high)
    return Room(usable, planned, host)


def fit_of(job: Job, cap_bytes: float | None = None) -> Fit:
    """The worst of the job's devices."""
    room = room_of(job, cap_bytes)
    return max((room.fit(memory) for memory in device_memories(job)), key=FITS.index)


def tight_words(job: Job) -> str:
    """The note on a job that fits only without the margin that plans keep."""
    room = room_of(job)
    needed, usable = readable_bytes(peak_memory(job).total), readable_bytes(room.usable_bytes)
    kept = f"plans leave {readable_bytes(room.margin_bytes)} free, for the error bar of memory"
    return f"tight: a device needs {needed} of {usable}; {kept}"
