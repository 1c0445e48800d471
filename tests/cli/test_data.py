"""`shardwise data` as a user runs it."""

from __future__ import annotations

from pathlib import Path

from cli.running import error_line, run, run_json

NOTHING_LOST = {"skipped": 0, "first_skipped": "", "repaired": 0, "preferences": 0, "template": ""}


def test_text_becomes_shards_that_check(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "you"}\n{"text": "there"}\n', encoding="utf-8")
    out = str(tmp_path / "out")
    built = run_json(
        "data", "build", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--out", out, "--processes", "1"
    )
    assert built == {
        "format": 1,
        "prefix": out,
        "documents": 3,
        "tokens": 16,
        "counted": 16,
        "vocab": 257,
        **NOTHING_LOST,
    }
    assert run_json("data", "check", out) == [{"prefix": out, "documents": 3, "tokens": 16, "checksums": True}]
    assert "3 documents, 16 tokens; all checksums match" in run("data", "check", out).out


def test_damage_and_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    text, out = str(tmp_path / "a.txt"), str(tmp_path / "out")
    assert "--out: is missing" in error_line(run("data", "build", text))
    assert "--processes: 0" in error_line(run("data", "build", text, "--out", out, "--processes", "0"))
    assert "is not there" in error_line(run("data", "build", str(tmp_path / "no.txt"), "--out", out))
    assert "is not there" in error_line(run("data", "check", out))
    assert error_line(run("data", "build", text, "--out", "/proc/no/where", "--processes", "1"))
    assert run("data", "build", text, "--out", out, "--processes", "1").status == 0
    tokens = tmp_path / "out.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\0\0")
    assert "is damaged near byte 0" in error_line(run("data", "check", out))


def test_the_built_in_corpus(tmp_path: Path) -> None:
    built = run_json("data", "build", "python", "--out", str(tmp_path / "corpus"))
    assert built["tokens"] > 5e6
