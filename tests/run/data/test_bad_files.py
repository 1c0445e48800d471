"""Files that are damaged or made to exhaust the reader: one line naming file and record, or skipped and counted."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli.running import error_line, run, run_json
from shardwise.run.data.build import build
from shardwise.run.data.token_files import open_pair
from shardwise.spec.errors import SpecError

MIB = 2**20
GOOD = b'{"text": "good"}\n'
RECORD = 4096  # the limit of the tests


def tar_of(*members: tuple[str, bytes], claims: int | None = None) -> bytes:
    """A tar; ``claims`` is the size that its last header says."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    raw = bytearray(made.getvalue())
    if claims is not None:
        at = raw.index(members[-1][0].encode())
        about = tarfile.TarInfo(members[-1][0])
        about.size = claims
        raw[at : at + 512] = about.tobuf(tarfile.GNU_FORMAT)
    return bytes(raw)


def header(name: str, kind: bytes, size: int) -> bytes:
    about = tarfile.TarInfo(name)
    about.type, about.size = kind, size
    return about.tobuf(tarfile.GNU_FORMAT)


def parquet_of(texts: list[str]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    made = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts}), made)
    return made.getvalue()


TAR = tar_of(("1.txt", b"one"), ("2.txt", b"two"), ("3.txt", b"three" * 900))
ZEROS = bytes(8 * MIB)
# A file of each kind of damage: what is said of it, and how many documents come before it.
DAMAGED: dict[str, tuple[str, bytes | Callable[[], bytes], str, int]] = {
    "cut gz": ("a.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-9], "is damaged after line", 9),
    "garbage gz": ("a.jsonl.gz", b"garbage", "is damaged after line 0 (Not a gzipped file", 0),
    "flipped gz": ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-6] + b"......", "is damaged", 0),
    "cut tar": ("a.tar", TAR[:2500], "is damaged after 2.txt", 2),
    "cut header": ("a.tar", TAR[:1300], "is damaged after 1.txt (a header is damaged or cut)", 1),
    "garbage tar": ("a.tar", b"garbage" * 999, "is damaged at its beginning", 0),
    "garbage inside": ("a.tar", TAR[:1024] + b"garbage" * 999, "a header is damaged or cut", 1),
    "cut tgz": ("a.tgz", gzip.compress(TAR, mtime=0)[:-40], "is damaged after", 2),
    "size that lies": ("a.tar", tar_of(("1.txt", b"one"), ("2.txt", b"two"), claims=4000)[:2048], "unexpected end", 1),
    "size that lies much": ("a.tar", tar_of(("1.txt", b"one"), ("2.txt", b"two"), claims=6 << 30), "larger than", 1),
    "long name": ("a.tgz", gzip.compress(header("x", b"L", 6 << 30) + ZEROS, 1), "a header of 6,442,450,944 bytes", 0),
    "pax header": ("a.tgz", gzip.compress(header("x", b"x", 6 << 30) + ZEROS, 1), "a header of 6,442,450,944 bytes", 0),
    "size below zero": ("a.tar", header("1.txt", b"0", -512) + bytes(1024), "negative size", 0),
    "bytes that are no text": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl:2: is not text in UTF-8", 1),
    "nested deeply": ("a.jsonl", GOOD + b"[" * 3000 + b"\n", "a.jsonl:2: is nested more than 100 levels", 1),
    "digits": ("a.jsonl", GOOD + b'{"text": ' + b"9" * 4000 + b"}\n", "a.jsonl:2: holds a number of more than", 1),
    "a long line": ("a.jsonl", GOOD + b'{"text": "' + ZEROS + b'"}\n', "a.jsonl:2: is larger than 4.00 KiB", 1),
    "a bomb": ("a.jsonl.gz", gzip.compress(GOOD + ZEROS), "a.jsonl.gz:2: is larger than 4.00 KiB", 1),
    "a text bomb": ("a.txt.gz", gzip.compress(ZEROS), "a.txt.gz: is larger than 4.00 KiB", 0),
    "a member": ("a.tgz", gzip.compress(tar_of(("1.txt", ZEROS))), "a.tgz, 1.txt: is larger than 4.00 KiB", 0),
    "JSON in a tar": ("a.tar", tar_of(("1.txt", b"one"), ("2.json", b"{")), "a.tar, 2.json: malformed JSON", 1),
    "no Parquet": ("a.parquet", b"garbage", "a.parquet: is damaged after row 0", 0),
    "empty Parquet": ("a.parquet", b"", "a.parquet: is damaged after row 0", 0),
    "cut Parquet": ("a.parquet", lambda: parquet_of(["one"] * 99)[:-40], "a.parquet: is damaged after row 0", 0),
    "damaged Parquet": (
        "a.parquet", lambda: b"PAR1" + b"\xee" * 40 + parquet_of(["one"] * 9)[44:], "a.parquet: is damaged after", 0,
    ),
    "a long row": ("a.parquet", lambda: parquet_of(["one", "x" * 9999]), "a.parquet, row 1: is larger than", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_bad_file_is_named_in_one_line_or_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    name, content, said, before = DAMAGED[kind]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content())
    (tmp_path / "z.jsonl").write_bytes(GOOD)
    files, out = [tmp_path / name, tmp_path / "z.jsonl"], tmp_path / "out"
    with pytest.raises(SpecError) as caught:
        build(files, out, max_record_bytes=RECORD)
    assert said in str(caught.value) and name in str(caught.value) and caught.value.remedy
    assert {one.name for one in tmp_path.iterdir()} == {name, "z.jsonl"}  # nothing looks complete

    built = build(files, out, max_record_bytes=RECORD, skip_bad_records=True)
    assert built.documents == before + 1 or kind == "cut gz"
    assert built.skipped == (2 if kind == "size that lies much" else 1)  # the member, and where it should end
    assert said in built.first_skipped
    assert json.loads((tmp_path / "out.sums.json").read_bytes())["skipped_records"] == built.skipped
    assert open_pair(out).documents == built.documents


def test_the_limit_can_be_raised_and_skipping_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * 3000 + b'"}\n{\n' + GOOD)
    build_it = ["data", "build", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--processes", "1"]
    assert "a.jsonl:1: is larger than 1.00 KiB; raise --max-record" in error_line(
        run(*build_it, "--max-record", "1KiB")
    )
    assert "a.jsonl:2: malformed JSON" in error_line(run(*build_it))
    said = run(*build_it, "--on-bad-record", "skip").out
    assert "1 record skipped, the first: " in said and "a.jsonl:2: malformed JSON" in said
    assert run_json(*build_it, "--on-bad-record", "skip", "--max-record", "1KiB")["skipped"] == 2
    (tmp_path / "a.jsonl").write_bytes(b"{\n{\n")
    assert "a.jsonl: no record can be read; the first" in error_line(run(*build_it, "--on-bad-record", "skip"))


def test_half_a_character_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud800 x"}\n{"text": "\\ud83d\\ude00 \\udcff"}\n' + GOOD)
    built = build([tmp_path / "a.jsonl"], tmp_path / "out")
    tokens = open_pair(tmp_path / "out").tokens
    text = bytes(np.asarray(tokens[:][tokens[:] < 256], np.uint8)).decode()
    assert (built.repaired, text) == (2, "\ufffd x😀 \ufffdgood")


def test_bytes_that_are_no_text_stay_for_a_tokenizer_of_bytes_alone(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "\ufffd": 1, "</s>": 2}, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_bytes(b"a \xff")
    assert build([tmp_path / "a.txt"], tmp_path / "raw").repaired == 0
    assert open_pair(tmp_path / "raw").tokens[:].tolist() == [97, 32, 255, 256]
    assert build([tmp_path / "a.txt"], tmp_path / "own", tokenizer=str(tmp_path)).repaired == 1
    assert open_pair(tmp_path / "own").tokens[:].tolist() == [0, 1, 2]


def test_files_are_read_no_further_than_the_processes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a whole corpus would wait in memory."""
    (tmp_path / "a.jsonl").write_bytes(GOOD * 64 * 40)
    read, most = [0], []

    def progress(documents: int, tokens: int) -> None:
        most.append(read[0] - documents)

    from shardwise.run.data import build as module

    original = module._portions

    def counted(documents: object) -> object:
        for portion in original(documents):  # type: ignore[arg-type]
            read[0] += len(portion)
            yield portion

    monkeypatch.setattr(module, "_portions", counted)
    build([tmp_path / "a.jsonl"], tmp_path / "out", workers=2, progress=progress)
    assert max(most) <= 64 * 4


def test_a_tar_of_gnu_and_pax_names_is_read(tmp_path: Path) -> None:
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(tmp_path / f"{number}.tar", "w", format=form) as archive:
            for name in ("n" * 150 + ".txt", "é" * 90 + ".txt"):
                about = tarfile.TarInfo(name)
                about.size = 3
                archive.addfile(about, io.BytesIO(b"one"))
    built = build([tmp_path / "0.tar", tmp_path / "1.tar"], tmp_path / "out")
    assert (built.documents, built.skipped) == (4, 0)


def test_packed_numbers_of_an_index_that_lie_are_refused(tmp_path: Path) -> None:
    build([_written(tmp_path / "a.jsonl", GOOD)], tmp_path / "out")
    raw = (tmp_path / "out.idx").read_bytes()
    for field, value in ((18, 2**62), (26, 2**62), (18, 2**64 - 1)):
        (tmp_path / "out.idx").write_bytes(raw[:field] + struct.pack("<Q", value) + raw[field + 8 :])
        with pytest.raises(SpecError, match=r"its header says"):
            open_pair(tmp_path / "out")


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
