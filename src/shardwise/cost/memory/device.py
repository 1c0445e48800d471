"""The memory of one device, split into its parts, for every kind of pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwise.cost.memory.activations import (
    embedding_activation_bytes,
    head_activation_bytes,
    layer_activation_bytes,
)
from shardwise.cost.memory.in_flight import chunks_in_flight
from shardwise.cost.memory.offload import Travel
from shardwise.cost.memory.states import StateBytes, rank_state_bytes, sharding_of, state_bytes
from shardwise.cost.memory.transient import (
    NOTHING_ABSENT,
    Absent,
    Moment,
    divided_units,
    gathered_bytes,
    gradients_absent,
    head_share,
    kinds_of,
    left_over,
    moments_of,
    reduces_in_turn,
    transient_bytes,
)
from shardwise.cost.recompute import fully_recomputed_share, some_layers_stay_whole
from shardwise.layout.stages import RankContents, pipeline_ranks_to_price, rank_contents
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.job import Job
from shardwise.spec.training import OPTIMIZERS, RECIPES


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device of a pipeline rank at its peak; ``host`` is what offload moved off it."""

    pipeline_rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    recomputed: float
    gathered: float
    communication: float
    temporary: float
    allowance: float
    host: float

    PARTS = (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "recomputed",
        "gathered",
        "communication",
        "temporary",
        "allowance",
    )

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part) for part in self.PARTS))

    def __float__(self) -> float:
        return self.total

    def to_dict(self) -> dict[str, float]:
        parts = {f"{f.name}_bytes": getattr(self, f.name) for f in fields(self) if f.name != "pipeline_rank"}
        return {"pipeline_rank": self.pipeline_rank, **parts, "total_bytes": self.total}


def memory_of_rank(job: Job, pipeline_rank: int) -> DeviceMemory:
    """The peak memory of one device of a pipeline rank."""
    contents = rank_contents(job, pipeline_rank)
    return max(memory_at_moments(job, contents).values(), key=lambda memory: memory.total)


def memory_at_moments(job: Job, contents: RankContents) -> dict[Moment, DeviceMemory]:
    """One by itself, or at each of the moments that a rank has."""
    moments = [one for one in moments_of(job.stack) if one != "loss" or contents.has_head]
    return {moment: _memory_at(job, contents, moment) for moment in moments}


def _memory_at(job: Job, contents: RankContents, moment: Moment) -> DeviceMemory:
    sharding = sharding_of(job.strategy)
    states = rank_state_bytes(contents, sharding, job.recipe, job.training.optimizer)
    share = job.strategy.offload.activations
    activations = activation_bytes(job, contents)
    if moment == "layer" and contents.has_head:
        activations -= head_activation_bytes(job)
    if share:
        activations = _left_by_offload(job, contents, activations, moment)
    communication, temporary = transient_bytes(job, kinds_of(contents), moment, has_head=contents.has_head)
    recomputed = 0.0 if moment == "loss" else _recomputed_layer_bytes(job, contents)
    late = recomputed if some_layers_stay_whole(job, contents) else 0.0
    absent = _gradients_absent(job, contents, states.gradients, moment)
    not_yet = absent.not_yet(late, activations / _microbatches_in_flight(job, contents))
    gathered = gathered_bytes(contents, sharding, job.recipe, moment, tied=job.model.tied_embeddings)
    if moment == "loss" and _is_alone(job, contents):
        gathered -= left_over(divided_units(contents, sharding, tied=job.model.tied_embeddings), sharding, job.recipe)
    return DeviceMemory(
        pipeline_rank=contents.rank,
        weights=states.weights,
        gradients=states.gradients - absent.whole - min(absent.growing, not_yet),
        optimizer=states.optimizer,
        activations=activations,
        recomputed=recomputed - max(0.0, not_yet - absent.growing),
        gathered=gathered,
        communication=communication,
        temporary=temporary,
        allowance=job.cluster.device.framework_memory,
        host=states.offloaded + share * travel_of(job, contents, moment).away,
    )


def _left_by_offload(job: Job, contents: RankContents, activations: float, moment: Moment) -> float:
    return float(travel_of(job, contents, moment).on_device(activations, job.strategy.offload.activations, moment))


def travel_of(job: Job, contents: RankContents, moment: Moment) -> Travel:
    """Of all that layers keep; and, where no moments are told apart, the head."""
    in_flight = _microbatches_in_flight(job, contents)
    head = head_activation_bytes(job) if moment != "together" and contents.has_head else 0.0
    return Travel((activation_bytes(job, contents) - head) / in_flight, in_flight, contents.layers)


def _gradients_absent(job: Job, contents: RankContents, gradients: float, moment: Moment) -> Absent:
    if moment == "together" or not _is_alone(job, contents):
        return NOTHING_ABSENT
    strategy = job.strategy
    in_turn = bool(reduces_in_turn(strategy.pp, strategy.schedule, job.microbatches))
    absent = gradients_absent(gradients, strategy.zero, strategy, in_turn)
    after_a_loss = moment == "layer" or (job.microbatches > 1 and not strategy.schedule_record.forwards_first)
    there = head_share(contents, tied=job.model.tied_embeddings) if after_a_loss else 0.0
    return Absent(absent.whole, absent.growing * (1 - there))


def _is_alone(job: Job, contents: RankContents) -> bool:
    """No microbatch has gone back before the peak."""
    return job.microbatches <= _microbatches_in_flight(job, contents)


def _microbatches_in_flight(job: Job, contents: RankContents) -> float:
    return chunks_in_flight(job, contents.rank) / job.strategy.chunks_per_rank


def _head_bytes(job: Job, contents: RankContents) -> float:
    """Activations of the head that a rank holds at its peak: the loss of a microbatch is followed by its backward."""
    if not contents.has_head:
        return 0.0
    in_flight = _microbatches_in_flight(job, contents)
    return head_activation_bytes(job) * (in_flight if job.strategy.schedule_record.forwards_first else 1)


def device_memories(job: Job) -> tuple[DeviceMemory, ...]:
    """Memory of the pipeline ranks whose figures differ."""
    return tuple(memory_of_rank(job, rank) for rank in pipeline_ranks_to_price(job))


def peak_memory(job: Job) -> DeviceMemory:
    """The fullest device of the job."""
    return max(device_memories(job), key=lambda memory: memory.total)


def activation_bytes(job: Job, contents: RankContents) -> float:
    """Activations alive on a rank at its peak: its layers times the microbatches in flight, and the ends."""
    in_flight = _microbatches_in_flight(job, contents)
    layers = _kept_by_layers(job, contents) * in_flight
    if contents.has_embedding:
        layers += embedding_activation_bytes(job) * in_flight
    return layers + _head_bytes(job, contents)


def _kept_by_layers(job: Job, contents: RankContents) -> float:
    recomputed_share = fully_recomputed_share(job, contents)
    kept = 0.0
    for count, moe in ((contents.dense_layers, False), (contents.moe_layers, True)):
        if not count:
            continue
        if job.strategy.recompute == "full":
            whole = layer_activation_bytes(job, moe=moe, recompute="none")
            checkpoint = layer_activation_bytes(job, moe=moe, recompute="full")
            kept += count * (recomputed_share * checkpoint + (1 - recomputed_share) * whole)
        else:
            kept += count * layer_activation_bytes(job, moe=moe)
    return kept


def _recomputed_layer_bytes(job: Job, contents: RankContents) -> float:
    """Tensors that recompute brings back while one layer runs its backward pass."""
    if job.strategy.recompute == "none" or job.strategy.recompute_layers == 0:
        return 0.0
    kinds = kinds_of(contents)
    brought_back = (
        layer_activation_bytes(job, moe=moe, recompute="none") - layer_activation_bytes(job, moe=moe) for moe in kinds
    )
    return max(brought_back, default=0.0)


def per_gpu_memory_bytes(
    job: Job | None = None,
    *,
    parameters: float | None = None,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> DeviceMemory | StateBytes:
    """Memory of the fullest device of a job; or, from a bare parameter count, its model states alone.

    >>> per_gpu_memory_bytes(parameters=7.5e9, dp=64, zero=1).total / 1e9   # ZeRO, Figure 1
    31.40625
    """
    if job is not None:
        return peak_memory(job)
    if parameters is None:
        raise SpecError("parameters", "neither a job nor a parameter count is given", "give one of them")
    for field, value, known in (("precision", precision, RECIPES), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in known:
            raise SpecError(field, f"unknown {field} {shown(value)}", nearest_name(value, known))
    return state_bytes(parameters / (tp * pp), precision=precision, optimizer=optimizer, zero=zero, shards=dp)
