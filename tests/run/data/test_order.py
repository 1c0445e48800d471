"""The order of training data is a pure function of seed, epoch and sample: complete, mixed, by weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from shardwise.run.data import token_files as pairs
from shardwise.run.data.order import IGNORED, Mixture, Permutation, Stream, positions_in
from shardwise.run.data.token_files import PairWriter, TokenFiles, check_sums, open_pair
from shardwise.spec.errors import SpecError

SEQ, VOCAB = 16, 1000


def pair_of(folder: Path, lengths: list[int], *, masked: bool = False) -> TokenFiles:
    """Documents of counted tokens: what stands at a place of the stream is its place."""
    begin = 0
    with PairWriter(folder / "data", np.uint16, masked=masked) as writer:
        for length in lengths:
            tokens = np.arange(begin, begin + length) % VOCAB
            writer.add(tokens, (tokens % 2).astype(np.uint8) if masked else None)
            begin += length
    return open_pair(folder / "data")


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40))
def test_a_permutation_is_one(number: int, key: int) -> None:
    found = Permutation(number, key)(np.arange(number))
    assert np.array_equal(np.sort(found), np.arange(number))


def test_a_permutation_mixes() -> None:
    """Neighbours part, other keys order otherwise; each number is about as likely everywhere."""
    found = Permutation(10_000, 7)(np.arange(10_000))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(found, Permutation(10_000, 8)(np.arange(10_000)))[0, 1]) < 0.05
    firsts = np.array([Permutation(4, key)(np.arange(4))[0] for key in range(4000)])
    assert np.bincount(firsts).min() > 850


def test_large_permutations_need_no_memory() -> None:
    found = Permutation(10**15, 1)(np.array([0, 1, 10**15 - 1]))
    assert len(set(found.tolist())) == 3
    assert found.max() < 10**15


def test_an_epoch_is_every_sequence_once(tmp_path: Path) -> None:
    stream = Stream(pair_of(tmp_path, [100, 50, 300]), SEQ, VOCAB, seed=3)
    first, second = (np.sort(stream.places(np.arange(stream.per_epoch) + e * stream.per_epoch)) for e in (0, 1))
    for places in (first, second):
        assert np.array_equal(np.diff(places), np.full(stream.per_epoch - 1, SEQ))
        assert places[0] >= 0
        assert places[-1] + SEQ + 1 <= 450
    assert first[0] != second[0]  # other borders
    assert not np.array_equal(stream.places(np.arange(stream.per_epoch)), first)  # shuffled


def test_labels_follow_and_end_with_the_document(tmp_path: Path) -> None:
    sample = Stream(pair_of(tmp_path, [10, 3, 40]), SEQ, VOCAB, seed=0).sample(4)
    assert sample.tokens.tolist() == list(range(4, 20))
    expected = list(range(5, 21))
    expected[9 - 4] = expected[12 - 4] = IGNORED  # the last tokens of documents
    assert sample.labels.tolist() == expected
    assert sample.documents.tolist() == [0] * 6 + [1] * 3 + [2] * 7
    assert positions_in(sample.documents).tolist() == [*range(6), *range(3), *range(7)]


def test_masked_tokens_do_not_count(tmp_path: Path) -> None:
    sample = Stream(pair_of(tmp_path, [100], masked=True), SEQ, VOCAB, seed=0).sample(10)
    assert [label for label in sample.labels if label != IGNORED] == [11, 13, 15, 17, 19, 21, 23, 25]


def test_a_part_of_the_documents_stays_there(tmp_path: Path) -> None:
    stream = Stream(pair_of(tmp_path, [100, 100, 100]), SEQ, VOCAB, seed=0, begin=100, end=200)
    places = stream.places(np.arange(5 * stream.per_epoch))
    assert places.min() >= 100
    assert places.max() + SEQ + 1 <= 200


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 100))
def test_a_mixture_takes_by_weight_and_leaves_nothing_out(weights: list[float], seed: int) -> None:
    mixture = Mixture([None] * len(weights), weights, seed)  # type: ignore[list-item]
    numbers = np.arange(3 * mixture.block)
    streams, inner = mixture.chosen(numbers)
    for stream, weight in enumerate(weights):
        taken = inner[streams == stream]
        assert np.array_equal(taken, np.arange(len(taken)))
        assert abs(len(taken) - len(numbers) * weight / sum(weights)) <= len(weights)
    some = np.array([0, mixture.block - 1, mixture.block, 2 * mixture.block + 17])
    assert all(np.array_equal(one[some], other) for one, other in zip((streams, inner), mixture.chosen(some)))


def test_samples_are_those_of_the_streams(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, [2000])
    mixture = Mixture([Stream(pair, SEQ, VOCAB, seed=1), Stream(pair, SEQ, VOCAB, seed=2)], [1, 3], seed=5)
    numbers = np.arange(100, 140)
    alone = [mixture.samples(numbers[i : i + 1])[0] for i in range(40)]
    assert all(np.array_equal(one.tokens, two.tokens) for one, two in zip(alone, mixture.samples(numbers)))


def test_written_documents_return(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, [5, 0, 7])
    assert pair.documents == 3
    assert pair.starts.tolist() == [0, 5, 5, 12]
    assert pair.tokens.tolist() == list(range(12))
    assert check_sums(tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", "data.sums.json"]


def test_an_unfinished_pair_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), PairWriter(tmp_path / "data", np.uint16) as writer:
        writer.add(np.arange(5))
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []


def _damage(path: Path, at: int, value: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("name", "at", "value", "says"),
    [
        ("data.idx", 0, b"X", "first bytes differ"),
        ("data.idx", 9, b"\x02", "version 2"),
        ("data.idx", 17, b"\x63", "unknown type 99"),
        ("data.idx", 18, b"\x09", "its header says"),
        ("data.idx", 34, b"\xff\xff\xff\xff", "negative length"),
        ("data.idx", 38, b"\x63", "do not follow"),
        ("data.idx", -8, b"\x09", "documents are not in order"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, name: str, at: int, value: bytes, says: str) -> None:
    pair_of(tmp_path, [5])
    path = tmp_path / name
    _damage(path, at if at >= 0 else path.stat().st_size + at, value)
    with pytest.raises(SpecError, match=says) as caught:
        open_pair(tmp_path / "data")
    assert name in str(caught.value)


def test_a_short_or_changed_file_is_named(tmp_path: Path) -> None:
    pair_of(tmp_path, [500])
    tokens = tmp_path / "data.bin"
    _damage(tokens, 40, b"\xff")
    with pytest.raises(SpecError, match=r"data\.bin.* is damaged near byte 0"):
        check_sums(tmp_path / "data")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(SpecError, match=r"data\.bin.* has 999 bytes, its index says 1,000"):
        open_pair(tmp_path / "data")
    with pytest.raises(SpecError, match="is not there"):
        open_pair(tmp_path / "other")


def test_tokens_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    with PairWriter(tmp_path / "data", np.uint16) as writer:
        writer.add(np.array([1] * 20 + [VOCAB] + [1] * 20))
    stream = Stream(open_pair(tmp_path / "data"), SEQ, VOCAB, seed=0)
    with pytest.raises(SpecError, match="token 20 is 1000, the vocabulary ends at 1,000"):
        stream.sample(10)
    with pytest.raises(SpecError, match="do not fit in uint16"), PairWriter(tmp_path / "more", np.uint16) as writer:
        writer.add(np.array([70_000]))


def test_too_little_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has 16 tokens, a sequence needs 17"):
        Stream(pair_of(tmp_path, [16]), SEQ, VOCAB, seed=0)


def test_a_document_longer_than_a_sequence_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index counts the tokens of a sequence with 31 bits: a longer document has several sequences."""
    monkeypatch.setattr(pairs, "LONGEST_SEQUENCE", 16)
    found = pair_of(tmp_path, [0, 40, 16, 3])
    assert found.starts.tolist() == [0, 0, 40, 56, 59]
    assert np.array_equal(found.tokens, np.arange(59))
