"""Offloaded activations that are on the device all the same: those that leave it, and those that are back.

As this project's engine moves them (`engine/offload/activations.py`): when a layer has run its forward pass, the one
before it has left; when a layer runs its backward pass, the one before it is coming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.cost.memory.transient import Moment

_LAYERS_HERE = {"loss": 1, "layer": 2, "together": 2}


@dataclass(frozen=True)
class OffloadedActivations:
    """``saved`` bytes of a microbatch in all ``layers`` of a rank, and how many microbatches are ``in_flight``."""

    saved: Any
    in_flight: Any
    layers: Any

    @property
    def away(self) -> Any:
        """Bytes of all microbatches, if everything leaves and nothing is on its way."""
        return self.saved * self.in_flight

    def on_device(self, activations: Any, share: float, moment: Moment) -> Any:
        """What remains on the device of all ``activations`` at a moment."""
        return activations - share * (self.away - self.here(moment))

    def here(self, moment: Moment) -> Any:
        """Bytes of the layers that leave or are back."""
        whole = maximum(1, self.layers)
        return self.saved / whole * minimum(_LAYERS_HERE[moment], whole)
