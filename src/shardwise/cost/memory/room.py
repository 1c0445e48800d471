"""Whether a job fits its devices: the one answer that `analyze`, `plan`, `train` and `dryrun` give.

What counts is the memory that a process can have of a device. A plan does not fill it to the last byte: published runs
show how far predictions of tensors are off, and so much stays free that a run exceeds the device with a probability of
`memory_risk` at most (`memory_quantile`). A job beyond that is tight, even one predicted to be larger than the device
by no more than its error bar; only beyond that it does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from typing import Literal

from shardwise.cost.memory.device import DeviceMemory, device_memories
from shardwise.cost.memory.head import logits_bytes
from shardwise.cost.memory.in_flight import chunks_in_flight
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import RankContents, rank_contents
from shardwise.layout.views import ranks_to_price
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes
from shardwise.uncertainty.residuals import Standing, memory_band, memory_quantile, standing_of

Fit = Literal["fits", "tight", "does not fit"]
FITS: tuple[Fit, ...] = ("fits", "tight", "does not fit")  # from the best
# Risks that are tried to find the probability with which a job fits.
_RISKS = (0.01, 0.02, 0.03, 0.05, 0.07, *(step / 20 for step in range(2, 20)))


@dataclass(frozen=True)
class Room:
    """How many bytes a job may take of one device and of its host."""

    usable_bytes: float  # what a process can have of the device
    planned_bytes: float  # what a prediction may take, so that the job fits with the margin that plans keep
    refused_bytes: float  # a larger prediction does not fit, even if the truth is at the low end of its error bar
    host_bytes: float  # the device's part of its node's memory
    is_capped: bool = False  # the user caps the memory, and so decides what stays free

    @property
    def margin_bytes(self) -> float:
        return self.usable_bytes - self.planned_bytes

    def fit(self, memory: DeviceMemory) -> Fit:
        if memory.total > self.refused_bytes or memory.host > self.host_bytes:
            return "does not fit"
        return "fits" if memory.total <= self.planned_bytes else "tight"


def room_of(job: Job, cap_bytes: float | None = None) -> Room:
    """The room of the job's devices; ``cap_bytes`` of each at most, and then without a margin."""
    device = job.cluster.device
    usable = device.usable_memory if cap_bytes is None else min(device.usable_memory, cap_bytes)
    # Where offload goes to a disk, the host's memory is not a limit.
    host = float("inf") if job.strategy.offload.target == "nvme" else job.cluster.host_memory_per_device
    if cap_bytes is not None:
        return Room(usable, usable, usable, host, is_capped=True)
    planned = min(usable, _planned(job, usable, job.run.memory_risk))
    return Room(usable, planned, _prediction_of(job, usable, _low_end(standing_of(job))), host)


def _planned(job: Job, usable: float, risk: float) -> float:
    """The largest prediction that exceeds ``usable`` bytes with probability ``risk`` at most."""
    return _prediction_of(job, usable, memory_quantile(job, risk))


def _prediction_of(job: Job, needed: float, factor: float) -> float:
    """The prediction for a job that needs so many bytes, if its tensors are ``factor`` times those predicted."""
    allowance = job.cluster.device.framework_memory
    return min(needed, allowance) + max(0.0, needed - allowance) / factor


@cache
def _low_end(standing: Standing) -> float:
    """Of the error bar of tensors, as a factor on their prediction."""
    return exp(-memory_band(standing).width)


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


# -- What frameworks report as memory: tensors and workspaces, or all that PyTorch's caching allocator reserved
# `torch.cuda.max_memory_reserved` counts the segments taken from the device, freed blocks inside them included.

_MIB = 2**20


def allocated_bytes(job: Job, memory: DeviceMemory) -> float:
    """Tensors and workspaces: what `torch.cuda.max_memory_allocated` counts."""
    return memory.total - memory.allowance + workspace_bytes(job)


def workspace_bytes(job: Job) -> float:
    """Workspaces that count as allocated, a part of the framework's allowance.

    PyTorch has one for the cuBLAS handle of each of the two threads that run a pass (ATen/cuda/CublasHandlePool.cpp:
    32 MiB from Hopper on, 8.125 MiB before, 32 MiB with CUBLAS_WORKSPACE_CONFIG=:4096:8), Transformer Engine one of
    32 or 4 MiB (pytorch/module/base.py, get_cublas_workspace_size_bytes) and four more of them for grouped matmuls
    (get_multi_stream_cublas_workspace).
    """
    device, stack = job.cluster.device, job.stack
    if device.vendor != "nvidia":
        return 0.0
    large = "fp8" in device.peak  # from Hopper on
    of_torch = 32 * _MIB if large or stack.deterministic else 8.125 * _MIB
    of_engine = (32 if large else 4) * _MIB if stack.layers == "transformer engine" else 0.0
    grouped = job.model.moe is not None and stack.experts == "grouped"
    return 2 * of_torch + (5 if grouped else 1) * of_engine


# Reserved over allocated, less one: the mean of the steps in validation/reserved.csv that wait for no collective.
FRAGMENTATION = 0.042
# Launches that CUDA queues before the host blocks; confirmed by the steps of the same table that do wait.
LAUNCH_QUEUE = 1024


def reserved_bytes(job: Job, memory: DeviceMemory) -> float:
    """Bytes reserved at the peak that ``memory`` describes.

    Segments of fixed size leave holes everywhere (`FRAGMENTATION`); expandable segments only those named here.
    """
    tensors = memory.total - memory.allowance
    contents = rank_contents(job, memory.pipeline_rank)
    pools = _gather_pool(job, contents) + _reduction_pool(job, contents)
    if job.stack.allocator == "expandable":
        return tensors + pools + _logits_hole(job, contents)
    held = tensors + pools + late_gradient_bytes(job, memory) + waiting_bytes(job, contents)
    return held * (1 + FRAGMENTATION) + _shifted_logits_holes(job, contents)


def waiting_bytes(job: Job, contents: RankContents) -> float:
    """Freed tensors that cannot be used again yet, because a collective's stream may still read them.

    The host runs ahead of the device by a queue of launches. Of the layers in between, the whole outputs of the two
    row-parallel matmuls wait for their reduce-scatter (ProcessGroupNCCL records streams unless told otherwise). A
    message to the next stage waits for the device, so no more layers than a stage has.
    """
    strategy = job.strategy
    if not job.stack.layer_launches or strategy.tp == 1 or not strategy.sequence_parallel:
        return 0.0
    layers = min(contents.layers, LAUNCH_QUEUE / job.stack.layer_launches)
    return 2 * layers * job.microbatch_tokens * job.model.hidden * job.training.recipe.communication


def late_gradient_bytes(job: Job, memory: DeviceMemory) -> float:
    """16-bit gradients that are added to the fp32 ones only when a backward pass is over.

    They take the place of its activations, and count as far as they are larger. Without ZeRO the buckets of
    DistributedDataParallel stay too.
    """
    if not job.stack.late_gradients:
        return 0.0
    gradients = 2 * rank_contents(job, memory.pipeline_rank).total
    of_one_microbatch = memory.activations * job.strategy.chunks_per_rank / chunks_in_flight(job, memory.pipeline_rank)
    in_buckets = job.strategy.zero == 0 and job.strategy.data_parallel > 1
    return max(0.0, gradients - of_one_microbatch) + (gradients if in_buckets else 0.0)


def _logits_hole(job: Job, contents: RankContents) -> float:
    """The hole that the 16-bit logits leave, freed before backward: too small for an fp32 gradient, so never filled."""
    plain = contents.has_head and job.stack.loss == "plain"
    return logits_bytes(job, job.training.recipe.activation) if plain else 0.0


def _shifted_logits_holes(job: Job, contents: RankContents) -> float:
    """Blocks that are free when the gradient of all fp32 logits is made, but too small for it.

    The 16-bit logits, and the logarithm of the softmax of those without the last token; the gradient of these has
    taken the block of their copy.
    """
    plain = contents.has_head and job.stack.loss == "plain" and job.stack.shifted_logits
    return logits_bytes(job, job.training.recipe.activation + 4) if plain else 0.0


def _gather_pool(job: Job, contents: RankContents) -> float:
    """Blocks of the gathers' own stream: FSDP2 gathers embedding and head, or a layer, there and copies them out."""
    sharding = sharding_of(job.strategy)
    if sharding.zero != 3 or sharding.shards == 1:
        return 0.0
    layer = contents.layer_matrices / max(1, contents.layers)
    return (contents.others + layer) * job.recipe.gathered


def _reduction_pool(job: Job, contents: RankContents) -> float:
    """Shards of gradients that were whole during the passes; FSDP2 makes them on a stream of their own as well."""
    sharding, strategy = sharding_of(job.strategy), job.strategy
    if strategy.zero < 2 or strategy.gradients_sharded or sharding.shards == 1:
        return 0.0
    return float(contents.total * job.recipe.gradient / sharding.shards)
