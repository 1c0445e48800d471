"""A model in the pieces that a pipeline stage is made of: embedding, layers in model order, head; what each costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.cost.memory.device import activation_bytes, memory_of_rank
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.memory.states import rank_state_bytes, sharding_of
from shardwise.cost.memory.transient import gathered_bytes
from shardwise.cost.prediction import rank_prediction
from shardwise.layout.stages import RankContents, rank_contents, stages_of_rank
from shardwise.pipeline import Layers, layers_of
from shardwise.spec.job import Job
from shardwise.spec.parameters import layer_parameters
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class Piece:
    """``seconds`` of one microbatch, all passes, exposed communication included; bytes that stay the whole step, and
    bytes per microbatch in flight."""

    seconds: float
    bytes: float
    activation_bytes: float

    def __add__(self, other: Piece) -> Piece:
        return Piece(
            self.seconds + other.seconds, self.bytes + other.bytes, self.activation_bytes + other.activation_bytes
        )

    def __truediv__(self, count: int) -> Piece:
        return Piece(self.seconds / count, self.bytes / count, self.activation_bytes / count)


NOTHING = Piece(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Pieces:
    """What a stage costs is what its pieces cost."""

    embedding: Piece
    layers: tuple[Piece, ...]
    head: Piece

    @cached_property
    def mean_layer(self) -> Piece:
        return sum(self.layers, NOTHING) / len(self.layers)

    @property
    def row(self) -> Layers:
        """For the partitioner, with the ends as pieces of their own: an end stage may hold nothing else."""
        row = (self.embedding, *self.layers, self.head)
        columns = zip(*((one.seconds, one.bytes, one.activation_bytes) for one in row))
        return layers_of(*columns)

    def stage(self, counts: tuple[int, ...], stage: int) -> Piece:
        """What one stage of a division holds."""
        first = sum(counts[:stage])
        held = sum(self.layers[first : first + counts[stage]], NOTHING)
        held = held + self.embedding if stage == 0 else held
        return held + self.head if stage == len(counts) - 1 else held

    def of_rank(self, job: Job, rank: int) -> Piece:
        """What a rank holds of a job that says how many layers each stage has."""
        counts = stage_layer_counts(job.model, job.strategy)
        return sum((self.stage(counts, stage) for stage in stages_of_rank(job, rank)), NOTHING)


def layer_counts(row_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Layers per stage of a division of ``Pieces.row``: the ends are no layers."""
    return (row_counts[0] - 1, *row_counts[1:-1], row_counts[-1] - 1)


def pieces_of(job: Job, timed: Pieces | None = None, timed_ends: Pieces | None = None) -> Pieces:
    """The pieces of a job with a pipeline, as its device and network run them.

    ``timed``: those of a job that divides its states otherwise and is the same else, whose seconds are taken;
    ``timed_ends``: those of one whose layers may differ too.
    """
    model, ends = job.model, timed or timed_ends
    apart = job.unchecked(strategy=_plain(job, 3, (0, model.layers, 0)))
    embedding = _piece(job, rank_contents(apart, 0), ends.embedding if ends else None)
    head = _piece(job, rank_contents(apart, 2), ends.head if ends else None)
    if (
        not job.strategy.schedule_record.forwards_first
    ):  # the loss of a microbatch is followed at once by its backward pass
        head = Piece(head.seconds, head.bytes + head.activation_bytes, 0.0)
    kinds: dict[bool, Piece] = {}
    for index, moe in enumerate(map(model.is_moe_layer, range(model.layers))):
        if moe not in kinds:
            kinds[moe] = _layer(job, moe, timed.layers[index] if timed else None)
    return Pieces(embedding, tuple(kinds[model.is_moe_layer(index)] for index in range(model.layers)), head)


def _plain(job: Job, pp: int, counts: tuple[int, ...]) -> Strategy:
    return job.strategy.unchecked(pp=pp, schedule=PLAIN, interleave=1, stage_layers=counts)


def _layer(job: Job, moe: bool, timed: Piece | None) -> Piece:
    """One layer among as many as a rank has: recompute may be of some of them."""
    strategy, count = job.strategy, max(1, job.model.layers // job.strategy.pp)
    each = layer_parameters(
        job.model,
        moe=moe,
        tensor_parallel=strategy.tp,
        expert_parallel=strategy.ep,
        expert_tensor_parallel=strategy.expert_tensor_parallel,
    )
    parameters = (count * (each.dense - each.norms), count * each.norms, count * each.experts)
    all_of_them = RankContents(1, 0 if moe else count, count if moe else 0, False, False, *parameters)
    one = _piece(job, all_of_them, timed) / count
    return one if timed is None else replace(one, seconds=timed.seconds)


def _piece(job: Job, contents: RankContents, timed: Piece | None) -> Piece:
    training, strategy, sharding = job.training, job.strategy, sharding_of(job.strategy)
    stay = float(rank_state_bytes(contents, sharding, training.precision, training.optimizer))
    if strategy.keep_parameters:  # else a rank gathers a layer at a time, however many it has
        stay += float(gathered_bytes(contents, sharding, training.recipe))
    one_microbatch = job.unchecked(strategy=_plain(job, 1, (job.model.layers,)))
    kept = activation_bytes(one_microbatch, contents) * (1 - strategy.offload.activations)
    seconds = _seconds(job, contents) if timed is None else timed.seconds
    return Piece(seconds, stay, kept)


def _seconds(job: Job, contents: RankContents) -> float:
    """Without what the calls of a rank cost whatever it holds (`stage_seconds`)."""
    calls = 2 * job.strategy.chunks_per_rank * job.cluster.device.efficiency.stage_call_seconds
    contents = replace(contents, rank=min(contents.rank, job.strategy.pp - 1))
    return max(0.0, rank_prediction(job, contents).microbatch_seconds - calls)


def room_for_pieces(job: Job, pieces: Pieces, rank: int, capacity_bytes: float) -> float:
    """What is left to the pieces of a rank: the device without what is there whatever the rank holds."""
    held = pieces.of_rank(job, rank)
    own = held.bytes + microbatches_in_flight(job, rank) * held.activation_bytes
    return capacity_bytes - (memory_of_rank(job, rank).total - own)
