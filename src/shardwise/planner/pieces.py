"""A model in the pieces that a pipeline stage is made of: embedding, layers in model order, head; what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.cost.in_flight import chunks_in_flight
from shardwise.cost.memory import activation_bytes, memory_of_rank
from shardwise.cost.prediction import rank_prediction
from shardwise.cost.stages import RankContents, chunk_of_rank, rank_contents
from shardwise.cost.states import rank_state_bytes, sharding_of
from shardwise.pipeline import Layers, layers_of
from shardwise.spec.job import Job
from shardwise.spec.parameters import layer_parameters
from shardwise.spec.rules import stage_layer_counts
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
            self.seconds + other.seconds,
            self.bytes + other.bytes,
            self.activation_bytes + other.activation_bytes,
        )


NOTHING = Piece(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Pieces:
    """What a stage costs is what its pieces cost."""

    embedding: Piece
    layers: tuple[Piece, ...]
    head: Piece

    def stage(self, counts: tuple[int, ...], stage: int) -> Piece:
        """What one stage of a division holds."""
        first = sum(counts[:stage])
        held = sum(self.layers[first : first + counts[stage]], NOTHING)
        held = held + self.embedding if stage == 0 else held
        return held + self.head if stage == len(counts) - 1 else held

    def slowest_rank_seconds(self, job: Job) -> float:
        """One microbatch on the slowest rank of a job that divides its layers as it says."""
        counts = stage_layer_counts(job.model, job.strategy)
        ranks = (chunk_of_rank(job, rank) for rank in range(job.strategy.pp))
        return max(sum(self.stage(counts, stage).seconds for stage in stages) for stages in ranks)

    @property
    def row(self) -> Layers:
        """For the partitioner, with the ends as pieces of their own: an end stage may hold nothing else."""
        row = (self.embedding, *self.layers, self.head)
        columns = zip(*((one.seconds, one.bytes, one.activation_bytes) for one in row))
        return layers_of(*columns)

    @cached_property
    def mean_layer(self) -> Piece:
        total, count = sum(self.layers, NOTHING), len(self.layers)
        return Piece(total.seconds / count, total.bytes / count, total.activation_bytes / count)


def layer_counts(row_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Layers per stage of a division of ``Pieces.row``: the ends are no layers."""
    return (row_counts[0] - 1, *row_counts[1:-1], row_counts[-1] - 1)


def pieces_of(job: Job) -> Pieces:
    """The pieces of a job with a pipeline, as its device and network run them."""
    model = job.model
    kinds = {moe: _layer(job, moe) for moe in {model.is_moe_layer(index) for index in range(model.layers)}}
    ends = job.unchecked(strategy=_plain(job, 3, (0, model.layers, 0)))
    head = _piece(job, rank_contents(ends, 2))
    if job.strategy.schedule != "gpipe":  # the loss of a microbatch is followed at once by its backward pass
        head = Piece(head.seconds, head.bytes + head.activation_bytes, 0.0)
    layers = tuple(kinds[model.is_moe_layer(index)] for index in range(model.layers))
    return Pieces(_piece(job, rank_contents(ends, 0)), layers, head)


def _plain(job: Job, pp: int, counts: tuple[int, ...]) -> Strategy:
    return job.strategy.unchecked(pp=pp, schedule="1f1b", interleave=1, stage_layers=counts)


def _layer(job: Job, moe: bool) -> Piece:
    """One layer among as many as a rank has: recompute may be of some of them."""
    strategy, count = job.strategy, max(1, job.model.layers // job.strategy.pp)
    parameters = layer_parameters(
        job.model,
        moe=moe,
        tensor_parallel=strategy.tp,
        expert_parallel=strategy.ep,
        expert_tensor_parallel=strategy.expert_tensor_parallel,
    )
    matrices, norms, experts = (
        count * each for each in (parameters.dense - parameters.norms, parameters.norms, parameters.experts)
    )
    contents = RankContents(1, 0 if moe else count, count if moe else 0, False, False, matrices, norms, experts)
    all_of_them = _piece(job, contents)
    return Piece(*(one / count for one in (all_of_them.seconds, all_of_them.bytes, all_of_them.activation_bytes)))


def _piece(job: Job, contents: RankContents) -> Piece:
    device, chunks = job.cluster.device, job.strategy.chunks_per_rank
    calls = 2 * chunks * device.efficiency.stage_call_seconds  # of the rank, whatever it holds (`stage_seconds`)
    seconds = rank_prediction(job, contents).microbatch_seconds - calls
    training, strategy = job.training, job.strategy
    states = rank_state_bytes(contents, sharding_of(strategy), training.precision, training.optimizer)
    one_microbatch = job.unchecked(strategy=_plain(job, 1, (job.model.layers,)))
    kept = activation_bytes(one_microbatch, contents) * (1 - strategy.offload.activations)
    return Piece(max(0.0, seconds), float(states), kept)


def in_flight(job: Job, rank: int) -> float:
    """Microbatches of the whole rank that it holds at its peak."""
    return chunks_in_flight(job, rank) / job.strategy.chunks_per_rank


def room_for_pieces(job: Job, pieces: Pieces, rank: int, capacity_bytes: float) -> float:
    """What is left to the pieces of a rank: the device without what is there whatever the rank holds."""
    counts = stage_layer_counts(job.model, job.strategy)
    held = sum((pieces.stage(counts, stage) for stage in chunk_of_rank(job, rank)), NOTHING)
    own = held.bytes + in_flight(job, rank) * held.activation_bytes
    return capacity_bytes - (memory_of_rank(job, rank).total - own)
