"""Tables as Markdown and as CSV: every verb that offers them, and no verb whose tables would be left out."""

from __future__ import annotations

import csv
import io

import pytest

from cli.running import run
from shardwise.cli.main import VERBS

PRINT_NO_TABLES = {"completion", "data", "convert", "export", "generate", "ui"}
NOT_OFFERED = {"doctor"}
JOB = ("--model", "llama3-8b", "--cluster", "dgx-h100:1", "--global-batch", "16", "--seq", "2048")
COMMANDS = {
    "plan": ("plan", *JOB, "--tp", "8", "--out", "-"),
    "analyze": ("analyze", *JOB, "--tp", "8"),
    "explain": ("explain", "zero", "--params", "7.5e9", "--dp", "64"),
    "validate": ("validate", "collectives"),
    "list": ("list", "links"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_offers_both_where_tables_are_printed(verb: str) -> None:
    words = run(*(("explain", "zero") if verb == "explain" else (verb,)), "--help").out
    assert ("--markdown" in words) == ("--csv" in words) == (verb not in PRINT_NO_TABLES | NOT_OFFERED)


@pytest.mark.quick(2)
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_table_is_well_formed(verb: str) -> None:
    markdown = run(*COMMANDS[verb], "--markdown")
    assert markdown.status == 0
    lines = markdown.out.splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("| ---")]
    assert rules
    for index in rules:
        assert lines[index - 1].replace(r"\|", "").count("|") == lines[index].count("|")
    found = run(*COMMANDS[verb], "--csv")
    tables = [part for part in found.out.split("\n\n") if part.strip()]
    assert found.status == 0 and tables
    for table in tables:
        rows = list(csv.reader(io.StringIO("".join(line + "\n" for line in table.splitlines() if line[:1] != "#"))))
        assert len({len(row) for row in rows}) == 1
