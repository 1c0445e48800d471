"""How long a run may take for what should not take long, before it is called stuck."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.codec import Spec, quantity


@dataclass(frozen=True, kw_only=True)
class Timeouts(Spec):
    """Seconds until all ranks have begun, for one step, and for one checkpoint or evaluation."""

    start: float = quantity("seconds", 300)
    step: float = quantity("seconds", 100)
    checkpoint: float = quantity("seconds", 600)
