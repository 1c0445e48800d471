"""Builds a pair of token files from documents, by several processes that hold a few documents at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from shardwise.run.data.sources import Document, ReadingRules, read_records, require_readable
from shardwise.run.data.token_files import BYTES, PairWriter, Tokenizer, Tokens, token_dtype, tokenizer_from
from shardwise.spec.errors import SpecError

PORTION = 64  # documents handed to a process at a time
PORTION_CHARACTERS = 4 * 2**20  # or fewer documents, if they are long


Encoded = tuple[Tokens, Tokens | None]


@dataclass(frozen=True)
class Built:
    prefix: Path
    documents: int
    tokens: int
    counted: int  # tokens that the loss counts
    vocab: int
    skipped: int = 0  # records that could not be read
    first_skipped: str = ""  # what was wrong with the first of them
    repaired: int = 0  # records in which something that is not a character was replaced


class _Kept:
    """The documents of records, and how many records were skipped or repaired."""

    def __init__(self, *, skips: bool) -> None:
        self._skips = skips
        self.skipped = self.repaired = 0
        self.first_skipped = ""

    def of(self, files: Sequence[Path], reading: ReadingRules) -> Iterator[Document]:
        for record in chain.from_iterable(read_records(path, reading) for path in files):
            if record.problem is None:
                self.repaired += record.repaired
                yield record.document
                continue
            if not self._skips:
                raise record.problem
            self.skipped += 1
            self.first_skipped = self.first_skipped or record.problem.line


def build(
    files: Sequence[Path],
    prefix: Path,
    *,
    tokenizer: str = "bytes",
    field: str = ReadingRules.field,
    max_record_bytes: int = ReadingRules.most_bytes,
    skip_bad_records: bool = False,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Built:
    """Writes ``prefix``.bin and .idx from files in the given order: the same pair for any number of workers.

    Raises SpecError for the first record that cannot be read; with ``skip_bad_records`` it is only counted. A process
    holds up to 25 times ``max_record_bytes``.
    """
    if not files:
        raise SpecError("files", "there are none", "name text, JSON lines, Parquet or tar files")
    for path in files:
        require_readable(path)
    chosen = tokenizer_from(tokenizer)
    chosen.required_end()
    kept = _Kept(skips=skip_bad_records)
    portions = _portions(kept.of(files, ReadingRules(field, max_record_bytes, raw=tokenizer == BYTES)))
    first = next(portions, [])
    if not first:
        problem = f"no record can be read; the first: {kept.first_skipped}" if kept.skipped else "hold no text"
        raise SpecError("files", problem, "name others, or correct them")
    masked = any(not span.counted for document in first for span in document)
    count = tokens = counted = 0
    with PairWriter(prefix, token_dtype(chosen.vocab), masked=masked) as writer:
        for encoded, mask in _encoded(chain([first], portions), tokenizer, workers):
            if mask is not None and not masked:
                problem = "some records mark what the loss counts, the first ones do not"
                raise SpecError("files", problem, "build them separately")
            writer.add(encoded, mask)
            count, tokens = count + 1, tokens + len(encoded)
            counted += len(encoded) if mask is None else int(mask.sum())
            progress(count, tokens)
        writer.skipped = kept.skipped
    left_out = (kept.skipped, kept.first_skipped, kept.repaired)
    return Built(prefix, count, tokens, counted, chosen.vocab, *left_out)


def encode_document(document: Document, tokenizer: Tokenizer) -> Encoded:
    """The tokens of all spans and of the document's end, and a mask if the loss does not count all of them."""
    pieces = [tokenizer.encode(span.text) for span in document]
    tokens = np.concatenate([*pieces, np.array([tokenizer.required_end()], np.int32)])
    if all(span.counted for span in document):
        return tokens, None
    flags = [np.full(len(piece), span.counted, np.uint8) for piece, span in zip(pieces, document)]
    return tokens, np.concatenate([*flags, np.array([document[-1].counted], np.uint8)])


def _portions(documents: Iterable[Document]) -> Iterator[list[Document]]:
    portion: list[Document] = []
    characters = 0
    for document in documents:
        portion.append(document)
        characters += sum(len(span.text) for span in document)
        if len(portion) == PORTION or characters >= PORTION_CHARACTERS:
            yield portion
            portion, characters = [], 0
    if portion:
        yield portion


def _encoded(portions: Iterable[list[Document]], tokenizer: str, workers: int) -> Iterator[Encoded]:
    if workers == 1:
        chosen = tokenizer_from(tokenizer)
        for portion in portions:
            for document in portion:
                yield encode_document(document, chosen)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare, (tokenizer,)) as pool:
        # Not `map`, which would read all files before the first portion is done.
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            for portion in portions:
                waiting.append(pool.submit(_encode_portion, portion))
                if len(waiting) > workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise SpecError("⟨processes⟩", f"one of {workers} was killed", "use fewer, if memory was short") from None


_TOKENIZER: list[Tokenizer] = []  # of a worker process, created once when it starts


def _prepare(tokenizer: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that hands out the work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _TOKENIZER[:] = [tokenizer_from(tokenizer)]


def _end_with_parent() -> None:
    """Ends this worker with its parent: if that is killed, the queue stays open, and the worker would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_portion(portion: list[Document]) -> list[Encoded]:
    return [encode_document(document, _TOKENIZER[0]) for document in portion]
