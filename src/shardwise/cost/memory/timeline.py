"""What lies in the memory of a device over a step, for the pipeline ranks whose figures differ.

The parts are those of `memory.device`, each while it exists. Model states, buffers and the framework exist always,
activations from the start of a forward to the end of its backward, the transient memory of a pass during that pass (at
the fuller of its moments, `memory.transient`). So the peak is at most that of `memory.device`, and less where parts
never exist at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.cost.memory.activations import head_activation_bytes
from shardwise.cost.memory.device import (
    DeviceMemory,
    activation_bytes,
    memory_at_moments,
    memory_at_update,
    offloaded_activations,
)
from shardwise.cost.memory.in_flight import microbatches_in_flight
from shardwise.cost.memory.sum import moved_share
from shardwise.cost.memory.transient import gathered_bytes, gathered_matrices
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import step_timeline
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import RankContents, rank_contents
from shardwise.layout.views import ranks_to_price
from shardwise.pipeline import Action, ActionKind, Timeline, live_activations
from shardwise.spec.job import Job

BETWEEN = "between passes"
AFTER = "reduction and optimizer"


@dataclass(frozen=True)
class MemorySpan:
    """One device from ``start_seconds`` to ``end_seconds`` of the step, while nothing changes."""

    start_seconds: float
    end_seconds: float
    during: str
    held: DeviceMemory


@dataclass(frozen=True)
class RankMemory:
    """One device of a pipeline rank over the step; ``spans`` follow each other without a gap."""

    pipeline_rank: int
    spans: tuple[MemorySpan, ...]

    @cached_property
    def peak(self) -> MemorySpan:
        """The first span in which most is held."""
        return max(self.spans, key=lambda span: span.held.total)


@dataclass(frozen=True)
class MemoryOverTime:
    """The memory of a job's devices over its step."""

    job: Job
    step_seconds: float
    ranks: tuple[RankMemory, ...]

    @cached_property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak.held.total)


def memory_over_time(job: Job) -> MemoryOverTime:
    """The memory of every pipeline rank whose figures differ, from the start of the step to its end."""
    prediction = predict(job)
    timeline = step_timeline(prediction)
    tail_seconds = prediction.tail_seconds
    held_chunks = live_activations(timeline)
    ranks = tuple(
        _rank_memory(view, timeline, rank, [held for _, held in held_chunks[rank]], tail_seconds)
        for view, rank in ranks_to_price(job)
    )
    return MemoryOverTime(job, timeline.step_seconds(job.stack.step_ends) + tail_seconds, ranks)


def _rank_memory(job: Job, timeline: Timeline, rank: int, held_chunks: list[float], tail_seconds: float) -> RankMemory:
    parts = _Parts(job, rank, timeline.schedule.stages)
    spans: list[MemorySpan] = []
    now, chunks, heads = 0.0, 0.0, 0
    actions = zip(timeline.schedule.actions[rank], timeline.starts[rank], timeline.ends[rank], held_chunks)
    for action, start, end, chunks_then in actions:
        if start > now:
            spans.append(MemorySpan(now, start, BETWEEN, parts.between(chunks, heads)))
        is_forward, has_head = action.kind is ActionKind.F, parts.has_head(action)
        heads += is_forward and has_head
        held = parts.during(action, chunks_then if is_forward else chunks, heads)
        spans.append(MemorySpan(start, end, f"{action.kind.words} of microbatch {action.microbatch}", held))
        heads -= has_head and action.kind in (ActionKind.B, ActionKind.I)
        now, chunks = end, chunks_then
    spans.append(MemorySpan(now, now + tail_seconds, AFTER, parts.updated))
    return RankMemory(rank, tuple(spans))


class _Parts:
    """When the parts of a rank's memory exist; bytes as in `cost.memory.device`."""

    def __init__(self, job: Job, rank: int, stages: int) -> None:
        self.contents, self.last_stage = rank_contents(job, rank), stages - 1
        self.moments = memory_at_moments(job, self.contents)
        self.in_layer = self.moments["layer"]
        microbatch, self.head = _kept_per_microbatch(job, self.contents)
        # As in `cost.memory.device`, the chunks of a rank count alike; they differ where layers or experts are uneven.
        self.chunk = microbatch * job.strategy.pp / stages
        self.all_heads = job.strategy.schedule_record.forwards_first
        self.whole_gradient, self.whole_parameters = _gathered(job, self.contents)
        self.keeps_parameters = job.strategy.keep_parameters
        least = min(memory.gradients for memory in self.moments.values())
        self.idle = replace(self.in_layer, gradients=least, recomputed=0.0, communication=0.0, temporary=0.0)
        share = moved_share(job, job.strategy.offload.activations)
        self.updated = memory_at_update(job, self.contents) or self.between(0.0, 0)
        self.here = {moment: share * offloaded_activations(job, self.contents).here(moment) for moment in self.moments}
        self.own_head = share * head_activation_bytes(job) if self.contents.has_head else 0.0  # not sent away

    def has_head(self, action: Action) -> bool:
        """Whether the action is on the stage with the loss, as far as this rank is said to hold it."""
        return self.contents.has_head and action.stage == self.last_stage

    def between(self, chunks: float, heads: int) -> DeviceMemory:
        """While no pass runs: what is kept for later passes, and parameters that stay gathered."""
        gathered = self.whole_parameters if self.keeps_parameters and chunks else 0.0
        return replace(self.idle, activations=self._kept(chunks, heads), gathered=gathered)

    def during(self, action: Action, chunks: float, heads: int) -> DeviceMemory:
        """While a pass runs: at its loss, if it has one and holds more there, else in one of its layers."""
        at_its_loss = self.has_head(action) and action.kind is not ActionKind.W
        passing = self._in_layer(action, chunks, heads - at_its_loss if self.all_heads else 0)
        if not at_its_loss:
            return passing
        kept = self._kept(chunks, heads) + self.own_head + self.here["loss"]
        at_the_loss = replace(self.moments["loss"], activations=kept)
        return max(passing, at_the_loss, key=lambda memory: memory.total)

    def _in_layer(self, action: Action, chunks: float, heads: int) -> DeviceMemory:
        goes_back = action.kind in (ActionKind.B, ActionKind.I)
        makes_gradients = action.kind in (ActionKind.B, ActionKind.W)
        return replace(
            self.in_layer,
            activations=self._kept(chunks, heads) + self.here["layer"],
            recomputed=self.in_layer.recomputed if goes_back else 0.0,
            gathered=self.whole_parameters + (self.whole_gradient if makes_gradients else 0.0),
            temporary=self.in_layer.temporary if action.kind is not ActionKind.F else 0.0,
        )

    def _kept(self, chunks: float, heads: int) -> float:
        return chunks * self.chunk + heads * self.head


def _kept_per_microbatch(job: Job, contents: RankContents) -> tuple[float, float]:
    """Activations of one microbatch on all chunks of a rank, and those of one loss, that stay on the device."""
    stays = 1 - moved_share(job, job.strategy.offload.activations)
    kept, head = activation_bytes(job, contents) * stays, 0.0
    if contents.has_head:
        head = head_activation_bytes(job) * stays
    in_flight = microbatches_in_flight(job, contents.rank)
    losses = in_flight if job.strategy.schedule_record.forwards_first else 1
    return (kept - losses * head) / in_flight, head


def _gathered(job: Job, contents: RankContents) -> tuple[float, float]:
    """Whole layers that sharded data parallelism holds: gradients before they are reduced, parameters in use."""
    sharding, recipe = sharding_of(job.strategy), job.recipe
    of_job: dict[str, Any] = {"tied": job.model.tied_embeddings, "matrices": gathered_matrices(job)}
    both = float(gathered_bytes(contents, sharding, recipe, **of_job))
    sharding = replace(sharding, zero=min(2, sharding.zero))
    gradient = float(gathered_bytes(contents, sharding, recipe, **of_job))
    return gradient, both - gradient
