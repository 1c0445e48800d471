"""How the learning rate goes through a run: up, along, and down."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from shardwise.spec.codec import Spec, count
from shardwise.spec.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Schedule(Spec):
    """``warmup`` steps up from zero, then down to the share ``final`` of the highest rate at the last of ``steps``.

    ``cosine`` (arXiv 1608.03983) and ``linear`` fall all the way; ``wsd`` (warm-up, stable, decay: arXiv 2404.06395)
    stays until the last share ``decay`` of the run and falls linearly then; ``constant`` stays. ``reference_batch``,
    a number of sequences, makes the rate that of another batch: it grows with its square root for Adam (arXiv
    2006.09092), with the batch itself for SGD (arXiv 1706.02677).
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = count(0, minimum=0)
    final: float = field(default=0.1, metadata={"minimum": 0, "maximum": 1})
    decay: float = field(default=0.1, metadata={"above": 0, "maximum": 1})
    reference_batch: int | None = count(None)

    def check_against(self, steps: int) -> None:
        """Raises SpecError if the run ends before the rate is up."""
        if self.warmup >= steps:
            raise SpecError("warmup", f"{self.warmup} steps in a run of {steps}", "use fewer")

    def share(self, step: int, steps: int) -> float:
        """The rate in the update after ``step`` others, as a share of the highest, in a run of ``steps``."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        begin = self.warmup if self.kind != "wsd" else max(self.warmup, steps - math.ceil(self.decay * steps))
        if step < begin:
            return 1.0
        # The last update, step - 1, has the final rate; a run that continues beyond it keeps that.
        done = min(1.0, (step - begin + 1) / max(1, steps - begin))
        fallen = (1 - math.cos(math.pi * done)) / 2 if self.kind == "cosine" else done
        return 1 - (1 - self.final) * fallen

    def batch_factor(self, sequences: int, optimizer: str) -> float:
        """What a batch of ``sequences`` multiplies the highest rate by."""
        if self.reference_batch is None:
            return 1.0
        ratio = sequences / self.reference_batch
        return ratio if optimizer.startswith("sgd") else math.sqrt(ratio)
