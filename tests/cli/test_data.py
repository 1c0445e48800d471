"""`shardwise data` as a user runs it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from cli.running import error_line, run, run_json
from shardwise.report.example import show_example
from shardwise.run.data.example import example

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


TALK = {"messages": [{"role": "user", "content": "hi\x1b[31m"}, {"role": "assistant", "content": "yes"}]}
SHORT = {"prompt": "two? ", "completion": "four"}
PREFERRED = {"prompt": "two? ", "chosen": "four", "rejected": "five"}


def shards_of(folder: Path, *records: object) -> str:
    path, out = folder / "a.jsonl", str(folder / "out")
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert run("data", "build", str(path), "--out", out, "--processes", "1").status == 0
    return out


def test_a_sequence_is_shown_with_its_mask(tmp_path: Path) -> None:
    out = shards_of(tmp_path, TALK, SHORT)
    assert run("data", "show", out, "--seq", "64").out.splitlines() == [
        "sequence 1 of 1: 64 tokens, 26 of them empty; the loss counts what is between {+ and +}",
        "── document 1: 30 tokens, 16 counted ──",
        "user: hi�[31m",
        "{+assistant: yes",
        "<end>+}",
        "── document 2: 10 tokens, 5 counted ──",
        "two? {+four<end>+}",
    ]
    shown = run_json("data", "show", out, "--seq", "64")
    assert [shown[key] for key in ("format", "number", "sequences", "seq", "left")] == [1, 1, 1, 64, 26]
    [asked, answered] = shown["documents"][1]["pieces"]
    assert (asked["text"], asked["counted"], answered["counted"]) == ("two? ", False, True)
    assert answered["tokens"] == [*b"four", 256]


def test_colours_are_for_terminals(tmp_path: Path) -> None:
    out = shards_of(tmp_path, SHORT, TALK)
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    show_example(example(out, 1, 64), terminal)
    written = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2mtwo? \x1b[0m\x1b[1;32mfour<end>\x1b[0m" in written
    assert "{+" not in written and "\x1b[31m" not in written


def test_both_answers_of_a_preference_and_plain_text_are_shown(tmp_path: Path) -> None:
    lines = run("data", "show", shards_of(tmp_path, PREFERRED), "--seq", "64").out.splitlines()
    assert lines[1:] == [
        "── document 1 (chosen): 10 tokens, 5 counted ──",
        "two? {+four<end>+}",
        "── document 2 (rejected): 10 tokens, 5 counted ──",
        "two? {+five<end>+}",
    ]
    (tmp_path / "text").mkdir()
    text = shards_of(tmp_path / "text", {"text": "one"}, {"text": "two"}, {"text": "three"})
    said = run("data", "show", text, "--seq", "4").out
    assert "sequence 1 of " in said and "{+" in said
    assert "--example: 99 is not there" in error_line(run("data", "show", text, "--example", "99", "--seq", "4"))
    assert "--seq: 0 is not a length" in error_line(run("data", "show", text, "--seq", "0"))
    assert "is not there" in error_line(run("data", "show", str(tmp_path / "none")))
