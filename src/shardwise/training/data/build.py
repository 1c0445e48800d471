"""From documents to a pair of token files, with several processes and never more than a portion in memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from shardwise.spec.errors import SpecError
from shardwise.training.data.pair import PairWriter, Tokens, narrowest
from shardwise.training.data.sources import Document, read_documents, require_readable
from shardwise.training.data.tokenizers import Tokenizer, tokenizer_from

PORTION = 64  # documents handed to a process at a time
Encoded = tuple[Tokens, Tokens | None]


@dataclass(frozen=True)
class Built:
    prefix: Path
    documents: int
    tokens: int
    counted: int  # tokens that the loss counts
    vocab: int


def build(
    files: Sequence[Path],
    prefix: Path,
    *,
    tokenizer: str = "bytes",
    field: str = "text",
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Built:
    """Writes ``prefix``.bin and .idx from files in the order given: the same pair for any number of workers."""
    if not files:
        raise SpecError("files", "there are none", "name text, JSON lines, Parquet or tar files")
    for path in files:
        require_readable(path)
    chosen = tokenizer_from(tokenizer)
    documents = (document for path in files for document in read_documents(path, field))
    first, rest = _peek(documents)
    masked = any(not span.counted for document in first for span in document)
    count = tokens = counted = 0
    with PairWriter(prefix, narrowest(chosen.vocab), masked=masked) as writer:
        for encoded, mask in _encoded(rest, tokenizer, workers):
            if mask is not None and not masked:
                raise SpecError("files", "some records mark what the loss counts, the first ones do not", "build apart")
            writer.add(encoded, mask)
            count, tokens = count + 1, tokens + len(encoded)
            counted += len(encoded) if mask is None else int(mask.sum())
            progress(count, tokens)
    return Built(prefix, count, tokens, counted, chosen.vocab)


def encode_document(document: Document, tokenizer: Tokenizer) -> Encoded:
    """Tokens of all spans and the end of the document; with a mask where not everything counts."""
    pieces = [tokenizer.encode(span.text) for span in document]
    tokens = np.concatenate([*pieces, np.array([tokenizer.end], np.int32)])
    if all(span.counted for span in document):
        return tokens, None
    flags = [np.full(len(piece), span.counted, np.uint8) for piece, span in zip(pieces, document)]
    return tokens, np.concatenate([*flags, np.array([document[-1].counted], np.uint8)])


def _peek(documents: Iterator[Document]) -> tuple[list[Document], Iterator[Document]]:
    first = list(islice(documents, PORTION))

    def all_of_them() -> Iterator[Document]:
        yield from first
        yield from documents

    return first, all_of_them()


def _portions(documents: Iterable[Document]) -> Iterator[list[Document]]:
    waiting = iter(documents)
    while portion := list(islice(waiting, PORTION)):
        yield portion


def _encoded(documents: Iterable[Document], tokenizer: str, workers: int) -> Iterator[Encoded]:
    if workers == 1:
        chosen = tokenizer_from(tokenizer)
        for document in documents:
            yield encode_document(document, chosen)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _prepare, (tokenizer,)) as pool:
        for portion in pool.imap(_encode_portion, _portions(documents)):
            yield from portion


_TOKENIZER: list[Tokenizer] = []  # of a worker process, made once when it starts


def _prepare(tokenizer: str) -> None:
    _TOKENIZER[:] = [tokenizer_from(tokenizer)]


def _encode_portion(portion: list[Document]) -> list[Encoded]:
    return [encode_document(document, _TOKENIZER[0]) for document in portion]
