"""Text, JSON lines, Parquet and tars become pairs; the loader gives every layout the same global batches."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.run.data.build import build
from shardwise.run.data.conversations import RecordRules
from shardwise.run.data.order import Loader, Mixture, Stream, rows_of
from shardwise.run.data.sources import standard_library
from shardwise.run.data.token_files import open_pair
from shardwise.spec.errors import SpecError

END = 256


def texts(prefix: Path) -> list[str]:
    pair = open_pair(prefix)
    documents = [pair.tokens[pair.starts[i] : pair.starts[i + 1]] for i in range(pair.documents)]
    assert all(document[-1] == END for document in documents)
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


def json_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in records) + "\n", encoding="utf-8")
    return path


def test_every_kind_of_file(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("first\n\nstill first é", encoding="utf-8")
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"text": "second"}\n\n{"text": "third"}\n'))
    archives = {
        tmp_path / "c.tar": "w",
        tmp_path / "d.tgz": "w:gz",
        tmp_path / "e.tgz": "w",
        tmp_path / "f.tar": "w:gz",
    }
    for path, mode in archives.items():  # packed or not, as its name says or not
        with tarfile.open(path, mode) as tar:
            for name, content in (("1.json", b'{"text": "fourth"}'), ("1.jpg", b"\xff"), ("2.txt", b"fifth")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    built = build([plain, zipped, *(tmp_path / one for one in archives)], tmp_path / "out")
    assert texts(tmp_path / "out") == ["first\n\nstill first é", "second", "third", *["fourth", "fifth"] * 4]
    assert (built.documents, built.vocab) == (11, 257)
    assert built.tokens == built.counted == len(open_pair(tmp_path / "out").tokens)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["one", "two"]}), tmp_path / "a.parquet")
    build([tmp_path / "a.parquet"], tmp_path / "out", records=RecordRules(field="body"))
    assert texts(tmp_path / "out") == ["one", "two"]


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
RECORDS = [{"prompt": "ab", "answer": "cd"}, {"messages": TALK}, {"text": "ef"}]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: next(iter(record)))
def test_parquet_holds_the_records_of_json_lines(tmp_path: Path, record: dict[str, Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([record, record]), tmp_path / "a.parquet")
    build([tmp_path / "a.parquet"], tmp_path / "out")
    build([json_lines(tmp_path / "a.jsonl", [record, record])], tmp_path / "same")
    for suffix in (".bin", ".idx", *([".mask"] if "text" not in record else [])):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"same{suffix}").read_bytes()


def test_only_answers_count(tmp_path: Path) -> None:
    built = build([json_lines(tmp_path / "a.jsonl", RECORDS)], tmp_path / "out")
    pair = open_pair(tmp_path / "out")
    assert pair.mask is not None
    counted = bytes(pair.tokens[(pair.mask == 1) & (pair.tokens != END)].astype(np.uint8)).decode()
    assert counted == "cd" + "assistant: yes\n" + "ef"
    assert built.counted == len(counted) + 3
    assert texts(tmp_path / "out")[1] == "user: hi\nassistant: yes\n"


def test_workers_make_the_same_pair(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": f"document {i} " * (i % 7)} for i in range(300)])
    for workers in (1, 2):
        build([path], tmp_path / f"out{workers}", workers=workers)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out1{suffix}").read_bytes() == (tmp_path / f"out2{suffix}").read_bytes()


def test_a_killed_worker_ends_it_in_one_line(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(64 * 20)])

    others = multiprocessing.active_children()  # ranks that wait for other tests

    def kill_one(documents: int, tokens: int) -> None:
        if documents == 1:
            next(child for child in multiprocessing.active_children() if child not in others).kill()

    with pytest.raises(SpecError, match="processes: one of 2 was killed"):
        build([path], tmp_path / "out", workers=2, progress=kill_one)
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def test_workers_end_with_the_process_that_was_killed(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": "text"}] * 640)
    command = [sys.executable, "-m", "shardwise", "data", "build", str(path), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, "--processes", "2"], env=environment)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    await_that(lambda: len(children.read_text(encoding="ascii").split()) == 3)  # one tracks what they share
    started = children.read_text(encoding="ascii").split()
    process.kill()
    process.wait()
    await_that(lambda: not any(Path(f"/proc/{one}").exists() for one in started))


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b c", encoding="utf-8")
    built = build([tmp_path / "a.txt"], tmp_path / "out", tokenizer=str(tmp_path))
    assert open_pair(tmp_path / "out").tokens.tolist() == [0, 1, 3, 2]
    assert built.vocab == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "a.jsonl:2: malformed JSON"),
        ("[1]", "a.jsonl:2: is not an object"),
        ('{"body": "x"}', "a.jsonl:2: has no text in 'text'"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl:2: has no content in message 1"),
    ],
)
def test_a_bad_record_is_named_and_nothing_is_left(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        build([tmp_path / "a.jsonl"], tmp_path / "out")
    assert says in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    for name in ("a.exe", "empty.jsonl"):
        (tmp_path / name).write_bytes(b"")
    wrong = {"a.exe": "suffix", "b.txt": "not there", "empty.jsonl": "empty.jsonl: holds no text"}
    for files, says in (([], "there are none"), *(([tmp_path / name], says) for name, says in wrong.items())):
        with pytest.raises(SpecError, match=says):
            build(files, tmp_path / "out")
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(SpecError, match=r"tokenizer\.json: is not there"):
        build([tmp_path / "a.txt"], tmp_path / "out", tokenizer=str(tmp_path))


def test_the_built_in_corpus_is_text_in_a_fixed_order() -> None:
    files = standard_library()
    assert files == standard_library()
    assert sum(path.stat().st_size for path in files) > 5e6
    assert any(path.name == "argparse.py" for path in files)


@pytest.fixture
def mixture(tmp_path: Path) -> Mixture:
    build([json_lines(tmp_path / "a.jsonl", [{"text": f"{i} " * 40} for i in range(60)])], tmp_path / "out")
    return Mixture([Stream(open_pair(tmp_path / "out"), 32, 257, seed=1)], [1.0], seed=1)


def test_a_global_batch_is_the_same_for_every_number_of_ranks(mixture: Mixture) -> None:
    for step in (0, 3, 50):
        whole = rows_of(mixture, step, 8)
        for ranks in (2, 4):
            shares = [range(start, start + 8 // ranks) for start in range(0, 8, 8 // ranks)]
            parts = [rows_of(mixture, step, 8, share) for share in shares]
            for name in ("tokens", "labels", "positions", "documents"):
                assert np.array_equal(np.concatenate([getattr(one, name) for one in parts]), getattr(whole, name))


def test_the_loader_gives_what_was_asked_for(mixture: Mixture) -> None:
    loader = Loader(mixture, 4, workers=2, prefetch=3)
    try:
        for step in (0, 1, 2, 7, 8, 3):  # ahead, and back after a restart
            rows = loader.take(step)
            assert rows.step == step
            assert np.array_equal(rows.tokens, rows_of(mixture, step, 4).tokens)
        assert len(loader._made) == 3
    finally:
        loader.close()
