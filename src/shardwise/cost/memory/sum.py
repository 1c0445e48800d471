"""The sum of a device's memory: numbers for one rank of a job, columns for a sweep.

`HeldMemory` does not depend on the passes: model states, gathered layers, the framework. `PassMemory` does not depend
on data parallelism: activations, transient tensors, a recomputed layer. `MomentMemory` is their sum at one moment of a
pass, minus what does not exist yet (`Absent`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardwise.collectives.arrays import is_array, maximum, minimum, select, some
from shardwise.cost.memory.states import (
    StateBytes,
    rank_state_bytes,
    square_roots,
    update_copies,
    updated_parameters,
)
from shardwise.cost.memory.transient import Moment, divided_units, gathered_bytes, gathered_matrices, left_over
from shardwise.layout.pieces import update_chunk, update_slots
from shardwise.layout.sharding import Sharding, updates_on_device
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.schedules import schedule_record
from shardwise.spec.stack import Stack

# -- What is on the device in spite of offload: activations on their way out or back, and states during their update
# Our engine moves activations so (`engine/offload/activations.py`): when a layer has run its forward pass, the layer
# before it has left; while a layer runs its backward pass, the layer before it arrives. Megatron-Core
# (pipeline_parallel/fine_grained_activation_offload.py) also keeps the last layer, whose backward pass follows at once.


def first_elements(contents: RankContents, sharding: Sharding, *, tied: bool) -> Any:
    """Elements that a forward pass needs first: those of the embedding and of one layer, on a device."""
    layers = contents.layer_matrices / sharding.shards + contents.experts / sharding.expert_shards
    ends = select(contents.has_head * (not tied), 2, 1)  # norms are next to nothing
    embedding = contents.others / sharding.shards * contents.has_embedding / ends
    return layers / maximum(1, contents.layers) + embedding


def head_elements(contents: RankContents, sharding: Sharding, *, tied: bool) -> Any:
    """Elements of a head that is not tied to the embedding, on a device."""
    ends = select(contents.has_embedding, 2, 1)
    return contents.others / sharding.shards * contents.has_head * (not tied) / ends


def share_on_device(elements: Any, first: Any) -> Any:
    """Share of the offloaded states that are on the device when their update begins."""
    return minimum(1.0, update_slots(elements, first) * update_chunk(elements) / maximum(1, elements))


def last_layer_stays(job: Job) -> bool:
    """Whether our engine keeps what the last layer saves, because its backward pass follows at once."""
    return job.stack.is_own and job.strategy.pp == 1 and job.model.layers > 1


def moved_share(job: Job, share: float) -> float:
    """Share of a rank's saved activations that leaves the device."""
    return min(share, 1 - 1 / job.model.layers) if last_layer_stays(job) else share


def layers_at_loss(stack: Stack) -> int:
    """How many layers are on the device when the loss is computed."""
    return 1 if stack.is_own else 2


@dataclass(frozen=True)
class OffloadedActivations:
    """Activations of a rank that offload may move."""

    saved: Any  # bytes of one microbatch in all layers of the rank
    in_flight: Any  # microbatches in flight
    layers: Any
    at_loss: int  # layers whose activations are on the device at the loss
    last_stays: bool = False
    """The last layer never leaves (`moved_share`); then no other layer is on the device at the loss."""

    @property
    def away(self) -> Any:
        """Bytes of all microbatches, if everything leaves and nothing is on its way."""
        return self.saved * self.in_flight

    def moved(self, share: float) -> Any:
        """The share that leaves, where ``share`` may."""
        return minimum(share, 1 - 1 / self.layers) if self.last_stays else share

    def on_device(self, activations: Any, share: float, moment: Moment) -> Any:
        """The bytes of all ``activations`` that are on the device at a moment."""
        return activations - self.moved(share) * (self.away - self.here(moment))

    def here(self, moment: Moment) -> Any:
        """Bytes of the layers that are on their way out, or back."""
        if self.last_stays:
            return 0.0 if moment == "loss" else self.saved / (self.layers - 1)
        whole = maximum(1, self.layers)
        return self.saved / whole * minimum(self.at_loss if moment == "loss" else 2, whole)


# -- the sum --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldMemory:
    """What a device holds at a moment, independent of its passes."""

    job: Job  # everything but its strategy is used
    contents: RankContents
    sharding: Sharding
    states: StateBytes
    replicated: bool  # other devices compute gradients of the same parameters
    moment: Moment

    @cached_property
    def gathered(self) -> Any:
        return self._gathered(self.sharding)

    def _gathered(self, sharding: Sharding) -> Any:
        return gathered_bytes(
            self.contents,
            sharding,
            self.job.recipe,
            self.moment,
            tied=self.job.model.tied_embeddings,
            matrices=gathered_matrices(self.job),
            ends=self.job.stack.ends,
        )

    @cached_property
    def gathered_late(self) -> Any:
        """The part of ``gathered`` that a backward pass keeps and the next forward pass frees.

        It is complete when the backward pass has freed its activations.
        """
        if self.moment == "loss" or self.job.stack.ends == "kept":
            return 0.0
        return _or_zero(self.gathered - self._gathered(replace(self.sharding, keep_parameters=False)))

    @property
    def allowance(self) -> float:
        return self.job.cluster.device.framework_memory

    @cached_property
    def total(self) -> Any:
        return self.states.total + self.gathered + self.allowance + self.update_slots

    @property
    def update_slots(self) -> Any:
        """Offloaded states that are on the device for their update."""
        offload, updated = self.sharding.offload, updated_parameters(self.contents, self.sharding)
        if not offload.optimizer or not updates_on_device(self.job, offload):
            return 0.0
        elements = updated * offload.optimizer
        first = minimum(elements, first_elements(self.contents, self.sharding, tied=self.job.model.tied_embeddings))
        each = self.states.stored / maximum(elements, 1.0) + 4 * (offload.weights > 0)
        return update_slots(elements, first) * update_chunk(elements) * each

    @cached_property
    def copied_for_update(self) -> Any:
        """Copies of gradients, and square roots of second moments; 0 on a stack that makes none."""
        copies = update_copies(self.job, self.contents, self.sharding).bytes
        return _or_zero(copies + square_roots(self.job, self.contents, self.sharding))

    @property
    def gradients_at_update(self) -> Any:
        """With ZeRO only the gradients of the parameters that this device updates are left."""
        updated = updated_parameters(self.contents, self.sharding) * self.job.recipe.gradient
        divided = minimum(self.states.gradients, updated * (1 - self.sharding.offload.gradients))
        return select(self.sharding.zero >= 1, divided, self.states.gradients)

    @property
    def at_update(self) -> Any:
        """The sum in the optimizer's update, when no pass holds anything."""
        states = self.states.weights + self.gradients_at_update + self.states.optimizer
        return states + self.allowance + self.copied_for_update

    @property
    def at_load(self) -> Any:
        """The sum before the first step, on a stack that loads whole weights."""
        return self.states.weights + self.whole_weights + self.allowance

    @cached_property
    def whole_weights(self) -> Any:
        """Weights beside their shards, to load a checkpoint; 0 on other stacks."""
        if not self.job.stack.loads_whole:
            return 0.0
        sharding, recipe = replace(self.sharding, zero=0), self.job.recipe
        whole = rank_state_bytes(self.contents, sharding, recipe, self.job.training.optimizer).weights
        return _or_zero(whole * (self.sharding.zero == 3) * (self.sharding.shards > 1))

    @cached_property
    def left_over(self) -> Any:
        """The part of ``gathered`` at the loss that is a gradient of an earlier backward pass."""
        if self.moment != "loss":
            return 0.0
        unit = divided_units(self.contents, self.sharding, self.job.recipe, tied=self.job.model.tied_embeddings)
        return _or_zero(left_over(unit, self.sharding, self.job.recipe))

    @cached_property
    def reduced(self) -> Any:
        """Gradients that ZeRO reduces."""
        return _or_zero(self.states.gradients * (self.sharding.stage(self.job.recipe) >= 1))

    @cached_property
    def unreplicated(self) -> Any:
        """Whole gradients that are not reduced; replicas keep the buffers in which theirs are reduced."""
        whole = self.sharding.stage(self.job.recipe) == 0
        return 0.0 if self.replicated else _or_zero(self.states.gradients * whole)

    @cached_property
    def head_share(self) -> Any:
        """The head's share of a rank's gradients, which a backward pass computes first."""
        contents, tied = self.contents, self.job.model.tied_embeddings
        ends = contents.others / maximum(1, contents.total)
        return ends * contents.has_head / select(contents.has_embedding * (not tied), 2, 1)

    @cached_property
    def last_share(self) -> Any:
        """The share of a rank's gradients that do not exist yet when its first layer runs its backward pass.

        Those of this layer, and of the embedding unless it is tied to a head, whose backward pass made it.
        """
        contents, tied = self.contents, self.job.model.tied_embeddings
        ends = contents.others / maximum(1, contents.total)
        of_embedding = contents.has_embedding * (1 - tied * contents.has_head) / select(contents.has_head, 2, 1)
        return (1 - ends) / maximum(1, contents.layers) + ends * of_embedding


def held_at(
    job: Job, contents: RankContents, sharding: Sharding, moments: tuple[Moment, ...], *, replicated: bool
) -> list[HeldMemory]:
    states = rank_state_bytes(contents, sharding, job.recipe, job.training.optimizer)
    return [HeldMemory(job, contents, sharding, states, replicated, moment) for moment in moments]


@dataclass(frozen=True)
class PassMemory:
    """What passes hold on a device at their peak, independent of data parallelism."""

    activations: Mapping[Moment, Any]  # of all microbatches in flight
    transient: Mapping[Moment, Any]  # communication buffers and temporary tensors
    recomputed: Any  # a layer restored for its backward pass
    late: Any  # the same, where layers that are not recomputed run their backward passes before it is restored
    saved: Any  # activations of one microbatch that offload may move
    in_flight: Any  # microbatches in flight
    alone: Any  # 1 where no microbatch has run its backward pass before the peak
    in_turn: Any  # 1 where the only microbatch's gradients are reduced layer by layer
    losses_before: Any  # 1 where another microbatch has run its backward pass before a loss

    def others(self, moment: Moment) -> Any:
        """Everything but activations; at the loss no layer is recomputed."""
        return self.transient[moment] if moment == "loss" else self.transient[moment] + self.recomputed


def pass_memory(
    transient: Mapping[Moment, Any],
    layers: Any,
    head: Any,
    recomputed: Any,
    *,
    stay_whole: Any,
    in_flight: Any,
    microbatches: Any,
    forwards_first: Any,
    in_turn: Any,
) -> PassMemory:
    """The memory of passes, from what one microbatch saves in the ``layers`` of a rank and at its ``head``.

    For ``forwards_first`` see `kept_activations`, for ``stay_whole`` `layers_stay_whole`, for ``in_turn``
    `reduces_in_turn`.
    """
    kept = kept_activations(layers, head, in_flight, forwards_first)
    # In the backward pass of a layer, the inputs of its microbatch's loss are already freed.
    activations = {moment: kept - head if moment == "layer" else kept for moment in transient}
    recomputed = select(stay_whole, maximum(0.0, recomputed), recomputed)  # layers that stay whole take all of theirs
    return PassMemory(
        activations,
        transient,
        recomputed,
        recomputed * stay_whole,
        activations["layer"] / in_flight,
        in_flight,
        1.0 * (microbatches <= in_flight),
        1.0 * in_turn,
        1.0 * select(forwards_first, False, microbatches > 1),
    )


def kept_activations(layers: Any, head: Any, in_flight: Any, forwards_first: Any) -> Any:
    """Activations of all microbatches in flight.

    ``forwards_first``: the schedule runs all losses before the first backward pass; otherwise the backward pass of a
    microbatch follows its loss, and only one head's activations are held.
    """
    return layers * in_flight + head * select(forwards_first, in_flight, 1)


def reduces_in_turn(pp: int, schedule: str, microbatches: Any) -> Any:
    """Whether gradients are reduced layer by layer; a schedule that defers weight gradients reduces them at the end."""
    return (microbatches == 1) & (pp == 1 or not schedule_record(schedule).splits_backward)


class Absent(NamedTuple):
    """Bytes of a full sum that do not exist at the peak, because the first backward pass has not ended.

    During a backward pass gradients grow while activations are freed. Its memory peaks either when the last layer
    begins, with all activations and only the head's gradient; or when the first layer begins, with that layer's
    activations and all gradients but its own and the embedding's. The fuller of the two counts.
    """

    left_over: Any = 0.0  # the part of what is gathered that a backward pass leaves
    reduced: Any = 0.0
    """Gradients of a single microbatch that ZeRO reduces layer by layer: they never exist all at once."""
    growing: Any = 0.0  # all other gradients that the backward pass makes after its beginning
    not_yet: Any = 0.0
    """The part of those, and of a recomputed layer that is restored late, that is missing at the fuller peak."""

    @property
    def gradients(self) -> Any:
        return self.reduced + minimum(self.growing, self.not_yet)

    @property
    def recomputed(self) -> Any:
        return maximum(0.0, self.not_yet - self.growing)

    @property
    def total(self) -> Any:
        """The part of ``not_yet`` that is not gradients belongs to the recomputed layer."""
        before = self.left_over + self.reduced
        return before + self.not_yet if some(before) else self.not_yet


@dataclass(frozen=True)
class MomentMemory:
    """What a device holds at one moment."""

    held: HeldMemory
    passes: PassMemory
    spread: Callable[[Any], Any] = lambda figure: figure
    """Expands held figures, one per block of a sweep, to one per column of its passes."""

    @property
    def moment(self) -> Moment:
        return self.held.moment

    @cached_property
    def activations(self) -> Any:
        """Activations that offload leaves on the device."""
        activations, share = self.passes.activations[self.moment], self.held.sharding.offload.activations
        return self.offloaded.on_device(activations, share, self.moment) if share else activations

    @property
    def offloaded(self) -> OffloadedActivations:
        passes, held = self.passes, self.held
        layers, at_loss = self.spread(held.contents.layers), layers_at_loss(held.job.stack)
        return OffloadedActivations(passes.saved, passes.in_flight, layers, at_loss, last_layer_stays(held.job))

    @cached_property
    def absent(self) -> Absent:
        held, passes, spread, at_loss = self.held, self.passes, self.spread, self.moment == "loss"
        left: Any = 0.0
        if some(held.gathered_late):
            left = minimum(spread(held.gathered_late), self.activations / passes.in_flight)
        reduced: Any = 0.0
        growing: Any = 0.0
        later: Any = 0.0
        if held.job.stack.gradients in (("made",) if at_loss else ("made", "replaced")) and some(passes.alone):
            if some(held.left_over):
                left = left + passes.alone * spread(held.left_over)
            if some(held.reduced) and some(passes.in_turn):
                divided, in_turn = spread(held.reduced), passes.alone * passes.in_turn
                reduced = in_turn * divided
                later = (passes.alone - in_turn) * divided + spread(held.unreplicated)
            else:
                later = spread(_or_zero(held.unreplicated + held.reduced))
        # What has one figure for every row is multiplied first: it is less.
        if grows := is_array(later) or later != 0:
            there = passes.losses_before if at_loss else 1.0
            growing = later * (passes.alone * (1 - there * spread(held.head_share)))
        if at_loss:
            return Absent(left, reduced, growing, growing)
        of_pass = self.activations / passes.in_flight
        unmade: Any = 0.0
        if grows:
            own = of_pass / maximum(1, spread(held.contents.layers))
            last = passes.alone * spread(held.last_share)
            unmade = minimum(maximum(0.0, later * last - own), passes.others("layer"))
        return Absent(left, reduced, growing, minimum(growing + passes.late, of_pass + unmade))

    @cached_property
    def hooked(self) -> Any:
        """Gradients of inputs of repeated layers that stay (`Stack.hooked_inputs`), as many bytes as the inputs."""
        held, passes = self.held, self.passes
        if self.moment == "loss" or not (held.job.stack.hooked_inputs and held.job.training.freezes):
            return 0.0
        sharded = (held.sharding.zero == 3) * (held.sharding.shards > 1)
        # A layer that is repeated whole restores more than it keeps.
        repeated = passes.recomputed * self.spread(held.contents.layers) > passes.saved
        return self.spread(sharded * 1.0) * repeated * passes.saved

    @cached_property
    def total(self) -> Any:
        of_passes = self.activations + self.hooked + self.passes.others(self.moment)
        return self.spread(self.held.total) + (of_passes - self.absent.total)

    @property
    def host(self) -> Any:
        """Bytes that offload has moved off the device."""
        states, share = self.spread(self.held.states.offloaded), self.held.sharding.offload.activations
        return states + self.offloaded.moved(share) * self.offloaded.away if share else states


def _or_zero(figure: Any) -> Any:
    """A plain 0 for columns of zeros, which need not be spread."""
    return figure if some(figure) else 0.0
