"""Which tokens make up sample i: shuffled samples of a stream, and several streams mixed by weight.

A shuffle is a Feistel network over an even number of bits, applied again to what falls outside the range (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"). Its only state is its key.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from shardwise.run.data.token_files import TokenFiles, Tokens
from shardwise.spec.errors import SpecError
from shardwise.spec.run import MOST_SHARDS

ROUNDS = 6  # four mix well for statistics (Luby and Rackoff 1988); two more cost little
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio in 64 bits (Knuth, multiplicative hashing)
Numbers = np.ndarray[Any, np.dtype[np.int64]]
IGNORED = -100  # as in `models.loss`, which imports torch: data is built without it
_SAMPLES_PER_STREAM = 1024


class Permutation:
    """Maps every index below ``number`` to another; the same for the same ``key`` on every machine."""

    def __init__(self, number: int, *key: int) -> None:
        assert number >= 1
        self.number = number
        self.half_bits = max(1, ((number - 1).bit_length() + 1) // 2)
        seed = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self.keys = np.frombuffer(seed, "<u8")

    def __call__(self, indices: Numbers) -> Numbers:
        values = np.asarray(indices).astype(np.uint64)
        assert values.size == 0 or int(values.max()) < self.number
        values = self._mixed(values)
        outside = values >= np.uint64(self.number)
        while outside.any():  # at most three in four: a few rounds
            values[outside] = self._mixed(values[outside])
            outside = values >= np.uint64(self.number)
        return values.astype(np.int64)

    def _mixed(self, values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        bits = np.uint64(self.half_bits)
        low = np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & low
        for key in self.keys:
            mixed = (right ^ key) * _MULTIPLIER  # wraps around, as it should
            mixed ^= mixed >> np.uint64(29)
            mixed *= _MULTIPLIER
            left, right = right, left ^ ((mixed >> np.uint64(32)) & low)
        return (left << bits) | right


@dataclass(frozen=True)
class Sample:
    tokens: Tokens
    labels: Tokens
    documents: Tokens  # of each token, the number of its document among those packed into the sequence


class Stream:
    """Sequences of ``seq`` tokens from a part of a pair: its tokens from ``begin`` up to ``end``.

    An epoch has every sequence once, in an order drawn from (seed, epoch). The offset of the sequences is redrawn too,
    so that their boundaries vary. A label never crosses a document boundary.
    """

    def __init__(
        self, pair: TokenFiles, seq: int, vocab: int, seed: int, begin: int = 0, end: int | None = None
    ) -> None:
        self.pair, self.seq, self.vocab, self.seed = pair, seq, vocab, seed
        self.begin = begin
        self.tokens = (len(pair.tokens) if end is None else end) - begin
        self.shifts = self.tokens >= 2 * seq
        # One token more than the sequences, for the last label.
        self.per_epoch = (self.tokens - seq) // seq if self.shifts else (self.tokens - 1) // seq
        if self.per_epoch < 1:
            problem = f"has {self.tokens:,} tokens, a sequence needs {seq + 1:,}"
            raise SpecError(f"{pair.prefix}", problem, "give more data, or a shorter sequence (⟨seq⟩)")

    def places(self, numbers: Numbers) -> Numbers:
        """The first token of each sample, counting samples through all epochs."""
        starts = np.empty(len(numbers), np.int64)
        epochs = numbers // self.per_epoch
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order = Permutation(self.per_epoch, self.seed, int(epoch))
            first = Permutation(self.seq, self.seed, int(epoch), -1)(np.zeros(1, np.int64))
            shift = int(first[0]) if self.shifts else 0
            starts[chosen] = self.begin + shift + order(numbers[chosen] % self.per_epoch) * self.seq
        return starts

    def sample(self, start: int) -> Sample:
        pair, stop = self.pair, start + self.seq + 1
        window = self.checked(start, stop)
        document = np.searchsorted(pair.starts, np.arange(start, stop), "right")
        labels = window[1:].copy()
        labels[document[1:] != document[:-1]] = IGNORED
        if pair.mask is not None:
            labels[np.asarray(pair.mask[start + 1 : stop]) == 0] = IGNORED
        _, inside = np.unique(document[:-1], return_inverse=True)
        return Sample(window[:-1], labels, inside.astype(np.int64))

    def checked(self, start: int, stop: int, pair: TokenFiles | None = None) -> Tokens:
        """The tokens of a range; raises SpecError if one is not in the vocabulary."""
        pair = pair or self.pair
        window: Tokens = np.asarray(pair.tokens[start:stop]).astype(np.int64)
        if len(window) and (int(window.min()) < 0 or int(window.max()) >= self.vocab):
            bad = int(np.flatnonzero((window < 0) | (window >= self.vocab))[0])
            problem = f"token {start + bad:,} is {window[bad]}, the vocabulary ends at {self.vocab:,}"
            raise SpecError(f"{pair.prefix}.bin", problem, "use the tokenizer of the model")
        return window


def positions_in(documents: Tokens) -> Tokens:
    """The distance of each token from the first of its document in the same row."""
    steps = np.arange(documents.shape[-1])
    begins = np.concatenate([np.ones((*documents.shape[:-1], 1), bool), np.diff(documents, axis=-1) != 0], axis=-1)
    distances: Tokens = steps - np.maximum.accumulate(np.where(begins, steps, 0), axis=-1)
    return distances


class Mixture:
    """Several streams mixed by weight: a global sample is a function of its number alone.

    Samples come in blocks. After any number of blocks each stream has contributed its share, rounded down, and the
    heaviest the rest. Within a block the order is drawn from (seed, block).
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float], seed: int) -> None:
        assert len(streams) == len(weights) <= MOST_SHARDS
        assert all(weight > 0 for weight in weights)
        self.streams, self.seed = list(streams), seed
        self.shares = np.array(weights, float) / sum(weights)
        self.block = _SAMPLES_PER_STREAM * len(streams)  # so that the heaviest one's share is never negative
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
        by_place: dict[int, Sample] = {}
        for number, stream in enumerate(self.streams):
            mine = np.flatnonzero(streams == number)
            for place, start in zip(mine, stream.places(inner[mine])):
                by_place[int(place)] = stream.sample(int(start))
        return [by_place[place] for place in range(len(numbers))]

    def _contributed(self, blocks: int) -> Numbers:
        """How many samples each stream contributes to the first blocks."""
        counts = np.floor(self.shares * (self.block * blocks)).astype(np.int64)
        counts[np.argmax(self.shares)] += self.block * blocks - counts.sum()
        return counts

    def _draw(self, block: int) -> tuple[Numbers, Numbers]:
        before = self._contributed(block)
        in_turn = np.repeat(np.arange(len(self.shares)), self._contributed(block + 1) - before)
        streams = in_turn[Permutation(self.block, self.seed, block)(np.arange(self.block))]
        numbers = np.empty(self.block, np.int64)
        for stream in range(len(self.shares)):
            here = np.flatnonzero(streams == stream)
            numbers[here] = before[stream] + np.arange(len(here))
        return streams, numbers


# -- batches, loaded ahead ---------------------------------------------------------------------------

MOST_WORKERS, MOST_AHEAD = 4, 16  # of an `auto` loader: threads, and batches ahead


@dataclass(frozen=True)
class Rows:
    """A rank's sequences of one step, [sequences, seq] each."""

    step: int
    tokens: Tokens
    labels: Tokens
    positions: Tokens
    documents: Tokens


def rows_of(mixture: Mixture, step: int, batch: int, rows: range | None = None) -> Rows:
    """The ``rows`` of a step's global batch that a data-parallel rank trains on; all by default."""
    rows = range(batch) if rows is None else rows
    samples = mixture.samples(step * batch + np.arange(rows.start, rows.stop, dtype=np.int64))
    documents = np.stack([sample.documents for sample in samples])
    tokens, labels = np.stack([sample.tokens for sample in samples]), np.stack([sample.labels for sample in samples])
    return Rows(step, tokens, labels, positions_in(documents), documents)


class Loader:
    """Gives the rows of a step, while ``workers`` threads prepare the next ``prefetch`` steps.

    Reading a mapped file and copying arrays release the GIL, so threads suffice. ``waited_seconds`` is how long the
    loop was blocked on data; an ``auto`` loader then prefetches more.
    """

    def __init__(
        self,
        mixture: Mixture,
        batch: int,
        rows: range | None = None,
        *,
        workers: Literal["auto"] | int = "auto",
        prefetch: Literal["auto"] | int = "auto",
    ) -> None:
        self.mixture, self.batch, self.rows = mixture, batch, rows
        self.grows = prefetch == "auto"
        self.prefetch, self.waited_seconds = 2 if prefetch == "auto" else prefetch, 0.0
        self._threads = ThreadPoolExecutor(MOST_WORKERS if workers == "auto" else workers, thread_name_prefix="data")
        self._made: dict[int, Future[Rows]] = {}
        self._lock = threading.Lock()

    def take(self, step: int) -> Rows:
        with self._lock:
            wanted = range(step, step + self.prefetch + 1)
            ahead = step in self._made
            for number in wanted:
                if number not in self._made:
                    share = (self.batch, self.rows)
                    self._made[number] = self._threads.submit(rows_of, self.mixture, number, *share)
            for number in [made for made in self._made if made not in wanted]:
                self._made.pop(number).cancel()
            future = self._made.pop(step)
        began = time.perf_counter()
        late = not future.done()
        rows = future.result()
        self.waited_seconds += time.perf_counter() - began
        if late and ahead and self.grows:
            self.prefetch = min(MOST_AHEAD, self.prefetch + 1)
        return rows

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
