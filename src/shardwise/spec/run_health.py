"""What a run does about steps that went wrong; all ranks see them before a weight moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.spec.codec import Spec, count

Policy = Literal["skip", "roll-back", "stop"]


@dataclass(frozen=True, kw_only=True)
class NonFinite(Spec):
    """A step with non-finite gradients updates nothing. Then: continue (``skip``), load the newest checkpoint and
    leave that batch out (``roll-back``), or ``stop``. After ``in_a_row`` of them one after the other a run stops.

    In fp16 such steps are how the scale of the loss is found: there only ``in_a_row`` applies.
    """

    policy: Policy = "skip"
    in_a_row: int = count(10)


@dataclass(frozen=True, kw_only=True)
class Spikes(Spec):
    """A step whose loss is above ``factor`` times the median of the last ``window`` ones moves no weight either.

    Without a ``factor`` nothing is a spike. ``policy`` and ``in_a_row`` as for steps that are not finite.
    """

    factor: float | None = field(default=None, metadata={"minimum": 1})
    window: int = count(64, minimum=8, maximum=10_000)
    policy: Policy = "skip"
    in_a_row: int = count(10)
