"""Divides the pieces of a model (embedding, layers, head) into stages by their time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from shardwise.cost.compute.operators import gradient_share
from shardwise.cost.memory.device import activation_bytes, memory_of_rank
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.memory.states import rank_state_bytes
from shardwise.cost.memory.transient import gathered_bytes
from shardwise.cost.step.prediction import rank_prediction
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import RankContents, layers_of_kind, rank_contents, stages_of_rank, tuned_over
from shardwise.pipeline import Layers, Place, layers_of, partition_over
from shardwise.planner.candidate import Candidate, candidate
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.parameters import tuned_layer
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.schedules import PLAIN
from shardwise.spec.strategy import Strategy


@dataclass(frozen=True)
class Piece:
    """What a part of the model costs the rank that holds it."""

    seconds: float  # per microbatch: all passes, exposed communication included
    bytes: float  # held during the whole step
    activation_bytes: float  # per microbatch in flight

    def __add__(self, other: Piece) -> Piece:
        return Piece(*map(add, vars(self).values(), vars(other).values()))

    def __truediv__(self, count: int) -> Piece:
        return Piece(*(figure / count for figure in vars(self).values()))


NOTHING = Piece(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a model; a stage costs what its pieces cost."""

    embedding: Piece
    layers: tuple[Piece, ...]
    head: Piece

    @cached_property
    def mean_layer(self) -> Piece:
        return sum(self.layers, NOTHING) / len(self.layers)

    @property
    def row(self) -> Layers:
        """All pieces in a row, for the partitioner; embedding and head are pieces too, since an end stage may hold
        nothing else."""
        row = (self.embedding, *self.layers, self.head)
        return layers_of(*zip(*(vars(piece).values() for piece in row)))

    def stage(self, counts: tuple[int, ...], stage: int) -> Piece:
        """What one stage of a division holds."""
        first = sum(counts[:stage])
        held = sum(self.layers[first : first + counts[stage]], NOTHING)
        held = held + self.embedding if stage == 0 else held
        return held + self.head if stage == len(counts) - 1 else held

    def of_rank(self, job: Job, rank: int) -> Piece:
        """What a rank holds, given the stages of the job."""
        counts = stage_layer_counts(job.model, job.strategy)
        return sum((self.stage(counts, stage) for stage in stages_of_rank(job, rank)), NOTHING)


def pieces_of(job: Job, timed: Pieces | None = None, timed_ends: Pieces | None = None) -> Pieces:
    """The pieces of a job with a pipeline, as its device and network run them.

    ``timed`` are pieces of the same job with other sharding, whose seconds are reused; ``timed_ends`` are the same,
    used for embedding and head only.
    """
    model, ends = job.model, timed or timed_ends
    apart = job.unchecked(strategy=_plain(job, 3, (0, model.layers, 0)))
    embedding = _piece(job, rank_contents(apart, 0), ends.embedding if ends else None)
    head = _piece(job, rank_contents(apart, 2), ends.head if ends else None)
    if not job.strategy.schedule_record.forwards_first:  # each loss is followed at once by its backward pass
        head = Piece(head.seconds, head.bytes + head.activation_bytes, 0.0)
    kinds: dict[tuple[object, ...], Piece] = {}
    of_layers = []
    for index in range(model.layers):
        kind, own = model.every_layer[index], tuned_over(job, (index,))
        tuned = (kind, *job.training.tuning.kind_of(index, model))
        if tuned not in kinds:
            kinds[tuned] = _layer(own, kind, timed.layers[index] if timed else None)
        of_layers.append(kinds[tuned])
    return Pieces(embedding, tuple(of_layers), head)


def _plain(job: Job, pp: int, counts: tuple[int, ...]) -> Strategy:
    return job.strategy.unchecked(pp=pp, schedule=PLAIN, interleave=1, stage_layers=counts)


def _layer(job: Job, kind: LayerRecord, timed: Piece | None) -> Piece:
    """The mean layer of a rank: recompute may cover only some of its layers."""
    strategy, count = job.strategy, max(1, job.model.layers // job.strategy.pp)
    each = tuned_layer(
        job.model,
        job.training.tuning,
        layers_of_kind(job.model, kind),
        kind,
        tensor_parallel=strategy.tp,
        expert_parallel=strategy.ep,
        expert_tensor_parallel=strategy.expert_tensor_parallel,
    )
    parameters = [
        count * part
        for kept in (each.trained, each.frozen)
        for part in (kept.dense - kept.norms, kept.norms, kept.experts)
    ]
    flows = gradient_share(job.model, job.training.tuning)
    all_of_them = RankContents(1, ((kind, count),), False, False, *parameters)
    all_of_them = replace(all_of_them, frozen_above=flows * parameters[3], frozen_experts_above=flows * parameters[5])
    layer = _piece(job, all_of_them, timed) / count
    return layer if timed is None else replace(layer, seconds=timed.seconds)


def _piece(job: Job, contents: RankContents, timed: Piece | None) -> Piece:
    training, strategy, sharding = job.training, job.strategy, sharding_of(job.strategy)
    stay = float(rank_state_bytes(contents, sharding, job.recipe, training.optimizer))
    if strategy.keep_parameters:  # else a rank gathers a layer at a time, however many it has
        stay += float(gathered_bytes(contents, sharding, job.recipe))
    one_microbatch = job.unchecked(strategy=_plain(job, 1, (job.model.layers,)))
    kept = activation_bytes(one_microbatch, contents) * (1 - strategy.offload.activations)
    seconds = _seconds(job, contents) if timed is None else timed.seconds
    return Piece(seconds, stay, kept)


def _seconds(job: Job, contents: RankContents) -> float:
    """Seconds per microbatch, without the fixed cost of calling a stage (`stage_call_seconds`)."""
    calls = 2 * job.strategy.chunks_per_rank * job.cluster.device.efficiency.stage_call_seconds
    contents = replace(contents, rank=min(contents.rank, job.strategy.pp - 1))
    return max(0.0, rank_prediction(job, contents).microbatch_seconds - calls)


def room_for_pieces(job: Job, pieces: Pieces, rank: int, capacity_bytes: float) -> float:
    """Memory left for the pieces of a rank: that of the device, less what every rank holds besides."""
    held = pieces.of_rank(job, rank)
    own = held.bytes + microbatches_in_flight(job, rank) * held.activation_bytes
    return capacity_bytes - (memory_of_rank(job, rank).total - own)


MOST_CELLS = 20_000_000  # layers²·stages of the partitioner's tables, about a second; larger models keep even stages
WORTH = 0.001  # least gain for which uneven stages are taken


def with_best_stages(original: Candidate, capacity_bytes: float) -> Candidate:
    """The strategy with uneven stages if its simulated step then fits and is faster; else ``original`` itself."""
    best = original
    for job in _proposals(original.job, capacity_bytes):
        other = candidate(job)
        if other.step_seconds < best.step_seconds - WORTH * original.step_seconds and fits(job, capacity_bytes):
            best = other
    return best


def fits(job: Job, capacity_bytes: float) -> bool:
    """Whether every rank fits its device and its part of host memory."""
    memories = [memory_of_rank(job, rank) for rank in range(job.strategy.pp)]
    host_bytes = job.cluster.host_memory_per_device
    return all(memory.total <= capacity_bytes and memory.host <= host_bytes for memory in memories)


def _proposals(job: Job, capacity_bytes: float) -> Iterator[Job]:
    """The same job with other stages, whose slowest rank takes less time for a microbatch."""
    ranks = range(job.strategy.pp)
    if len(ranks) == 1 or job.model.layers**2 * job.strategy.stages > MOST_CELLS:
        return
    pieces = pieces_of(job)
    rooms = [room_for_pieces(job, pieces, rank, capacity_bytes) for rank in ranks]
    places = [Place(1.0, max(1.0, room), microbatches_in_flight(job, rank)) for rank, room in zip(ranks, rooms)]
    now = max(pieces.of_rank(job, rank).seconds for rank in ranks)
    for counts in divisions(job, pieces, places):
        try:
            other = replace(job, strategy=replace(job.strategy, stage_layers=counts))
        except SpecError:
            continue  # a stage in the middle has no layer
        if max(pieces.of_rank(other, rank).seconds for rank in ranks) < now:
            yield other


def divisions(job: Job, pieces: Pieces, places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Layers per stage, divided by stage and, if ranks have several stages, also by rank; ``places`` is per rank."""
    ways = (_by_stage, _by_rank) if job.strategy.chunks_per_rank > 1 else (_by_stage,)
    counts: list[tuple[int, ...]] = []
    for divide in ways:
        try:
            counts.append(divide(job, pieces, places))
        except SpecError:
            continue  # fewer layers than stages, or nothing fits
    return list(dict.fromkeys(counts))


def _by_stage(job: Job, pieces: Pieces, places: Sequence[Place]) -> tuple[int, ...]:
    """Minimises the slowest stage; memory is ignored if a rank has several stages, since they share it."""
    if job.strategy.chunks_per_rank > 1:
        speeds = {stage: place.speed for rank, place in enumerate(places) for stage in stages_of_rank(job, rank)}
        places = [Place(speeds[stage]) for stage in range(len(speeds))]
    first, *inner, last = partition_over(pieces.row, places).layer_counts
    return (first - 1, *inner, last - 1)  # without embedding and head


def _by_rank(job: Job, pieces: Pieces, places: Sequence[Place]) -> tuple[int, ...]:
    """Minimises the slowest rank over all of its stages; every layer counts as the mean layer."""
    layer, count = pieces.mean_layer, len(pieces.layers)
    folded = job.strategy.schedule_record.ends_meet  # the first rank has the last stage too
    first, last = (pieces.embedding + pieces.head, NOTHING) if folded else (pieces.embedding, pieces.head)
    row = layers_of(
        [layer.seconds] * count,
        [layer.bytes] * count,
        [layer.activation_bytes] * count,
        first_extra_seconds=first.seconds,
        last_extra_seconds=last.seconds,
        first_extra_bytes=first.bytes + places[0].in_flight * first.activation_bytes,
        last_extra_bytes=last.bytes,
    )
    return _over_chunks(job, pieces, partition_over(row, places).layer_counts)


def _over_chunks(job: Job, pieces: Pieces, of_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Divides the layers of every rank over its stages, such that these take about equally long."""
    counts = [0] * job.strategy.stages
    ends = {0: pieces.embedding.seconds, len(counts) - 1: pieces.head.seconds}
    for rank, layers in enumerate(of_ranks):
        stages = stages_of_rank(job, rank)
        for stage in stages:
            counts[stage] = 0 if stage in ends else 1
        for _ in range(layers - sum(counts[stage] for stage in stages)):
            seconds = [ends.get(stage, 0.0) + counts[stage] * pieces.mean_layer.seconds for stage in stages]
            counts[stages[seconds.index(min(seconds))]] += 1
    return tuple(counts)
