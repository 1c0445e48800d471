"""Whole documents packed into sequences, each with its own attention and positions: what fine-tuning trains on.

Best-fit decreasing within a window of documents drawn in a random order: of the sequences begun, each document goes to
the fullest that has room for it, longest documents first (Johnson 1973; for training, Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830). A document that is longer than a sequence is cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.run.data.order import IGNORED, Numbers, Permutation, Sample, Stream
from shardwise.run.data.token_files import TokenFiles, Tokens
from shardwise.spec.errors import SpecError
from shardwise.spec.units import counted

WINDOW = 4096  # documents that are sorted together
_PACKING = -2  # among the keys that orders of a seed are drawn with: epochs count from 0


@dataclass(frozen=True)
class Packing:
    """Which items are in which sequence."""

    items: Numbers  # of all sequences, one after the other
    begins: Numbers  # of each sequence among them, and their number at the end

    def of(self, sequence: int) -> Numbers:
        return self.items[self.begins[sequence] : self.begins[sequence + 1]]

    def __len__(self) -> int:
        return len(self.begins) - 1


def pack(lengths: Numbers, room: int, order: Numbers) -> Packing:
    """Packs items of so many tokens, none longer than ``room``, taking ``order`` window by window."""
    sequences: list[list[int]] = []
    for at in range(0, len(order), WINDOW):
        window = order[at : at + WINDOW]
        left: list[tuple[int, int]] = []  # of the sequences begun in this window, sorted: room left, and which
        for item in window[np.argsort(-lengths[window], kind="stable")].tolist():
            length = int(lengths[item])
            fullest = bisect_left(left, (length, 0))
            if fullest == len(left):
                left_over, sequence = room, len(sequences)
                sequences.append([])
            else:
                left_over, sequence = left.pop(fullest)
            sequences[sequence].append(item)
            if left_over > length:
                insort(left, (left_over - length, sequence))
    begins = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(items) for items in sequences], out=begins[1:])
    return Packing(np.array([item for items in sequences for item in items], np.int64), begins)


class PackedStream(Stream):
    """Sequences of whole documents, from ``first`` up to ``last``; of preferences, of both answers side by side.

    A document of n tokens takes n - 1 places, since its last token is only predicted. In a sequence of ``pairs`` of
    answers, documents 2k and 2k + 1 are the chosen and the rejected one of the same prompt. What is left of a sequence
    is a document of its own that predicts nothing. All sequences come once in an epoch, in an order drawn from
    (seed, epoch); with ``once``, those after the first epoch are empty.
    """

    def __init__(
        self, pairs: Sequence[TokenFiles], seq: int, vocab: int, seed: int, first: int, last: int, *, once: bool = False
    ) -> None:
        self.pairs, self.pair, self.seq, self.vocab, self.seed, self.once = pairs, pairs[0], seq, vocab, seed, once
        self.first, self.documents = first, last - first
        self.begin = int(self.pair.starts[first])
        self.tokens = int(self.pair.starts[last]) - self.begin
        self.room = seq // len(pairs)  # of one document
        whole = np.stack([np.diff(pair.starts[first : last + 1]) for pair in pairs])
        used = np.minimum(whole, self.room + 1)
        self.cut, self.cut_tokens = int((used < whole).any(0).sum()), int((whole - used).sum())
        kept = (used > 1).all(0)
        for part, number in zip(*np.nonzero(used < whole)):
            kept[number] &= self._has_labels(pairs[part], first + int(number))
        self.left_out = int((~kept).sum())
        lengths = (used - 1).sum(0)
        numbers = np.flatnonzero(kept)
        if not len(numbers):
            problem = f"has no document with a label in its first {self.room:,} tokens"
            raise SpecError(f"{self.pair.prefix}", problem, "give more data, or a longer sequence (⟨seq⟩)")
        order = numbers[Permutation(len(numbers), seed, _PACKING)(np.arange(len(numbers)))]
        self.packing = pack(lengths, seq, order)
        self.per_epoch = len(self.packing)
        self.filled = float(lengths[numbers].sum()) / (seq * self.per_epoch)

    @property
    def summary(self) -> str:
        """How full its sequences are, and what of the documents is not in them."""
        what = "preference" if len(self.pairs) == 2 else "document"
        sequences = counted(self.per_epoch, "sequence")
        text = f"{counted(self.documents, what)} in {sequences} of {self.seq:,} tokens, {self.filled:.0%} full"
        if self.cut:
            text += f"; {self.cut:,} of them cut, {counted(self.cut_tokens, 'token')} in all"
        return text + (f"; {self.left_out:,} left out, without a label" if self.left_out else "")

    def places(self, numbers: Numbers) -> Numbers:
        """The packed sequence of each sample, -1 for an empty one."""
        chosen = np.empty(len(numbers), np.int64)
        epochs = numbers // self.per_epoch
        for epoch in np.unique(epochs):
            order = Permutation(self.per_epoch, self.seed, int(epoch))
            chosen[epochs == epoch] = order(numbers[epochs == epoch] % self.per_epoch)
        return np.where(epochs > 0, -1, chosen) if self.once else chosen

    def sample(self, start: int) -> Sample:
        tokens, documents = np.zeros(self.seq, np.int64), np.zeros(self.seq, np.int64)
        labels = np.full(self.seq, IGNORED, np.int64)
        at = number = 0
        for item in self.packing.of(start) if start >= 0 else ():
            for pair in self.pairs:
                window, counts = self._document(pair, self.first + int(item))
                end = at + len(window) - 1
                tokens[at:end], documents[at:end] = window[:-1], number
                labels[at:end] = np.where(counts[1:], window[1:], IGNORED)
                at, number = end, number + 1
        documents[at:] = number
        return Sample(tokens, labels, documents)

    def _document(self, pair: TokenFiles, number: int) -> tuple[Tokens, Tokens]:
        begin, end = int(pair.starts[number]), int(pair.starts[number + 1])
        end = min(end, begin + self.room + 1)
        counts = np.ones(end - begin, bool) if pair.mask is None else np.asarray(pair.mask[begin:end]) > 0
        return self.checked(begin, end, pair), counts

    def _has_labels(self, pair: TokenFiles, number: int) -> bool:
        return bool(self._document(pair, number)[1][1:].any())
