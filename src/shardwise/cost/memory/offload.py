"""What offload has on the device all the same: activations that leave it or are back, states that are updated there.

As this project's engine moves them (`engine/offload/activations.py`): when a layer has run its forward pass, the one
before it has left; when a layer runs its backward pass, the one before it is coming. Megatron-Core
(pipeline_parallel/fine_grained_activation_offload.py) keeps the last layer too, whose backward pass follows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import maximum, minimum, select
from shardwise.cost.memory.transient import Moment
from shardwise.layout.pieces import update_chunk, update_slots
from shardwise.layout.sharding import Sharding
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack


def first_elements(contents: RankContents, sharding: Sharding, *, tied: bool) -> Any:
    """Elements of an embedding and of one layer, on a device."""
    layers = contents.layer_matrices / sharding.shards + contents.experts / sharding.expert_shards
    ends = select(contents.has_head * (not tied), 2, 1)  # norms are next to nothing
    embedding = contents.others / sharding.shards * contents.has_embedding / ends
    return layers / maximum(1, contents.layers) + embedding


def head_elements(contents: RankContents, sharding: Sharding, *, tied: bool) -> Any:
    """Elements of a head of its own, on a device."""
    ends = select(contents.has_embedding, 2, 1)
    return contents.others / sharding.shards * contents.has_head * (not tied) / ends


def share_on_device(elements: Any, first: Any) -> Any:
    """Share of the offloaded states that has come to the device when their update begins."""
    return minimum(1.0, update_slots(elements, first) * update_chunk(elements) / maximum(1, elements))


def last_layer_stays(job: Job) -> bool:
    """Whether a backward pass follows its forward pass directly, so that our engine keeps what the last layer saves: it
    would come back as soon as it has left."""
    return job.stack.is_own and job.strategy.pp == 1 and job.model.layers > 1


def moved_share(job: Job, share: float) -> float:
    """Share of a rank's saved activations that leaves the device."""
    return min(share, 1 - 1 / job.model.layers) if last_layer_stays(job) else share


def layers_at_loss(stack: Stack) -> int:
    """How many layers are on the device when the loss is computed."""
    return 1 if stack.is_own else 2


@dataclass(frozen=True)
class OffloadedActivations:
    """``saved`` bytes of a microbatch in all ``layers`` of a rank, and how many microbatches are ``in_flight``."""

    saved: Any
    in_flight: Any
    layers: Any
    at_loss: int  # layers that are on the device then
    last_stays: bool = False  # see `moved_share`; then no other is on the device at the loss

    @property
    def away(self) -> Any:
        """Bytes of all microbatches, if everything leaves and nothing is on its way."""
        return self.saved * self.in_flight

    def moved(self, share: float) -> Any:
        """The share that leaves, of a ``share`` that may."""
        return minimum(share, 1 - 1 / self.layers) if self.last_stays else share

    def on_device(self, activations: Any, share: float, moment: Moment) -> Any:
        """What remains on the device of all ``activations`` at a moment."""
        return activations - self.moved(share) * (self.away - self.here(moment))

    def here(self, moment: Moment) -> Any:
        """Bytes of the layers that leave or are back."""
        if self.last_stays:
            return 0.0 if moment == "loss" else self.saved / (self.layers - 1)
        whole = maximum(1, self.layers)
        return self.saved / whole * minimum(self.at_loss if moment == "loss" else 2, whole)
