"""The batches of a search: how many sequences a step has under every layout and microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.planner.constraints import Constraints
from shardwise.spec.schedules import schedule_record
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

MOST_MICROBATCH = 16
MOST_MICROBATCH_TOKENS = 65_536
BATCH_TOLERANCE = 0.05  # a batch in tokens is rounded to what a layout divides, by no more than this
MOST_ABOVE_MINIMUM = 2.0  # times a minimum batch: a larger one always looks better, and trains differently


@dataclass(frozen=True)
class Batches:
    """``minimum`` asks for the smallest batch that divides and is at least so large; else it is the training's."""

    training: Training
    constraints: Constraints
    minimum: int | None

    @cached_property
    def microbatches(self) -> tuple[int, ...]:
        """The sizes that are tried."""
        seq = self.training.seq
        usual = [2**k for k in range(10) if 2**k <= MOST_MICROBATCH]
        usual = [size for size in usual if size == 1 or size * seq <= MOST_MICROBATCH_TOKENS]
        return self.constraints.candidates("microbatch", usual)

    def sequences(self, base: Strategy, schedules: list[str]) -> dict[int, tuple[int, ...]]:
        """By microbatch size: sequences of a step under each schedule, or 0 if the batch does not divide."""
        rounds = [schedule_record(name).rounds(base.pp) for name in schedules]
        sizes = {size: base.data_parallel * size for size in self.microbatches}
        return {size: tuple(self.batch(each * times) for times in rounds) for size, each in sizes.items()}

    def batch(self, multiple: int) -> int:
        """The batch that is a whole number of ``multiple`` sequences and near what was asked for, or 0."""
        if multiple not in self._known:
            self._known[multiple] = self._rounded(multiple)
        return self._known[multiple]

    @cached_property
    def _known(self) -> dict[int, int]:
        return {}

    def _rounded(self, multiple: int) -> int:
        if self.minimum is not None:
            least = -(-self.minimum // multiple) * multiple
            return least if least <= MOST_ABOVE_MINIMUM * self.minimum else 0
        training = self.training
        sequences = training.sequences(multiple)
        asked, in_tokens = training.batch_request() or (sequences, False)
        if in_tokens and abs(sequences * training.seq / asked - 1) > BATCH_TOLERANCE:
            return 0
        return sequences if sequences % multiple == 0 else 0
