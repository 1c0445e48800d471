"""A sequence as a run would read it, as text: which documents are in it, and what of them the loss counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.run.data.lengths import about
from shardwise.run.data.order import IGNORED, Sample, Stream
from shardwise.run.data.packing import PackedStream
from shardwise.run.data.token_files import Tokenizer, Tokens, open_pair, pairs_of_preferences, tokenizer_from
from shardwise.run.storage.place import place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.layers import LONGEST

_ANY_TOKEN = 2**31  # where no tokenizer says how many there are


@dataclass(frozen=True)
class TokenRun:
    """Tokens in a row of which the loss counts all or none."""

    text: str
    tokens: tuple[int, ...]
    counted: bool


@dataclass(frozen=True)
class ExampleDocument:
    pieces: tuple[TokenRun, ...]
    answer: str = ""  # chosen or rejected, of a preference

    @property
    def tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def counted(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces if piece.counted)


@dataclass(frozen=True)
class Example:
    number: int  # counted from 1
    sequences: int
    seq: int
    documents: tuple[ExampleDocument, ...]
    left: int  # places without a document


def example(prefix: str, number: int, seq: int, tokenizer: str | None = None) -> Example:
    """A sequence of a pair, or of preferences; by the tokenizer that the pair was built with, unless one is given."""
    place = place_of(prefix)
    both = pairs_of_preferences(place)
    preferred = both[0].with_name(both[0].name + ".idx").is_file()
    pairs = [open_pair(name) for name in (both if preferred else (place,))]
    name = tokenizer or about(pairs[0].prefix).get("tokenizer")
    known = tokenizer_from(name) if isinstance(name, str) else None
    vocab = known.vocab if known else _ANY_TOKEN
    if not 1 <= seq <= LONGEST:
        raise SpecError("⟨seq⟩", f"{seq} is not a length", f"use 1 to {LONGEST:,}")
    stream: Stream
    if preferred or pairs[0].mask is not None:
        stream = PackedStream(pairs, seq, vocab, 0, 0, pairs[0].documents)
    else:
        stream = Stream(pairs[0], min(seq, len(pairs[0].tokens) - 1), vocab, 0)
    if not 1 <= number <= stream.per_epoch:
        raise SpecError("⟨example⟩", f"{number} is not there", f"there are {stream.per_epoch:,}")
    sample = stream.sample(int(stream.places(np.array([number - 1]))[0]))
    documents = tuple(_documents(sample, known, preferred=preferred))
    left = int(_empty(sample).sum()) if isinstance(stream, PackedStream) else 0
    return Example(number, stream.per_epoch, stream.seq, documents, left)


def last_prompt(prefix: Path | str) -> tuple[int, ...]:
    """What precedes the first token that the loss counts in the last document of a pair; empty without a mask."""
    pair = open_pair(str(prefix))
    if pair.mask is None or not pair.documents:
        return ()
    inside = slice(int(pair.starts[-2]), int(pair.starts[-1]))
    asked = int(np.argmax(np.asarray(pair.mask[inside]) > 0))
    return tuple(int(token) for token in np.asarray(pair.tokens[inside])[:asked])


def _empty(sample: Sample) -> Tokens:
    """Which places are after the last label: of no document."""
    last = sample.documents == sample.documents[-1]
    empty: Tokens = last & bool((sample.labels[last] == IGNORED).all())
    return empty


def _documents(sample: Sample, tokenizer: Tokenizer | None, *, preferred: bool) -> Iterator[ExampleDocument]:
    kept = ~_empty(sample)
    for number in np.unique(sample.documents[kept]):
        inside = sample.documents == number
        tokens, labels = sample.tokens[inside], sample.labels[inside]
        counts = np.concatenate([[False], labels != IGNORED])
        if counts[-1]:
            tokens = np.append(tokens, labels[-1])  # the last token of a document is only predicted
        counts = counts[: len(tokens)]
        runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(counts)) + 1)
        pieces = (_piece(tokens[run], tokenizer, counted=bool(counts[run[0]])) for run in runs)
        yield ExampleDocument(tuple(pieces), ("chosen", "rejected")[number % 2] if preferred else "")


def _piece(tokens: Tokens, tokenizer: Tokenizer | None, *, counted: bool) -> TokenRun:
    numbers = tuple(int(token) for token in tokens)
    text = tokenizer.decode_all(numbers) if tokenizer else " ".join(map(str, numbers))
    return TokenRun(text, numbers, counted)
