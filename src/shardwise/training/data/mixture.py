"""Several streams by weight: which one gives sample i, and which of its own samples, is a function of i alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardwise.spec.run_data import MOST_SHARDS
from shardwise.training.data.permutation import Numbers, Permutation
from shardwise.training.data.samples import Sample, Stream

_SAMPLES_PER_STREAM = 1024


class Mixture:
    """``samples(numbers)``: those global samples, whatever rank asks and whenever.

    Samples come in blocks. After any number of blocks a stream has given its share of them, rounded down, and the
    heaviest what is left; inside a block the order is drawn from (seed, block).
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float], seed: int) -> None:
        assert len(streams) == len(weights) <= MOST_SHARDS
        assert all(weight > 0 for weight in weights)
        self.streams, self.seed = list(streams), seed
        self.shares = np.array(weights, float) / sum(weights)
        self.block = _SAMPLES_PER_STREAM * len(streams)  # so that what the heaviest takes is never negative
        self._slots = lru_cache(maxsize=4)(self._draw)

    def chosen(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """For each global sample its stream, and its number among the samples of that stream."""
        streams, inner = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        blocks, places = np.divmod(numbers, self.block)
        for block in np.unique(blocks):
            mine = blocks == block
            stream, number = self._slots(int(block))
            streams[mine], inner[mine] = stream[places[mine]], number[places[mine]]
        return streams, inner

    def samples(self, numbers: Numbers) -> list[Sample]:
        streams, inner = self.chosen(numbers)
        found: dict[int, Sample] = {}
        for number, stream in enumerate(self.streams):
            mine = np.flatnonzero(streams == number)
            for place, start in zip(mine, stream.places(inner[mine])):
                found[int(place)] = stream.sample(int(start))
        return [found[place] for place in range(len(numbers))]

    def _given(self, blocks: int) -> Numbers:
        """How many samples each stream has given in the first blocks."""
        given = np.floor(self.shares * (self.block * blocks)).astype(np.int64)
        given[np.argmax(self.shares)] += self.block * blocks - given.sum()
        return given

    def _draw(self, block: int) -> tuple[Numbers, Numbers]:
        before = self._given(block)
        in_turn = np.repeat(np.arange(len(self.shares)), self._given(block + 1) - before)
        streams = in_turn[Permutation(self.block, self.seed, block)(np.arange(self.block))]
        numbers = np.empty(self.block, np.int64)
        for stream in range(len(self.shares)):
            here = np.flatnonzero(streams == stream)
            numbers[here] = before[stream] + np.arange(len(here))
        return streams, numbers
