"""Samples of a stream of tokens: sequence i of an epoch is one place of the stream; documents keep their borders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.spec.errors import SpecError
from shardwise.training.data.pair import Pair, Tokens
from shardwise.training.data.permutation import Numbers, Permutation

IGNORED = -100  # as in `models.loss`, which imports torch: data is built without it


@dataclass(frozen=True)
class Sample:
    """``tokens`` and ``labels`` of one sequence; ``documents`` numbers the documents packed into it from 0 on."""

    tokens: Tokens
    labels: Tokens
    documents: Tokens


class Stream:
    """Sequences of ``seq`` tokens out of a part of a pair: its tokens from ``begin`` up to ``end``.

    An epoch is every sequence once, in an order drawn from (seed, epoch); where the sequences begin is drawn anew, so
    that no border is always the same. A label never crosses the border of a document.
    """

    def __init__(self, pair: Pair, seq: int, vocab: int, seed: int, begin: int = 0, end: int | None = None) -> None:
        self.pair, self.seq, self.vocab, self.seed = pair, seq, vocab, seed
        self.begin = begin
        self.tokens = (len(pair.tokens) if end is None else end) - begin
        self.shifts = self.tokens >= 2 * seq
        # One token more than the sequences, for the last label.
        self.per_epoch = (self.tokens - seq) // seq if self.shifts else (self.tokens - 1) // seq
        if self.per_epoch < 1:
            problem = f"has {self.tokens:,} tokens, a sequence needs {seq + 1:,}"
            raise SpecError(f"{pair.prefix}", problem, "give more data, or a shorter sequence (--seq)")

    def places(self, numbers: Numbers) -> Numbers:
        """The first token of each sample: samples are counted through all epochs."""
        starts = np.empty(len(numbers), np.int64)
        epochs = numbers // self.per_epoch
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order = Permutation(self.per_epoch, self.seed, int(epoch))
            shift = (
                int(Permutation(self.seq, self.seed, int(epoch), -1)(np.zeros(1, np.int64))[0]) if self.shifts else 0
            )
            starts[chosen] = self.begin + shift + order(numbers[chosen] % self.per_epoch) * self.seq
        return starts

    def sample(self, start: int) -> Sample:
        pair, stop = self.pair, start + self.seq + 1
        window = self.known(start, stop)
        document = np.searchsorted(pair.starts, np.arange(start, stop), "right")
        labels = window[1:].copy()
        labels[document[1:] != document[:-1]] = IGNORED
        if pair.mask is not None:
            labels[np.asarray(pair.mask[start + 1 : stop]) == 0] = IGNORED
        _, inside = np.unique(document[:-1], return_inverse=True)
        return Sample(window[:-1], labels, inside.astype(np.int64))

    def known(self, start: int, stop: int) -> Tokens:
        """The tokens there; raises SpecError if the vocabulary does not have one of them."""
        window: Tokens = np.asarray(self.pair.tokens[start:stop]).astype(np.int64)
        if len(window) and (int(window.min()) < 0 or int(window.max()) >= self.vocab):
            bad = int(np.flatnonzero((window < 0) | (window >= self.vocab))[0])
            problem = f"token {start + bad:,} is {window[bad]}, the vocabulary ends at {self.vocab:,}"
            raise SpecError(f"{self.pair.prefix}.bin", problem, "use the tokenizer of the model")
        return window


def positions_in(documents: Tokens) -> Tokens:
    """How far each token is from the first of its document in the same row."""
    steps = np.arange(documents.shape[-1])
    begins = np.concatenate([np.ones((*documents.shape[:-1], 1), bool), np.diff(documents, axis=-1) != 0], axis=-1)
    first: Any = np.maximum.accumulate(np.where(begins, steps, 0), axis=-1)
    distances: Tokens = steps - first
    return distances
