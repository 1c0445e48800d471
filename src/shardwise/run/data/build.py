"""Builds pairs of token files from documents, by several processes that hold a few documents at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from shardwise.run.data.conversations import EVERY_FORM, Content, PreferencePair, RecordRules, characters, is_templated
from shardwise.run.data.encoding import Encoded, Encoder, Encoding
from shardwise.run.data.sources import ReadingRules, read_records, require_readable
from shardwise.run.data.token_files import BYTES, PairWriter, pairs_of_preferences, token_dtype
from shardwise.spec.errors import SpecError

PORTION = 64  # documents handed to a process at a time
PORTION_CHARACTERS = 4 * 2**20  # or fewer documents, if they are long


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
    preferences: int = 0  # pairs of a chosen and a rejected answer
    template: str = ""  # the file of the chat template that conversations were written by


class _Kept:
    """The documents of records, and how many records were skipped or repaired."""

    def __init__(self, *, skips: bool) -> None:
        self._skips = skips
        self.skipped = self.repaired = 0
        self.first_skipped = ""

    def of(self, files: Sequence[Path], reading: ReadingRules) -> Iterator[Content]:
        for record in chain.from_iterable(read_records(path, reading) for path in files):
            if record.problem is None:
                self.repaired += record.repaired
                yield record.content
            else:
                self.without(record.problem)

    def without(self, problem: SpecError) -> None:
        """Leaves a record out, or raises what is wrong with it."""
        if not self._skips:
            raise problem
        self.skipped += 1
        self.first_skipped = self.first_skipped or problem.line


def build(
    files: Sequence[Path],
    prefix: Path,
    *,
    tokenizer: str = BYTES,
    template: str | None = None,
    records: RecordRules = EVERY_FORM,
    max_record_bytes: int = ReadingRules.most_bytes,
    skip_bad_records: bool = False,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Built:
    """Writes ``prefix``.bin and .idx from files in the given order: the same pair for any number of workers.

    Of preferences it writes two pairs, ``prefix``.chosen and ``prefix``.rejected, whose documents correspond.
    Conversations are written by the chat template of the tokenizer's folder, or by the file ``template``.

    Raises SpecError for the first record that cannot be read; with ``skip_bad_records`` it is only counted. A process
    holds up to 25 times ``max_record_bytes``.
    """
    if not files:
        raise SpecError("files", "there are none", "name text, JSON lines, Parquet or tar files")
    for path in files:
        require_readable(path)
    encoding = Encoding.of(tokenizer, template)
    kept = _Kept(skips=skip_bad_records)
    rules = ReadingRules(records.field, records.format, records.answers, max_record_bytes, raw=tokenizer == BYTES)
    portions = _portions(kept.of(files, rules))
    first = next(portions, [])
    if not first:
        one = len(files) == 1
        problem = f"hold{'s' * one} no text"
        if kept.skipped:
            problem = f"no record can be read; the first: {kept.first_skipped}"
        raise SpecError(str(files[0]) if one else "files", problem, "name others, or correct them")
    encoder = Encoder(encoding)
    encoder.check(first)
    preferred = isinstance(first[0], PreferencePair)
    any_conversation = any(is_templated(content) for content in first)
    masked = not all(isinstance(content, tuple) and all(span.counted for span in content) for content in first)
    count = tokens = counted = 0
    with ExitStack() as open_files:
        open_files.callback(encoder.close)
        dtype, about = token_dtype(encoder.vocab), {"tokenizer": encoding.tokenizer}
        names = pairs_of_preferences(prefix) if preferred else (prefix,)
        writers = [open_files.enter_context(PairWriter(name, dtype, masked=masked, about=about)) for name in names]
        for encoded in _encoded(chain([first], portions), encoder, workers):
            if isinstance(encoded, SpecError):
                kept.without(encoded)
                continue
            if len(encoded) != len(writers):
                raise _of_two_kinds("are preferences, others are not")
            for writer, (written, mask) in zip(writers, encoded):
                if mask is not None and not masked:
                    raise _of_two_kinds("mark what the loss counts, others do not")
                writer.add(written, mask)
                tokens += len(written)
                counted += len(written) if mask is None else int(mask.sum())
            count += 1
            progress(count, tokens)
        if not count:
            raise SpecError("files", f"no record can be used; the first: {kept.first_skipped}", "correct them")
        for writer in writers:
            writer.skipped = kept.skipped
    left_out = (kept.skipped, kept.first_skipped, kept.repaired)
    used = encoding.template.where if encoding.template and any_conversation else ""
    return Built(prefix, count, tokens, counted, encoder.vocab, *left_out, count * preferred, used)


def _of_two_kinds(what: str) -> SpecError:
    return SpecError("files", f"some records {what}", "build them separately")


def _portions(contents: Iterable[Content]) -> Iterator[list[Content]]:
    portion: list[Content] = []
    held = 0
    for content in contents:
        portion.append(content)
        held += characters(content)
        if len(portion) == PORTION or held >= PORTION_CHARACTERS:
            yield portion
            portion, held = [], 0
    if portion:
        yield portion


Outcome = list[Encoded] | SpecError


def _encoded(portions: Iterable[list[Content]], encoder: Encoder, workers: int) -> Iterator[Outcome]:
    if workers == 1:
        for portion in portions:
            yield from _outcomes(portion, encoder)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare, (encoder.encoding,)) as pool:
        # Not `map`, which would read all files before the first portion is done.
        waiting: deque[Future[list[Outcome]]] = deque()
        try:
            for portion in portions:
                waiting.append(pool.submit(_encode_portion, portion))
                if len(waiting) > workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise SpecError("⟨processes⟩", f"one of {workers} was killed", "use fewer, if memory was short") from None


_ENCODER: list[Encoder] = []  # of a worker process, created once when it starts


def _prepare(encoding: Encoding) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that hands out the work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _ENCODER[:] = [Encoder(encoding)]


def _end_with_parent() -> None:
    """Ends this worker with its parent: if that is killed, the queue stays open, and the worker would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_portion(portion: list[Content]) -> list[Outcome]:
    return list(_outcomes(portion, _ENCODER[0]))


def _outcomes(portion: Sequence[Content], encoder: Encoder) -> Iterator[Outcome]:
    for content in portion:
        try:
            yield encoder(content)
        except SpecError as error:
            yield error
