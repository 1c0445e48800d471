"""What is on the device in spite of offload: activations on their way out or back, and states during their update.

Our engine moves activations so (`engine/offload/activations.py`): when a layer has run its forward pass, the layer
before it has left; while a layer runs its backward pass, the layer before it arrives. Megatron-Core
(pipeline_parallel/fine_grained_activation_offload.py) also keeps the last layer, whose backward pass follows at once.
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

    saved: Any
    """Bytes of one microbatch in all layers of the rank."""
    in_flight: Any
    """Microbatches in flight."""
    layers: Any
    at_loss: int
    """Layers whose activations are on the device at the loss."""
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
