"""Whole documents in few sequences: every label once, nothing across boundaries, what is cut counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from run.data.chats import said, write_lines
from shardwise.run.data.build import build
from shardwise.run.data.lengths import measured_lengths
from shardwise.run.data.order import IGNORED, Sample, positions_in
from shardwise.run.data.packing import PackedStream, pack
from shardwise.run.data.run_data import check_data, mixtures_of
from shardwise.run.data.token_files import PairWriter, TokenFiles, open_pair
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from training.runs import VOCAB, job_of, write_answers


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(0, 5))
def test_every_item_is_in_one_sequence_that_has_room(lengths: list[int], seed: int) -> None:
    sizes = np.array(lengths, np.int64)
    order = np.random.default_rng(seed).permutation(len(sizes))
    packing = pack(sizes, 64, order)
    assert sorted(packing.items.tolist()) == list(range(len(sizes)))
    rooms = [int(sizes[packing.of(number)].sum()) for number in range(len(packing))]
    assert min(rooms) > 0 and max(rooms) <= 64
    # Any two sequences of best-fit hold more than one together, or they would be one.
    assert all(a + b > 64 for a, b in zip(sorted(rooms), sorted(rooms)[1:]))


def test_it_packs_more_tightly_than_in_turn() -> None:
    """Best-fit decreasing needs 11/9 of the fewest sequences at most, and 6/9 of one (Johnson 1973)."""
    sizes = np.random.default_rng(0).integers(1, 1024, 5000)
    packing = pack(sizes, 1024, np.arange(5000))
    fewest = int(np.ceil(sizes.sum() / 1024))
    assert len(packing) <= 11 / 9 * fewest + 1
    assert sizes.sum() / (1024 * len(packing)) > 0.97


def stream(folder: Path, seq: int, **settings: Any) -> PackedStream:
    pair = open_pair(write_answers(folder / "answers"))
    return PackedStream([pair], seq, VOCAB, 3, 0, pair.documents, **settings)


def labels_of(sample: Sample) -> list[tuple[int, int]]:
    """Each label with the token that it follows."""
    counts = sample.labels != IGNORED
    return [(int(token), int(label)) for token, label in zip(sample.tokens[counts], sample.labels[counts])]


def labels_in(pair: TokenFiles, longest: int) -> list[tuple[int, int]]:
    found = []
    for begin, end in zip(pair.starts, pair.starts[1:]):
        window = slice(int(begin), min(int(end), int(begin) + longest))
        assert pair.mask is not None
        tokens, mask = np.asarray(pair.tokens[window]), np.asarray(pair.mask[window])
        found += [(int(a), int(b)) for a, b, counts in zip(tokens, tokens[1:], mask[1:]) if counts]
    return found


@pytest.mark.parametrize("seq", [48, 300])
def test_an_epoch_has_every_label_once(tmp_path: Path, seq: int) -> None:
    packed = stream(tmp_path, seq)
    samples = [packed.sample(int(place)) for place in packed.places(np.arange(packed.per_epoch))]
    found = [label for sample in samples for label in labels_of(sample)]
    assert sorted(found) == sorted(labels_in(packed.pair, seq + 1))
    lengths = np.diff(packed.pair.starts)
    assert packed.cut == int((lengths > seq + 1).sum()) and packed.cut_tokens == int((lengths - seq - 1).clip(0).sum())
    for sample in samples:
        assert len(sample.tokens) == len(sample.labels) == len(sample.documents) == seq
        positions = positions_in(sample.documents)
        assert (positions[np.flatnonzero(np.diff(sample.documents)) + 1] == 0).all()
    again = [packed.sample(int(place)) for place in packed.places(packed.per_epoch + np.arange(packed.per_epoch))]
    assert sorted(label for sample in again for label in labels_of(sample)) == sorted(found)
    assert [labels_of(one) for one in again] != [labels_of(one) for one in samples]


def test_an_evaluation_has_every_label_once_and_then_nothing(tmp_path: Path) -> None:
    packed = stream(tmp_path, 64, once=True)
    samples = [packed.sample(int(place)) for place in packed.places(np.arange(3 * packed.per_epoch))]
    assert sorted(label for sample in samples for label in labels_of(sample)) == sorted(labels_in(packed.pair, 65))
    assert all((sample.labels == IGNORED).all() for sample in samples[packed.per_epoch :])


def test_what_has_no_label_left_is_left_out(tmp_path: Path) -> None:
    with PairWriter(tmp_path / "a", np.uint16, masked=True) as writer:
        writer.add(np.arange(100), np.arange(100) >= 90)
        writer.add(np.arange(20), np.arange(20) >= 10)
        writer.add(np.arange(1), np.ones(1))
    pair = open_pair(tmp_path / "a")
    packed = PackedStream([pair], 32, VOCAB, 0, 0, 3)
    assert (packed.cut, packed.cut_tokens, packed.left_out, packed.per_epoch) == (1, 67, 2, 1)
    assert packed.summary == (
        "3 documents in 1 sequence of 32 tokens, 59% full; 1 of them cut, 67 tokens in all; 2 left out, without a label"
    )
    with pytest.raises(SpecError, match="no document with a label in its first 8 tokens"):
        PackedStream([pair], 8, VOCAB, 0, 0, 3)


def tuned(shards: str, *, training: dict[str, Any] | None = None, **data: Any) -> Job:
    job = job_of(shards)
    held = {"held_out": 0.2, **data}
    return replace(
        job,
        run=replace(job.run, data=replace(job.run.data, **held)),
        training=replace(job.training, **(training or {})),
    )


def test_a_run_packs_what_has_a_mask(tmp_path: Path) -> None:
    shards = write_answers(tmp_path / "answers")
    training, held = mixtures_of(tuned(shards), tmp_path)
    assert held is not None
    [trained], [evaluated] = training.streams, held.streams
    assert isinstance(trained, PackedStream) and isinstance(evaluated, PackedStream)
    assert (trained.first, trained.documents + evaluated.documents) == (0, trained.pair.documents)
    assert evaluated.first == trained.documents and evaluated.once and not trained.once
    [note] = check_data(tuned(shards))
    assert note == f"{shards}: {trained.summary}" and "% full" in note

    streamed, _ = mixtures_of(tuned(shards, packing="stream"), tmp_path)
    assert not isinstance(streamed.streams[0], PackedStream)
    whole = mixtures_of(tuned(shards, validation=(shards,)), tmp_path)[0].streams[0]
    assert isinstance(whole, PackedStream) and whole.documents == trained.pair.documents


def text_in(sample: Sample, document: int) -> str:
    """What the loss counts of a document of bytes, without its end."""
    counts = (sample.documents == document) & (sample.labels != IGNORED)
    return bytes(sample.labels[counts][:-1].astype(np.uint8)).decode()


def test_preferences_are_packed_side_by_side(tmp_path: Path) -> None:
    records = [
        {"prompt": said(f"question {number}"), "chosen": "yes " * (number % 7 + 1), "rejected": "no"}
        for number in range(40)
    ]
    build([write_lines(tmp_path / "a.jsonl", records)], tmp_path / "out")
    job = tuned(str(tmp_path / "out"), training={"seq": 256, "task": "dpo"})
    training, held = mixtures_of(job, tmp_path)
    assert held is not None
    samples = training.samples(np.arange(training.streams[0].per_epoch))
    samples += held.samples(np.arange(held.streams[0].per_epoch))
    seen = []
    for sample in samples:
        texts = [text_in(sample, number) for number in range(int(sample.documents[-1]) + 1)]
        seen += list(zip(texts[::2], texts[1::2]))
    assert len(seen) == 40
    assert {rejected for _, rejected in seen} == {"assistant: no\n"}
    assert sorted(chosen for chosen, _ in seen) == sorted(f"assistant: {record['chosen']}\n" for record in records)
    with pytest.raises(SpecError, match="holds preferences"):
        mixtures_of(tuned(str(tmp_path / "out")), tmp_path)


def test_lengths_are_measured(tmp_path: Path) -> None:
    pair = open_pair(write_answers(tmp_path / "answers"))
    assert pair.mask is not None
    lengths = np.diff(pair.starts)
    measured = measured_lengths(str(tmp_path / "answers"))
    values, numbers = np.unique(lengths, return_counts=True)
    assert measured["histogram"] == [[int(a), int(b)] for a, b in zip(values, numbers)]
    assert measured["longest"] == lengths.max()
    assert measured["labels"] == pytest.approx(float(np.mean(pair.mask)))

    many = np.random.default_rng(0).integers(1, 60_000, 3000)
    with PairWriter(tmp_path / "many", np.uint16) as writer:
        for length in many:
            writer.add(np.zeros(length, np.int64))
    grouped = measured_lengths(str(tmp_path / "many"))["histogram"]
    assert len(grouped) <= 130 and sum(number for _, number in grouped) == 3000
    assert sum(length * number for length, number in grouped) == pytest.approx(many.sum(), rel=1e-3)
    with pytest.raises(SpecError, match="there are no lengths of documents beside it"):
        measured_lengths(str(tmp_path / "none"))
