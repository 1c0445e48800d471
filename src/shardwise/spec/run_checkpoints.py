"""When a run saves what it has learnt, and how much of that it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.spec.codec import Spec, count


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Spec):
    """One every ``steps`` steps, one when ``seconds`` have passed since the last, whichever is given; one at the end.

    The ``keep`` newest stay, and those of steps that ``keep_every`` divides. ``asynchronous``: written while training
    continues. A disk that is full leaves the last good one; then training will ``continue`` or ``stop``.
    """

    steps: int | None = count(None)
    seconds: float | None = field(default=600.0, metadata={"dimension": "seconds", "above": 0})
    keep: int = count(2)
    keep_every: int | None = count(None)
    asynchronous: bool = True
    disk_full: Literal["continue", "stop"] = "continue"
