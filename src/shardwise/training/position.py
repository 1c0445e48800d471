"""How far a run is: steps that are done, and the next batch of its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Position:
    """``step`` steps are done; ``batch`` is the number of the next one's global batch.

    They differ by the batches that were ``left_out`` after a roll-back.
    """

    step: int = 0
    batch: int = 0
    left_out: frozenset[int] = frozenset()

    def after_step(self) -> Position:
        return replace(self, step=self.step + 1, batch=self._next(self.batch + 1))

    def without(self, batches: frozenset[int]) -> Position:
        """The same place, with some more batches that are not trained on."""
        wider = replace(self, left_out=self.left_out | batches)
        return replace(wider, batch=wider._next(self.batch))

    def _next(self, batch: int) -> int:
        while batch in self.left_out:
            batch += 1
        return batch

    def to_numbers(self, sequences: int) -> dict[str, Any]:
        """Plain data for a checkpoint; ``sequences`` is the size of a global batch."""
        return {"batch": self.batch, "left_out": sorted(self.left_out), "sequences": sequences}

    @classmethod
    def from_numbers(cls, step: int, numbers: Mapping[str, Any], sequences: int) -> Position:
        """Back from a checkpoint; with another size of batch, at the first whole one that was not begun."""
        if numbers["sequences"] == sequences:
            return cls(step, int(numbers["batch"]), frozenset(numbers["left_out"]))
        return cls(step, -(-int(numbers["batch"]) * int(numbers["sequences"]) // sequences))
