"""What is held out: whole documents where there are many, a part of one where there are few, and never trained on."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.running import error_line, run
from shardwise.launch.preflight import preflight
from shardwise.run.data.order import Mixture
from shardwise.run.data.run_data import check_data, held_out_begin, mixtures_of
from shardwise.run.data.token_files import PairWriter
from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.run import Data
from training.runs import job_of, write_shards

SEQ = 32


def counted(prefix: Path, *lengths: int) -> str:
    """Documents that hold their own place in the stream, modulo the vocabulary."""
    places = np.arange(sum(lengths)) % 512
    with PairWriter(prefix, np.uint16) as writer:
        for part in np.split(places, np.cumsum(lengths)[:-1]):
            writer.add(part)
    return str(prefix)


def seen(mixture: Mixture, samples: int = 400) -> list[set[int]]:
    """The places that each stream reads in so many of its samples, labels included."""
    places = [np.concatenate([one.places(np.arange(samples)), []]).astype(int) for one in mixture.streams]
    return [{place for start in of_stream for place in range(start, start + SEQ + 1)} for of_stream in places]


@pytest.mark.parametrize("lengths", [[5000], [4990, 10], [10, 4990], [1700, 1700, 1600], [0, 5000], [5000, 0]])
def test_few_documents_train_and_validate_on_other_tokens(tmp_path: Path, lengths: list[int]) -> None:
    job = job_of(counted(tmp_path / "one", *lengths))
    job = with_data(job, held_out=0.02)
    assert check_data(job) == []
    training, evaluated = mixtures_of(job, tmp_path)
    assert evaluated is not None
    [trained], [held] = seen(training), seen(evaluated)
    assert max(trained) < 4900 <= min(held)
    assert max(held) < 5000
    assert min(trained) < SEQ


def with_data(job: Job, **changes: Any) -> Job:
    return replace(job, run=replace(job.run, data=replace(job.run.data, **changes)))


def test_the_samples_of_many_documents_are_what_they_were(tmp_path: Path) -> None:
    """Runs that began when only whole documents were held out go on to the bit: a digest of that time."""
    training, evaluated = mixtures_of(job_of(write_shards(tmp_path / "words")), tmp_path)
    assert evaluated is not None
    found = hashlib.sha256()
    for sample in [*training.samples(np.arange(300)), *evaluated.samples(np.arange(60))]:
        found.update(sample.tokens.tobytes() + sample.labels.tobytes() + sample.documents.tobytes())
    assert found.hexdigest() == "8a672bfa62f25641394d5188045f4748fa67be4129a32197bd02178635801bcf"


def test_the_cut_is_by_documents_wherever_that_leaves_a_sequence_on_each_side() -> None:
    many = np.arange(0, 10_001, 100)
    assert held_out_begin(many, 0.02, seq=64) == 9800
    assert held_out_begin(many, 0.021, seq=64) == 9800
    assert held_out_begin(many, 0.02, seq=199) == 9800
    assert held_out_begin(many, 0.02, seq=200) == 10_000 - 201  # at least a sequence
    assert held_out_begin(np.array([0, 10_000]), 0.02, seq=64) == 9800
    assert held_out_begin(np.array([0, 9_990, 10_000]), 0.02, seq=64) == 9800


def test_a_mixture_in_which_one_source_is_one_document(tmp_path: Path) -> None:
    one, many = counted(tmp_path / "one", 3000), counted(tmp_path / "many", *[100] * 30)
    job = with_data(job_of(one), shards=(one, many), weights=(1.0, 3.0), held_out=0.1)
    training, evaluated = mixtures_of(job, tmp_path)
    assert evaluated is not None
    for trained, held in zip(seen(training), seen(evaluated)):
        assert max(trained) < 2700 <= min(held)


def test_a_tiny_corpus_holds_out_one_sequence_and_says_so(tmp_path: Path) -> None:
    job = with_data(job_of(counted(tmp_path / "one", 2 * (SEQ + 1))), held_out=0.02)
    assert "33 of 66 tokens are held out" in check_data(job)[0]
    training, evaluated = mixtures_of(job, tmp_path)
    assert evaluated is not None
    assert [training.streams[0].tokens, evaluated.streams[0].tokens] == [SEQ + 1, SEQ + 1]


def test_what_cannot_be_fed_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    short, shorter = counted(tmp_path / "short", 65), counted(tmp_path / "shorter", SEQ)
    fine, empty = counted(tmp_path / "fine", 500), counted(tmp_path / "empty", 0)
    with pytest.raises(SpecError, match=r"short.*65 tokens, one sequence to train on and one held out need 66"):
        preflight(job_of(short))
    preflight(without_evaluation(job_of(short)))  # nothing is held out then
    with pytest.raises(SpecError, match="has 32 tokens, a sequence needs 33"):
        preflight(without_evaluation(job_of(shorter)))
    with pytest.raises(SpecError, match=r"empty.* has 0 tokens"):
        preflight(with_data(job_of(fine), shards=(fine, empty)))
    with pytest.raises(SpecError, match=r"shorter.* has 32 tokens, a sequence needs 33"):
        preflight(with_data(job_of(fine), validation=(shorter,)))
    preflight(with_data(job_of(shorter), shards=(fine,), validation=(counted(tmp_path / "even", SEQ + 1),)))


def without_evaluation(job: Job) -> Job:
    return replace(job, run=replace(job.run, evaluation=replace(job.run.evaluation, batches=0)))


def test_tokens_of_another_vocabulary_are_found_before_a_process_starts(tmp_path: Path) -> None:
    with PairWriter(tmp_path / "large", np.uint16) as writer:
        writer.add(np.arange(400, 700))
    with pytest.raises(SpecError, match="token 112 is 512, the vocabulary ends at 512"):
        preflight(job_of(str(tmp_path / "large")))


def test_a_sequence_longer_than_the_built_in_corpus(tmp_path: Path) -> None:
    flags = ["--model", "tiny", "--cluster", "laptop:1", "--global-batch", "1", "--seq", "100M"]
    line = error_line(run("train", *flags, "--run-folder", str(tmp_path / "run")))
    assert line.startswith("the built-in corpus: has ")
    assert not (tmp_path / "run").exists()


def test_more_pairs_than_a_mixture_takes() -> None:
    with pytest.raises(SpecError, match="names 1,025 pairs"):
        Data(shards=("a",) * 1025)


def test_data_by_flag(tmp_path: Path) -> None:
    flags = ["--model", "tiny", "--cluster", "laptop:1", "--global-batch", "1", "--seq", "32"]
    folder = ["--run-folder", str(tmp_path / "run")]
    line = error_line(run("train", *flags, *folder, "--data", counted(tmp_path / "a", 500), "--data", "no/pair"))
    assert "no/pair.idx: is not there" in line
    assert "has a suffix" in error_line(run("train", *flags, *folder, "--data", "one.bin"))
