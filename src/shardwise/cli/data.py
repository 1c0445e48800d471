"""`shardwise data`: builds token shards from text, checks shards, and shows what training reads."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.api.quantities import amount
from shardwise.cli.output import show_line
from shardwise.cli.parser import Parser
from shardwise.cli.streams import ReaderGone
from shardwise.report.console import versioned
from shardwise.report.progress import status
from shardwise.run.data.conversations import ANSWERS, FORMATS, RecordRules
from shardwise.spec.errors import SpecError, in_flags
from shardwise.spec.units import counted

_DOES = """build: reads text (.txt, .md, .py), JSON lines, Parquet and WebDataset tars, and writes OUT.bin and OUT.idx,
which Megatron-LM reads too. For records with a prompt and an answer, or with messages, only answers count in the loss.
check: reads every byte of shards and compares it with the checksums beside them.
show: prints a sequence as training reads it, with what the loss counts in colour."""
CORPUS = "python"


def run(arguments: list[str]) -> int:
    parser = Parser("data", _DOES, "shardwise data build python --out /tmp/corpus")
    parser.add_argument("what", choices=("build", "check", "show"))
    parser.add_argument("files", nargs="+", help=f"files to read, or {CORPUS}: the sources of Python's own library")
    parser.add_argument("--out", help="where to write the output; a name for the shards, without a suffix")
    parser.add_argument("--tokenizer", help="bytes, or a Hugging Face tokenizer.json or its folder (default bytes)")
    parser.add_argument("--field", default="text", help="field that holds the text in JSON or Parquet records")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="form of records (default: by their fields)")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="template of conversations in Jinja, or a folder that has one (default: the tokenizer's)",
    )
    parser.add_argument(
        "--answers",
        choices=ANSWERS,
        default="all",
        help="answers of a conversation that the loss counts: all or the last (default all)",
    )
    parser.add_argument(
        "--max-record", default="32MiB", metavar="SIZE", help="largest record that is read (default 32MiB)"
    )
    parser.add_argument(
        "--on-bad-record", choices=("stop", "skip"), default="stop",
        help="stop: end with an error; skip: leave it out, and say how many",
    )  # fmt: skip
    processes = "processes on this machine; they tokenize (default: one per core)"
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help=processes)
    parser.add_argument(
        "--example", type=int, default=1, metavar="N", help="number of the sequence to show (default 1)"
    )
    parser.add_argument("--seq", type=int, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    if parsed.processes < 1:
        raise SpecError("--processes", str(parsed.processes), "use 1 or more")
    if parsed.what == "check":
        return _check(parsed.files, parsed)
    if parsed.what == "show":
        return _show(parsed.files, parsed)
    if parsed.out is None:
        raise SpecError("--out", "is missing", "name the shards to write: --out corpus")
    return _build(_files(parsed.files), Path(parsed.out), parsed)


def _files(names: list[str]) -> list[Path]:
    from shardwise.run.data.sources import standard_library

    return [path for name in names for path in (standard_library() if name == CORPUS else [Path(name)])]


def _build(files: list[Path], out: Path, parsed: argparse.Namespace) -> int:
    from shardwise.run.data.build import build
    from shardwise.run.data.token_files import BYTES

    settings: dict[str, Any] = {"tokenizer": parsed.tokenizer or BYTES, "template": parsed.chat_template}
    settings["records"] = RecordRules(parsed.field, parsed.format, parsed.answers)
    settings["workers"] = parsed.processes
    settings["max_record_bytes"] = int(amount(parsed.max_record, "bytes", "--max-record", "32MiB"))
    settings["skip_bad_records"] = parsed.on_bad_record == "skip"
    try:
        with status("reading", quiet=parsed.json) as update:
            built = build(files, out, **settings, progress=lambda *counts: update(_size(*counts)))
    except OSError as error:
        raise SpecError(str(error.filename or out), error.strerror or str(error), "choose another place") from None
    share = "" if built.counted == built.tokens else f", {built.counted:,} of them counted by the loss"
    documents = _size(built.documents, built.tokens)
    if built.preferences:
        documents = f"{counted(built.preferences, 'preference')}, {counted(built.tokens, 'token')}"
    line = f"{out}: {documents}{share}, vocabulary {built.vocab:,}"
    if built.template:
        line += f"\nconversations written by the chat template of {built.template}"
    if built.repaired:
        line += f"\n{counted(built.repaired, 'record')} had bytes that are not text: replaced by U+FFFD"
    first_skipped = in_flags(built.first_skipped)
    if built.skipped:
        line += f"\n{counted(built.skipped, 'record')} skipped, the first: {first_skipped}"
    data = {**asdict(built), "prefix": str(built.prefix), "first_skipped": first_skipped}
    show_line(parsed, line, versioned("data build", data))
    return 0


def _check(prefixes: list[str], parsed: argparse.Namespace) -> int:
    from shardwise.run.data.token_files import check_sums, open_pair

    data, lines = [], []
    for prefix in prefixes:
        pair, summed = open_pair(prefix), check_sums(prefix)
        documents, tokens = pair.documents, len(pair.tokens)
        how = "all checksums match" if summed else "sizes match; there are no checksums"
        lines.append(f"{prefix}: {_size(documents, tokens)}; {how}")
        data.append({"prefix": prefix, "documents": documents, "tokens": tokens, "checksums": summed})
    show_line(parsed, "\n".join(lines), data)
    return 0


def _show(prefixes: list[str], parsed: argparse.Namespace) -> int:
    from shardwise.report.example import example_data, show_example
    from shardwise.run.data.example import example

    if len(prefixes) > 1:
        raise SpecError("files", f"{len(prefixes)} were named, and one is shown", "name one pair")
    shown = example(prefixes[0], parsed.example, parsed.seq, parsed.tokenizer)
    with suppress(ReaderGone):
        if parsed.json:
            print(json.dumps(example_data(shown)))
        else:
            show_example(shown)
    return 0


def _size(documents: int, tokens: int) -> str:
    return f"{counted(documents, 'document')}, {counted(tokens, 'token')}"
